"""Which capabilities of a host evidence covers, and why not the rest. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from mixle_megatron.capability.decide import CapabilityTable
from mixle_megatron.evidence.claims import CLAIMS, FEATURES, combination
from mixle_megatron.evidence.record import Evidence

_COMBINATIONS = {claim.name for claim in CLAIMS if claim.kind == "combination"}


def uncovered(table: CapabilityTable, evidence: Evidence) -> dict[str, str]:
    """The executed capabilities that evidence does not cover, each with the reason.

    A precision is covered with every axis that is covered, or not at all: mixle's contract cannot say of an
    axis that it is executed in some precisions only.
    """
    found = {axis: why for axis in table.executed("axis") if (why := _why_not(axis, evidence))}
    axes = [axis for axis in table.executed("axis") if axis not in found]
    for precision in table.executed("precision"):
        why = "; ".join(_of_a_precision(precision, axes, evidence))
        if why:
            found[precision] = why
    for feature in table.executed("feature"):
        why = _why_not(FEATURES[feature], evidence)
        if why:
            found[feature] = why
    return found


def _of_a_precision(precision: str, axes: list[str], evidence: Evidence) -> Iterator[str]:
    combined = [combination(axis, precision) for axis in axes]
    for name in (precision, *(each for each in combined if each in _COMBINATIONS)):
        why = _why_not(name, evidence)
        if why:
            yield why if name == precision else f"{name}: {why}"


def _why_not(name: str, evidence: Evidence) -> str:
    """Why evidence does not show a claim; empty where it does."""
    shown = evidence[name]
    if shown is None:
        return "not verified on this host"
    return f"withdrawn: {shown.problem}" if shown.withdrawn else shown.problem
