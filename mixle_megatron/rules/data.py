"""What the ``data`` section and the sets of an evaluation must satisfy by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mixle_megatron.errors import Fault
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules.verdict import NOT_EXECUTED

HELD_OUT = "validation"
"""The name of the set that the data section itself holds out."""

_KINDS = ("paths", "blend", "path")


def data_faults(section: Any) -> list[Fault]:
    """What is wrong with a ``data`` section whatever is on the disk."""
    return list(_indexed_faults(section)) if section.source == "indexed" else []


def _indexed_faults(section: Any) -> Iterator[Fault]:
    if section.split[0] == 0:
        yield Fault("data.split", section.split, "leaves nothing to train on", "use [0.98, 0.01, 0.01]")
    yield from _twice(section.blend, "data.blend")


def document_attention_faults(plan: PlanRecord, field: str) -> list[Fault]:
    """Whether ranks under a plan can attend within a document alone; ``field`` is what asks for it."""
    if plan.cp == 1:
        return []
    rule = f"{NOT_EXECUTED}ranks that share a sequence (plan.cp={plan.cp}) attend causally over all of it"
    return [Fault(field, True, rule, "use plan.cp=1, or leave it out")]


def _twice(blend: Any, field: str) -> Iterator[Fault]:
    """Corpora that a blend names again; only what the files are tells whether two names are of one."""
    seen: set[str] = set()
    for number, entry in enumerate(blend):
        if entry.path in seen:
            rule = "is in the blend already"
            yield Fault(f"{field}.{number}.path", entry.path, rule, "add up its weights")
        seen.add(entry.path)


def validation_set_faults(sets: Mapping[str, Any]) -> list[Fault]:
    """What is wrong with ``evaluation.sets`` whatever is on the disk."""
    faults = []
    for name, section in sets.items():
        field = f"evaluation.sets.{name}"
        stated = [kind for kind in _KINDS if getattr(section, kind) is not None]
        if len(stated) != 1:
            rule = f"has {' and '.join(stated) or 'nothing to evaluate on'}"
            faults.append(Fault(field, None, rule, "give it one of paths, blend and path"))
        if name == HELD_OUT:
            rule = "is the name of what the data section holds out"
            faults.append(Fault(field, None, rule, "give it another name"))
        faults += _twice(section.blend or (), f"{field}.blend")
    return faults
