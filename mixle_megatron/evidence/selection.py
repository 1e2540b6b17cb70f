"""Which claims are to be verified on a host: all that it has, or those that are named. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from mixle_megatron.capability.decide import EXECUTED, NOT_RUN, decide
from mixle_megatron.capability.facts import HostFacts
from mixle_megatron.capability.lacks import cuda_lacks
from mixle_megatron.capability.refusals import host_faults
from mixle_megatron.errors import Fault, refuse_if_any
from mixle_megatron.evidence.claims import CLAIMS, DP_RESHARDABLE, FULLY_RESHARDABLE, Claim, combination
from mixle_megatron.rules.nearest import listed

DEVICES = ("auto", "cpu", "cuda")


def chosen_device(asked: str, facts: HostFacts, environment: Mapping[str, str] = os.environ) -> str:
    """``cpu`` or ``cuda``: what was asked for, or CUDA where ranks can run on it.

    Raises:
        Refused: the host cannot train there, or this process is a rank of some launcher's.
    """
    if asked not in DEVICES:
        refuse_if_any([Fault("--device", asked, "is not known", f"use {listed(DEVICES)}")])
    faults = host_faults("fp32", asked, facts, device_field="--device")
    if "RANK" in environment:
        rule = "is set, but ranks for this are started here"
        faults.append(Fault("RANK", environment["RANK"], rule, "run it without torchrun, mpirun or srun"))
    refuse_if_any(faults)
    if asked == "auto":
        return "cpu" if cuda_lacks(facts) else "cuda"
    return asked


def selected(
    facts: HostFacts,
    device: str,
    *,
    axes: Sequence[str] = (),
    precisions: Sequence[str] = (),
    checkpoints: Sequence[str] = (),
) -> list[Claim]:
    """The claims of these names, and the combinations of the axes and precisions among them.

    Args:
        facts: those of the host.
        device: ``cpu`` or ``cuda``.
        axes: names of axes.
        precisions: names of precisions.
        checkpoints: names of optimizer formats. Where none of the three is given, all there are.

    Raises:
        Refused: a name is none of a claim of this host; every such name is a fault.
    """
    here = _claimed(facts, device)
    asked = {"axis": list(axes), "precision": list(precisions), "checkpoint": list(checkpoints)}
    refuse_if_any(
        Fault(
            _OPTIONS[kind],
            name,
            f"is no {_IN_WORDS[kind]} of this host",
            f"use one of {', '.join(here[kind])}",
        )
        for kind, names in asked.items()
        for name in names
        if name not in here[kind]
    )
    wanted = asked if any(asked.values()) else here
    names = {name for kind in wanted.values() for name in kind}
    names |= {combination(axis, each) for axis in wanted["axis"] for each in wanted["precision"]}
    return [claim for claim in CLAIMS if claim.name in names]


_OPTIONS = {"axis": "--axes", "precision": "--precisions", "checkpoint": "--checkpoints"}
_IN_WORDS = {"axis": "axis", "precision": "precision", "checkpoint": "optimizer format"}


def _claimed(facts: HostFacts, device: str) -> dict[str, list[str]]:
    """Names of what is claimed on the device, or is built for it, by kind."""
    known = {claim.name for claim in CLAIMS}
    runs: dict[str, list[str]] = {
        "axis": [],
        "precision": [],
        "checkpoint": [FULLY_RESHARDABLE, DP_RESHARDABLE],
    }
    for capability in decide(facts).capabilities:
        if capability.name in known and capability.standings[device].status in (EXECUTED, NOT_RUN):
            runs[capability.kind].append(capability.name)
    return runs
