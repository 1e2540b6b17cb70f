"""Writing one rank's files of a checkpoint, in this process or in one that is forked from it.

Megatron writes each file; the loop over them is here. Megatron's own starts more processes in 0.16, which
would outlive the one that is killed, and in 0.19 loses what went wrong: the trainer would be told that
"an assertion failed", or, of a save that waits, nothing at all while its other ranks hang.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from mixle_megatron.checkpoint.manifest import Table, checksum_files

_NICENESS = 10
_LOOKS_EVERY = 0.2
"""Seconds between two looks of a writer at whether its trainer is still there."""


@dataclass(frozen=True)
class Written:
    """What a rank wrote.

    Attributes:
        results: Megatron's write results by the number of the file.
        table: the files with their checksums.
    """

    results: dict[int, list[Any]]
    table: Table


@dataclass(frozen=True)
class Failed:
    """Why a rank could not write, in words."""

    reason: str


class Outcome(Protocol):
    """Where a writer leaves what came of it, for the rank that it writes for."""

    def put(self, outcome: Written | Failed) -> None:
        """Leave it; the writer does so once, as the last thing."""

    def take(self) -> Written | Failed:
        """What was left; to be called once, when the writer has ended."""


class LocalOutcome:
    """Of a writer in this process."""

    def __init__(self) -> None:
        self._outcome: Written | Failed = Failed("nothing was written")

    def put(self, outcome: Written | Failed) -> None:
        """Leave it."""
        self._outcome = outcome

    def take(self) -> Written | Failed:
        """What was left."""
        return self._outcome


class ForkedOutcome:
    """Of a writer that is forked later: a piece of memory that both have, as large as need be.

    A pipe would hold 64 KiB, and a writer that has more to say would wait for a trainer that waits
    for it to end.

    Attributes:
        process: the writer, once it is there.
    """

    def __init__(self) -> None:
        self.process: Any = None
        self._memory = os.fdopen(os.memfd_create("checkpoint"), "w+b")

    def put(self, outcome: Written | Failed) -> None:
        """Leave it; the process may end at once."""
        pickle.dump(outcome, self._memory)
        self._memory.flush()

    def take(self) -> Written | Failed:
        """What was left, or how the writer ended that left nothing whole."""
        with self._memory:
            self._memory.seek(0)
            try:
                return pickle.load(self._memory)
            except (EOFError, pickle.UnpicklingError):
                return Failed(f"the process that wrote its files {_end_of(self.process)}")

    def wait_for_writer(self, seconds: float) -> None:
        """Wait until the writer has ended, but no longer than so many seconds."""
        if self.process is not None:
            self.process.join(seconds)

    def abandon(self) -> None:
        """Wait for the end of a writer that was killed, and take nothing from it."""
        if self.process is not None:
            self.process.join()
        self._memory.close()


def _end_of(process: Any) -> str:
    if process.exitcode is not None and process.exitcode < 0:
        return f"was killed by {signal.Signals(-process.exitcode).name}"
    return f"ended with exit code {process.exitcode}"


def write_shards(
    outcome: Outcome, transforms: list[Any], _rank: int, buckets: list[Any], _results: Any
) -> None:
    """Write, sync and checksum this rank's files; whatever happens is left in ``outcome``.

    Args:
        outcome: see there.
        transforms: torch's transformations of what is written, which Megatron passes on.
        buckets: Megatron's: of each file its path, its name, and what is written into it.
    """
    try:
        results = {number: _write(transforms, number, bucket) for number, bucket in enumerate(buckets)}
        folder, names = Path(buckets[0][0]).parent, [name for _, name, _ in buckets]
        outcome.put(Written(results, checksum_files(folder, names)))
    except OSError as error:
        outcome.put(Failed(str(error)))
    except Exception as error:
        outcome.put(Failed(repr(error)))


def write_as_child(trainer: int, write: Callable[..., None], *arguments: Any) -> None:
    """Call ``write`` as all that a forked process does, which ends here.

    It yields the cores to training. It ends with the process ``trainer``, and not by a signal that is
    sent to all processes of a job, which that one may answer with a last checkpoint. It computes on one
    thread, as torch's others are not there after a fork. It runs nothing that the trainer has
    registered for its own end.
    """
    threading.Thread(target=_end_with, args=(trainer,), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    torch.set_num_threads(1)
    write(*arguments)
    os._exit(0)


def _end_with(trainer: int) -> None:
    """End this process when its trainer has ended; it would write where the next trainer writes."""
    while os.getppid() == trainer:
        time.sleep(_LOOKS_EVERY)
    os._exit(1)


def _write(transforms: list[Any], number: int, bucket: Any) -> list[Any]:
    """Let Megatron write and sync one file.

    Returns:
        Its write results.

    Raises:
        Exception: what went wrong, which Megatron gives back in place of the results.
    """
    results: queue.Queue[Any] = queue.Queue()
    unfinished: queue.Queue[int] = queue.Queue()
    unfinished.put(number)
    FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, results, unfinished, True)
    _, written = results.get_nowait()
    if isinstance(written, Exception):
        # Its frames hold torch's writer of the file, in a cycle: collected later, that would write on into
        # what is closed, and end the process.
        traceback.clear_frames(written.__traceback__)
        raise written
    return written
