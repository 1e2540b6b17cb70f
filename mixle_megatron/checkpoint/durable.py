"""Files and folders that a crash leaves either as they were or as they were meant to be.

What is written is written under another name, brought to the disk, and renamed; a rename counts once
the folder that holds the name is on the disk too. What is deleted is renamed first, so that its name
never stands for a part of it. A crash can leave names with one of the endings below, which
:func:`recover` clears: no more than one process at a time may call what changes a folder here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from mixle_megatron.checkpoint.iterations import TRACKER, iteration_name, step_of, steps_in
from mixle_megatron.errors import Fault, refuse_if_any

WRITING = ".writing"
"""Ending of what is being written."""

PREVIOUS = ".previous"
"""Ending of what gives way to what has been written, until that is in its place."""

DELETING = ".deleting"
"""Ending of what is being deleted."""


# Onto the disk


def sync_file(path: Path) -> None:
    """Wait until the file's content is on the disk."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Wait until the names in the folder are on the disk; not their contents."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def sync_tree(folder: Path) -> None:
    """Wait until everything below ``folder``, and its own names, are on the disk."""
    for below, _, files in os.walk(folder, topdown=False):
        for file in files:
            sync_file(Path(below, file))
        sync_folder(Path(below))


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# At once


def rename(source: Path, target: Path) -> None:
    """Rename, lastingly in the new folder; a file that has the new name gives way."""
    os.replace(source, target)
    sync_folder(target.parent)


def write_text(path: Path, text: str) -> None:
    """Replace a file by ``text``: a reader sees the old one or the new one whole, also after a crash."""
    aside = _beside(path, WRITING)
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    rename(aside, path)


def publish(aside: Path, final: Path) -> None:
    """Give the folder ``aside``, which is on the disk, its final name.

    A folder that has the name already is deleted once the new one is in its place.
    """
    previous = _beside(final, PREVIOUS)
    if final.exists():
        _remove(previous)
        rename(final, previous)
    rename(aside, final)
    _remove(previous)


def delete(folder: Path) -> None:
    """Delete a folder; after a crash it is there whole, or under the name of what is being deleted."""
    aside = _beside(folder, DELETING)
    _remove(aside)
    rename(folder, aside)
    _remove(aside)


def recover(final: Path) -> None:
    """Clear what a crash left of writing, replacing or deleting ``final``.

    Where the crash came between the two renames of :func:`publish`, the previous one gets its name back.
    """
    previous = _beside(final, PREVIOUS)
    if previous.exists() and not final.exists():
        rename(previous, final)
    for ending in (WRITING, PREVIOUS, DELETING):
        _remove(_beside(final, ending))


def recover_all(checkpoints: Path) -> None:
    """:func:`recover` every checkpoint, and the tracker file, that a crash left something of."""
    if not checkpoints.is_dir():
        return
    endings = (WRITING, PREVIOUS, DELETING)
    names = {Path(name).stem for name in os.listdir(checkpoints) if name.endswith(endings)}
    for name in sorted(names):
        if name == TRACKER or step_of(name) is not None:
            recover(checkpoints / name)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# Retention


def deletable(steps: Iterable[int], keep: int, keep_every: int = 0) -> list[int]:
    """The steps whose checkpoints need not stay, in order.

    Args:
        steps: those of the whole checkpoints.
        keep: how many of the newest stay.
        keep_every: those whose step is a multiple of it stay too; 0 for none.

    Raises:
        Refused: ``keep`` is below 1, or ``keep_every`` below 0.
    """
    refuse_if_any(
        Fault(field, value, f"must be at least {least}", f"use {least}")
        for field, value, least in (
            ("checkpoint.keep", keep, 1),
            ("checkpoint.keep_every", keep_every, 0),
        )
        if value < least
    )
    older = sorted(set(steps))[:-keep]
    return [step for step in older if not keep_every or step % keep_every]


def delete_old(
    checkpoints: Path, announced: int, is_whole: Callable[[Path], bool], *, keep: int, keep_every: int = 0
) -> list[int]:
    """Delete what :func:`deletable` names of the whole checkpoints up to ``announced``.

    One that is damaged stays, and counts for none of those that are kept; so does what is newer.

    Args:
        checkpoints: the folder that holds them.
        announced: the step of the newest, which the caller has verified and the tracker file names.
        is_whole: whether an older checkpoint is; sizes suffice.
        keep: how many of the newest stay.
        keep_every: those whose step is a multiple of it stay too; 0 for none.

    Returns:
        The deleted steps.
    """
    older = [step for step in steps_in(checkpoints) if step < announced]
    whole = [step for step in older if is_whole(checkpoints / iteration_name(step))]
    deleted = deletable([*whole, announced], keep, keep_every)
    for step in deleted:
        delete(checkpoints / iteration_name(step))
    return deleted
