"""How a run's checkpoints are named: Megatron-LM's layout, which its loader and converters expect."""

from __future__ import annotations

import re
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
"""The file beside the checkpoints that names the step of the newest."""

RELEASE = "release"
"""What Megatron-LM calls a checkpoint of no step, in the tracker file and as its folder."""

_ITERATION = re.compile(r"iter_(\d{7,})")


def iteration_name(step: int) -> str:
    """The name of the folder of ``step``."""
    return f"iter_{step:07d}"


def step_of(name: str) -> int | None:
    """The step whose folder has this name; None if it is no checkpoint's."""
    match = _ITERATION.fullmatch(name)
    if match is None or iteration_name(int(match[1])) != name:
        return None
    return int(match[1])


def steps_in(checkpoints: Path) -> list[int]:
    """The steps that have a folder in ``checkpoints``, whole or not, in order; none if it is not there."""
    if not checkpoints.is_dir():
        return []
    steps = (step_of(entry.name) for entry in checkpoints.iterdir() if entry.is_dir())
    return sorted(step for step in steps if step is not None)


def named_by_tracker(checkpoints: Path) -> str | None:
    """What the tracker file says, without the white space around it; None if there is none.

    Bytes that are no text come as question marks, so that they name no step.
    """
    tracker = checkpoints / TRACKER
    if not tracker.is_file():
        return None
    return tracker.read_text(encoding="utf-8", errors="replace").strip()
