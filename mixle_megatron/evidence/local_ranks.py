"""Ranks on this host that are started once and run one trial after another.

Starting Megatron takes a process seconds: one server imports it, and the ranks fork from that. A run's own
local ranks are started by torch's elastic agent, which ends with them; these stay, answer, and have a group
of their own for each call, of as many of them as it takes. The process that asks them never loads torch.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
"""After which a collective fails that some rank never joins."""

CALL_TIMEOUT = 180.0
"""Seconds after which a call is given up that nobody has answered."""

REST_TIMEOUT = 3.0
"""Seconds that the other ranks have to fail too, once one has: they may be waiting for it."""


class RanksFailed(Exception):
    """A call raised on some rank, or a rank died. The first line of the message says what."""


class LocalRanks:
    """Worker processes that run functions as the ranks of a group."""

    def __init__(self, backend: str) -> None:
        """Start nothing yet.

        Args:
            backend: torch's name of the group's backend: ``gloo`` or ``nccl``.
        """
        self._backend = backend
        self._workers: list[_Worker] = []
        self._calls = 0

    def __enter__(self) -> LocalRanks:
        self._meeting = TemporaryDirectory(prefix="mixle-megatron-")
        # Each rank computes with one thread, and the server that they fork from has only one.
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = "1"
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None
    ) -> None:
        self._end()
        self._meeting.cleanup()

    def run_on(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on so many ranks at once; what it gave on each of them, in rank order.

        Args:
            ranks: how many.
            function: stands at the top of a module.
            args: can be pickled, as the results can.

        Raises:
            RanksFailed: it raised on some rank, or a rank died. All ranks are ended, and new ones take the
                next call.
        """
        while len(self._workers) < ranks:
            self._workers.append(_Worker(self._backend))
        self._calls += 1
        meeting = str(Path(self._meeting.name, str(self._calls)))
        call = pickle.dumps((function, args))
        for rank, worker in enumerate(self._workers[:ranks]):
            worker.connection.send((meeting, rank, ranks, call))
        answers = _collect(self._workers[:ranks])
        failures = {rank: failure for rank, (_, failure) in answers.items() if failure is not None}
        if failures or len(answers) < ranks:
            self._end()
            raise RanksFailed(_report(failures, sorted(set(range(ranks)) - set(answers))))
        return [pickle.loads(answers[rank][0]) for rank in range(ranks)]

    def _end(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._workers = []


class _Worker:
    """One process and this end of its pipe."""

    def __init__(self, backend: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["mixle_megatron.evidence.imported"])
        self.connection, theirs = context.Pipe()
        # Not a daemon: Megatron's checkpoint writer starts processes of its own.
        self.process = context.Process(target=_serve, args=(theirs, backend))
        self.process.start()
        theirs.close()


def _collect(workers: list[_Worker]) -> dict[int, tuple[bytes, str | None]]:
    """The answer of each rank that answers in time."""
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    answers: dict[int, tuple[bytes, str | None]] = {}
    timeout = CALL_TIMEOUT
    while waiting:
        ready = wait(list(waiting), timeout)
        if not ready:
            return answers
        for connection in ready:
            rank = waiting.pop(connection)
            answers[rank] = _answer(workers[rank])
            if answers[rank][1] is not None:
                timeout = REST_TIMEOUT
    return answers


def _answer(worker: _Worker) -> tuple[bytes, str | None]:
    try:
        return worker.connection.recv()
    except EOFError:
        worker.process.join()
        return b"", f"the process died with exit code {worker.process.exitcode}"


def _report(failures: dict[int, str], silent: list[int]) -> str:
    """What went wrong: in one line, and then each rank's own account of it."""
    if not failures:
        return f"ranks {silent} gave no answer within {CALL_TIMEOUT:.0f} seconds"
    first, account = min(failures.items())
    summary = f"rank {first}: {account.strip().splitlines()[-1]}"
    return "\n".join([summary, *(f"rank {rank}:\n{text}" for rank, text in sorted(failures.items()))])


def _serve(connection: Connection, backend: str) -> None:
    """A rank's life: calls until the pipe closes."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks ends the ranks
    gc.freeze()  # what the server imported is shared between the ranks until a collection touches it
    torch.set_num_threads(1)
    while True:
        try:
            meeting, rank, ranks, call = connection.recv()
        except EOFError:
            return
        try:
            with _group(backend, meeting, rank, ranks):
                function, args = pickle.loads(call)
                answer = (pickle.dumps(function(*args)), None)
        except BaseException:
            answer = (b"", traceback.format_exc())
        connection.send(answer)


@contextmanager
def _group(backend: str, meeting: str, rank: int, ranks: int) -> Iterator[None]:
    """A default group of the ranks of one call, which meet at a file."""
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.setdefault("MASTER_ADDR", "localhost")  # that a rank's environment is whole
    os.environ.setdefault("MASTER_PORT", "29500")
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(meeting, ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=COLLECTIVE_TIMEOUT)
    yield
    # Not after an exception: the other ranks are not there to say goodbye to.
    dist.destroy_process_group()
