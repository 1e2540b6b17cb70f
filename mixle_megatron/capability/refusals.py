"""The faults of a precision and a device that this host cannot have. No torch."""

from __future__ import annotations

from mixle_megatron.capability.decide import EXECUTED, NOT_RUN, decide
from mixle_megatron.capability.facts import HostFacts
from mixle_megatron.capability.lacks import Lack, cuda_lacks, precision_lacks
from mixle_megatron.capability.requirements import found_on
from mixle_megatron.errors import Fault
from mixle_megatron.precision import ALIASES, RECIPES, recipe
from mixle_megatron.rules.nearest import listed
from mixle_megatron.rules.verdict import NOT_HERE


def host_faults(
    precision: str, device: str, facts: HostFacts, *, device_field: str = "device", field: str = "precision"
) -> list[Fault]:
    """What keeps this host from running a precision on a device.

    Args:
        precision: its name; of one that does not exist nothing is said here.
        device: ``cpu``, ``cuda``, or ``auto`` for CUDA where ranks can run on it, else the CPU.
        facts: those of the host.
        device_field: what the caller calls the device.
        field: what the caller calls the precision.
    """
    missing = [
        Fault(found.name, found.found, NOT_HERE + found.problem, found.remedy)
        for found in found_on(facts)
        if not found.met
    ]
    no_cuda = cuda_lacks(facts)
    if device == "cuda" and no_cuda:
        return missing + [
            Fault(device_field, device, NOT_HERE + lack.reason, "use cpu, or " + lack.remedy)
            for lack in no_cuda
        ]
    if precision not in RECIPES and precision not in ALIASES:
        return missing
    if device == "auto":
        device = "cpu" if no_cuda else "cuda"
    lacks = _lacks(precision, device, facts)
    if not lacks:
        return missing
    instead = _instead(device, facts)
    return missing + [
        Fault(field, precision, NOT_HERE + lack.reason, _either(instead, lack)) for lack in lacks
    ]


def _lacks(precision: str, device: str, facts: HostFacts) -> list[Lack]:
    """What is missing on the device; of what no CPU has, what is missing for it on CUDA."""
    needs_cuda = recipe(precision).quantised
    return precision_lacks(precision, "cuda" if needs_cuda and cuda_lacks(facts) else device, facts)


def _instead(device: str, facts: HostFacts) -> str:
    """The precisions that the device has, as a remedy."""
    table = decide(facts)
    runs = [
        one.name
        for one in table.capabilities
        if one.kind == "precision" and one.standings[device].status in (EXECUTED, NOT_RUN)
    ]
    return f"use {listed(runs)}" if runs else ""


def _either(instead: str, lack: Lack) -> str:
    return f"{instead}, or {lack.remedy}" if instead else lack.remedy
