"""From the facts of a host to what it executes: a pure function, and the table that it makes.

A capability is executed where a test of this package has executed it on that kind of device. What is
built and was never run on CUDA is said to be so, and claimed by nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mixle_megatron.capability.facts import HostFacts
from mixle_megatron.capability.lacks import Lack, cuda_lacks, precision_lacks
from mixle_megatron.capability.requirements import Found, found_on
from mixle_megatron.precision import NAMES, recipe
from mixle_megatron.rules.plan import AXES_NOT_EXECUTED

EXECUTED = "executed"
NOT_RUN = "not_run"
WITHHELD = "withheld"
UNSUPPORTED = "unsupported"

STATUSES = {
    EXECUTED: "a test of this version executes it on this kind of device",
    NOT_RUN: "it is built, this host has what it needs, and no test of this version has run it there; "
    "it is not refused",
    WITHHELD: "this host has what it needs, and this version does not execute it; it is refused",
    UNSUPPORTED: "this host lacks something for it; it is refused",
}
"""How a capability can stand on a kind of device, best first."""

_A_LATER_VERSION = "a version of this package that has run it"

DEVICES = ("cpu", "cuda")
AXES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "etp")


@dataclass(frozen=True)
class Standing:
    """How a capability stands on one kind of device.

    Attributes:
        status: a key of :data:`STATUSES`.
        reason: why, in words.
        remedy: what would make it executed, or empty.
    """

    status: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class Capability:
    """One capability of a host.

    Attributes:
        name: of an axis, of a precision, or a field of mixle's ``BackendCapabilities``.
        kind: ``axis``, ``precision`` or ``feature``.
        standings: by kind of device.
    """

    name: str
    kind: str
    standings: Mapping[str, Standing]

    @property
    def executes(self) -> bool:
        """Whether this host executes it, on whatever device it has."""
        return any(standing.status == EXECUTED for standing in self.standings.values())

    @property
    def telling(self) -> Standing:
        """The standing that answers for the whole host: the best one, and of two alike that on CUDA."""
        best_first = list(STATUSES)
        return min(reversed(self.standings.values()), key=lambda one: best_first.index(one.status))

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for ``--json``."""
        return {
            "name": self.name,
            "kind": self.kind,
            "executes": self.executes,
            "reason": self.telling.reason,
            "remedy": self.telling.remedy,
            "devices": {device: asdict(standing) for device, standing in self.standings.items()},
        }


@dataclass(frozen=True)
class CapabilityTable:
    """Everything that a host executes or does not.

    Attributes:
        requirements: what training needs, beside what the host has.
        capabilities: axes, precisions and features, in the order in which they are shown.
    """

    requirements: tuple[Found, ...]
    capabilities: tuple[Capability, ...]

    @property
    def trains(self) -> bool:
        """Whether the host can train at all."""
        return all(found.met for found in self.requirements)

    def __getitem__(self, name: str) -> Capability:
        return next(capability for capability in self.capabilities if capability.name == name)

    def executed(self, kind: str) -> tuple[str, ...]:
        """Names of the executed capabilities of a kind."""
        found = (one for one in self.capabilities if one.kind == kind and one.executes)
        return tuple(one.name for one in found)


def decide(facts: HostFacts) -> CapabilityTable:
    """What a host with these facts executes, and why not the rest."""
    requirements = found_on(facts)
    unmet = [Lack(found.problem, found.remedy) for found in requirements if not found.met]

    def standings(on_cpu: Standing, on_cuda: Standing) -> dict[str, Standing]:
        if unmet:
            return dict.fromkeys(DEVICES, _unsupported(unmet))
        return {"cpu": on_cpu, "cuda": on_cuda}

    no_cuda = cuda_lacks(facts)
    on_cuda = _unsupported(no_cuda) if no_cuda else _not_run("")
    capabilities = [
        *(Capability(axis, "axis", standings(*_axis(axis, on_cuda))) for axis in AXES),
        *(Capability(name, "precision", standings(*_precision(name, facts))) for name in NAMES),
        *(Capability(name, "feature", standings(*_feature(name, on_cuda))) for name in _FEATURES),
    ]
    return CapabilityTable(requirements, tuple(capabilities))


def _axis(axis: str, on_cuda: Standing) -> tuple[Standing, Standing]:
    if axis in AXES_NOT_EXECUTED:
        withheld = Standing(WITHHELD, AXES_NOT_EXECUTED[axis], "use 1")
        return withheld, withheld
    return Standing(EXECUTED, "every plan of 2 and of 4 ranks is tested against one rank"), on_cuda


def _precision(name: str, facts: HostFacts) -> tuple[Standing, Standing]:
    return _precision_on("cpu", name, facts), _precision_on("cuda", name, facts)


def _precision_on(device: str, name: str, facts: HostFacts) -> Standing:
    precision = recipe(name, [each.compute_capability for each in facts.cuda.devices])
    lacks = precision_lacks(name, device, facts)
    if lacks:
        withheld = device == "cuda" and precision.withheld
        return _unsupported([*lacks, *([Lack(withheld, _A_LATER_VERSION)] if withheld else [])])
    stands_for = "" if precision.name == name else f"{name} is {precision.name} here; "
    if device in precision.executed_on:
        return Standing(EXECUTED, f"{stands_for}plans and optimizers are tested in it")
    if precision.executed_on:
        return _not_run(stands_for)
    supported = "this hardware and Transformer Engine have it; " if precision.quantised else ""
    return Standing(
        WITHHELD,
        f"{stands_for}{supported}{precision.withheld}",
        _A_LATER_VERSION,
    )


_FEATURES = {
    "distributed_optimizer": Standing(EXECUTED, "every plan uses it, and every test of a plan"),
    "reshardable_checkpoint": Standing(
        EXECUTED, "checkpoints are tested to load under other plans, and other numbers of ranks"
    ),
    "elastic_restart": Standing(
        EXECUTED,
        "with plan.elastic a run goes on from its newest checkpoint on as many ranks as its launcher starts, "
        "with the same global batch; tested by killing one rank of four for good",
    ),
}


def _feature(name: str, on_cuda: Standing) -> tuple[Standing, Standing]:
    standing = _FEATURES[name]
    return standing, (on_cuda if standing.status == EXECUTED else standing)


def _not_run(prefix: str) -> Standing:
    return Standing(
        NOT_RUN,
        f"{prefix}built, and run on CUDA by no test of this version",
        "compare the first losses of a run with those of the same run on the CPU",
    )


def _unsupported(lacks: Iterable[Lack]) -> Standing:
    lacking = tuple(lacks)
    return Standing(
        UNSUPPORTED,
        "; ".join(lack.reason for lack in lacking),
        "; ".join(dict.fromkeys(lack.remedy for lack in lacking)),
    )
