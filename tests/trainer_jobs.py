"""Starts of ``pretrain`` that can be killed: their ranks fork from a server that has loaded Megatron.

Each rank is a process group of its own, with what it forks itself, and runs what the command runs
under a launcher. The first rank tells what a user cannot see from outside without racing against it: what
it has gone on from, and what lay in the folder between two saves.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import perf_counter
from typing import Any

from tiny_run import CONFIG

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
NOTICES_AFTER = 0.1
"""Seconds until a launcher sees that a rank has died; torch's looks so often."""

GRACE = 5.0
"""Seconds that the other ranks then have to end by themselves before they are killed; torch's gives 30."""

CHECKPOINT = re.compile(r"iter_\d{7}")
TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Resumed:
    """The first rank has gone on from a checkpoint and is about to train.

    Attributes:
        step: of the checkpoint; None where there is none.
        receipts: the steps in ``receipts.jsonl``.
        temporary: see :func:`temporary_names`.
        at: when, in ``perf_counter``, which all processes share.
    """

    step: int | None
    receipts: list[int]
    temporary: list[str]
    at: float


@dataclass(frozen=True)
class Announced:
    """The first rank has announced the checkpoint of ``step`` and deleted old ones; no save goes on."""

    step: int
    temporary: list[str]
    at: float


def temporary_names(checkpoints: Path) -> list[str]:
    """What lies in a run's folder of checkpoints beside checkpoints and the tracker file."""
    names = os.listdir(checkpoints) if checkpoints.is_dir() else []
    return sorted(name for name in names if name != TRACKER and not CHECKPOINT.fullmatch(name))


def steps_of(receipts: Path) -> list[int]:
    """The steps in ``receipts.jsonl``, in its order."""
    lines = receipts.read_text().splitlines() if receipts.exists() else []
    return [json.loads(line)["step"] for line in lines]


class Job:
    """One start of a run: its ranks, until they have ended or were killed.

    Attributes:
        began: when it was started.
        heard: what its first rank has told so far, in order.
    """

    def __init__(self, ranks: int, run: Path, overrides: Sequence[str], scratch: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["mixle_megatron.backend", "mixle_megatron.training.pretraining"])
        self._reports, theirs = context.Pipe(duplex=False)
        self._log = scratch / "output.txt"
        self._log.write_text("")
        rendezvous = scratch / "rendezvous"
        rendezvous.unlink(missing_ok=True)
        self.heard: list[Resumed | Announced] = []
        self.began = perf_counter()
        self._ranks = [
            context.Process(
                target=_train,
                args=(rank, ranks, str(run), list(overrides), str(rendezvous), str(self._log), theirs),
            )
            for rank in range(ranks)
        ]
        for process in self._ranks:
            process.start()
        theirs.close()

    def listen(self, seconds: float | None = None) -> Resumed | Announced | None:
        """The next report of the first rank; None where a rank ends before, or the time is up."""
        sentinels = [process.sentinel for process in self._ranks]
        if self._reports in wait([self._reports, *sentinels], seconds):
            with suppress(EOFError):
                self.heard.append(self._reports.recv())
                return self.heard[-1]
        return None

    def goes_on(self, seconds: float) -> bool:
        """Let it run for so many seconds; False where a rank ends before."""
        return not wait([process.sentinel for process in self._ranks], max(seconds, 0.0))

    def kill(self, rank: int | None) -> None:
        """SIGKILL to one rank alone, or to all ranks with whatever they have forked."""
        if rank is not None:
            self._ranks[rank].kill()
            return
        for process in self._ranks:
            with suppress(ProcessLookupError):  # its first act is to become the leader of a group
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()

    def stop_survivors(self) -> int:
        """Do what a launcher does once a rank has died; how many ranks would not end by themselves."""
        wait([process.sentinel for process in self._ranks if process.is_alive()], NOTICES_AFTER)
        for process in self._ranks:
            if process.is_alive():
                process.terminate()
        for process in self._ranks:
            process.join(GRACE)
        stubborn = [process for process in self._ranks if process.is_alive()]
        for process in stubborn:
            process.kill()
        self.join()
        return len(stubborn)

    def join(self) -> list[int | None]:
        """The exit codes of all ranks, once they have ended; what the first one told is then in ``heard``."""
        for process in self._ranks:
            process.join()
        with suppress(EOFError):
            while self._reports.poll(0):
                self.heard.append(self._reports.recv())
        self._reports.close()
        return [process.exitcode for process in self._ranks]

    def output(self, lines: int = 15) -> str:
        """The end of what its ranks have printed."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])


def _train(
    rank: int,
    ranks: int,
    run: str,
    overrides: list[str],
    rendezvous: str,
    log: str,
    reports: Connection,
) -> None:
    """One rank's life."""
    os.setpgid(0, 0)
    gc.freeze()  # what the server imported is shared with it until a collection touches it
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # which a launcher sets; nobody listens
    import torch
    import torch.distributed as dist

    from mixle_megatron.training.command import run_pretraining

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=COLLECTIVE_TIMEOUT
    )
    if rank == 0:
        _report_to(reports, Path(run))
    sys.exit(run_pretraining(CONFIG, overrides))


def _report_to(reports: Connection, run: Path) -> None:
    """Tell what this rank, the first, has gone on from, and each checkpoint that it has announced."""
    from mixle_megatron.training import pretraining
    from mixle_megatron.training.run_directory import RunDirectory

    resume, delete_old, checkpoints = pretraining.resume, RunDirectory.delete_old, run / "checkpoints"

    def resumed(*arguments: Any, **options: Any) -> int | None:
        step = resume(*arguments, **options)
        receipts = steps_of(run / "receipts.jsonl")
        reports.send(Resumed(step, receipts, temporary_names(checkpoints), perf_counter()))
        return step

    def deleted(directory: RunDirectory, announced: int, **options: Any) -> None:
        delete_old(directory, announced, **options)
        reports.send(Announced(announced, temporary_names(checkpoints), perf_counter()))

    pretraining.resume = resumed
    RunDirectory.delete_old = deleted
