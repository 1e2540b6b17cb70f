"""Which checkpoint a run goes on from: the newest whole one.

:func:`find_newest` only reads, and :func:`settle` only acts on what was found. One process does both
and tells the others; ranks that each looked for themselves might see different things.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mixle_megatron.checkpoint.completeness import damage
from mixle_megatron.checkpoint.damage import Damage
from mixle_megatron.checkpoint.durable import rename, write_text
from mixle_megatron.checkpoint.iterations import TRACKER, iteration_name, named_by_tracker, steps_in
from mixle_megatron.errors import CheckpointError

DAMAGED = ".damaged"
"""Ending of a checkpoint that was set aside."""

_STEP = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class Choice:
    """What a run goes on from.

    Attributes:
        step: the step of the newest whole checkpoint; None where there has been none yet.
        damaged: newer ones that are not whole, newest first: step, and what is wrong with it.
        warnings: what else its user should know, one sentence each.
    """

    step: int | None
    damaged: tuple[tuple[int, str], ...] = ()
    warnings: tuple[str, ...] = ()


def find_newest(checkpoints: Path, *, checksums: bool = True) -> Choice:
    """The newest whole checkpoint in a run's folder ``checkpoints``; nothing is changed.

    A checkpoint without a manifest, as Megatron-Core alone writes it, is judged by its completeness.

    Args:
        checkpoints: the folder that holds ``iter_0000100`` and the tracker file; it may be missing.
        checksums: whether to read every file of the newest ones, or to compare sizes only.

    Raises:
        CheckpointError: there are checkpoints, or the tracker file names one, and none is whole.
    """
    judge = partial(damage, checksums=checksums, needs_manifest=False)
    steps, named = steps_in(checkpoints), named_by_tracker(checkpoints)
    return choose(steps, named, lambda step: judge(checkpoints / iteration_name(step)))


def choose(steps: Iterable[int], named: str | None, damage_of: Callable[[int], Sequence[Damage]]) -> Choice:
    """The choice among ``steps``; each is judged once, from the newest down to the first whole one.

    Args:
        steps: those that have a checkpoint's folder.
        named: what the tracker file says; None where there is none.
        damage_of: everything that is wrong with the checkpoint of a step.

    Raises:
        CheckpointError: as :func:`find_newest`.
    """
    steps = sorted(set(steps), reverse=True)
    damaged: list[tuple[int, str]] = []
    for step in steps:
        found = damage_of(step)
        if not any(one.prevents_loading for one in found):
            strays = [f"checkpoint {step}: {one}" for one in found]
            return Choice(step, tuple(damaged), tuple(strays + _tracker_warnings(named, step, steps)))
        damaged.append((step, "; ".join(map(str, found))))
    if damaged or named is not None:
        raise CheckpointError(_none_whole(damaged, named))
    return Choice(None)


def settle(checkpoints: Path, choice: Choice) -> list[str]:
    """Set the damaged ones aside and let the tracker file name the choice; one process calls it.

    Each is renamed, with a text file of that name beside it that says why; nothing is deleted.

    Returns:
        What was done and what else is odd, one sentence each, to be shown as warnings.
    """
    said = [_set_aside(checkpoints, step, reason) for step, reason in choice.damaged]
    if choice.step is not None and named_by_tracker(checkpoints) != str(choice.step):
        write_text(checkpoints / TRACKER, str(choice.step))
    return [*said, *choice.warnings]


def _set_aside(checkpoints: Path, step: int, reason: str) -> str:
    name = iteration_name(step) + DAMAGED
    number = 1
    while (checkpoints / name).exists():
        number += 1
        name = f"{iteration_name(step)}{DAMAGED}.{number}"
    write_text(checkpoints / f"{name}.txt", reason + "\n")
    rename(checkpoints / iteration_name(step), checkpoints / name)
    return f"checkpoint {step} is damaged and was set aside as {checkpoints / name}: {reason}"


def _tracker_warnings(named: str | None, chosen: int, steps: Sequence[int]) -> list[str]:
    """Where the tracker file says otherwise, for another reason than damage."""
    if named is None:
        return [f"{TRACKER} is missing; going on from step {chosen}, the newest whole checkpoint"]
    if not _STEP.fullmatch(named):
        return [f"{TRACKER} holds {named!r}, which is no step; going on from step {chosen}"]
    if int(named) not in steps:
        return [f"{TRACKER} names step {named}, which has no checkpoint; going on from step {chosen}"]
    if int(named) < chosen:
        return [f"{TRACKER} names step {named}; going on from step {chosen}, which is newer and whole"]
    return []


def _none_whole(damaged: Sequence[tuple[int, str]], named: str | None) -> str:
    remedy = "put a whole one back, or start anew with --no-resume"
    if not damaged:
        return f"{TRACKER} names {named!r}, but there is no checkpoint; {remedy}"
    lines = [f"no checkpoint is whole; {remedy}", *(f"  step {step}: {reason}" for step, reason in damaged)]
    return "\n".join(lines)
