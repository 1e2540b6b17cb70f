"""Runs functions of the tests on real ranks: long-lived worker processes, one gloo group a call.

Starting Megatron costs a process about five seconds, so one server imports it and the workers, which
stay for the whole test session, fork from that server: it has no threads and no group of its own.
A function is given by reference: it stands at the top of a module that a worker can import.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
"""After which a collective of the default group fails that some rank never joins."""

CALL_TIMEOUT = 300.0
"""Seconds after which a call that no rank has answered is given up."""

REST_TIMEOUT = 3.0
"""Seconds that the other ranks have to fail too, once one has, before all are ended."""


class RanksFailed(AssertionError):
    """A function raised on some rank, or a rank died; the message holds each rank's traceback."""


class RankPool:
    """Worker processes that run functions as the ranks of a default process group."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._calls = 0
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def run_on(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on ``ranks`` ranks at once; return what it gave on each of them.

        The default group has exactly these ranks and ends with the call. A failure ends all workers,
        as the others may be waiting for the rank that failed; the next call starts new ones, and so
        does one that finds a worker gone, which a host short of memory may have ended between two calls.
        """
        if not all(worker.process.is_alive() for worker in self._workers):
            self.close()
        while len(self._workers) < ranks:
            self._workers.append(_Worker(self._store.port))
        self._calls += 1
        call = pickle.dumps((function, args))
        for rank, worker in enumerate(self._workers[:ranks]):
            worker.connection.send((self._calls, rank, ranks, call))
        answers = _collect(self._workers[:ranks])
        failures = {rank: text for rank, (result, text) in answers.items() if text is not None}
        if failures or len(answers) < ranks:
            self.close()
            raise RanksFailed(_report(failures, set(range(ranks)) - set(answers)))
        return [pickle.loads(answers[rank][0]) for rank in range(ranks)]

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._workers = []


class _Worker:
    """One process and this end of its pipe."""

    def __init__(self, port: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["mixle_megatron.backend"])
        self.connection, theirs = context.Pipe()
        # not a daemon: Megatron's checkpoint writer starts processes of its own
        self.process = context.Process(target=_serve, args=(theirs, port))
        self.process.start()
        theirs.close()


def _collect(workers: list[_Worker]) -> dict[int, tuple[bytes, str | None]]:
    """The answer of each rank; of those that answer in time once a rank has failed."""
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
        return b"", f"the process died with exit code {worker.process.exitcode}\n"


def _report(failures: dict[int, str], silent: set[int]) -> str:
    texts = [f"rank {rank}:\n{text}" for rank, text in sorted(failures.items())]
    if silent:
        texts.append(f"no answer from ranks {sorted(silent)}, which were ended")
    return "\n" + "\n".join(texts)


def _serve(connection: Connection, port: int) -> None:
    """A worker's life: calls until the pipe closes."""
    _quieten()
    gc.freeze()  # what the server imported is shared between the workers until a collection touches it
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, is_master=False)
    while True:
        try:
            number, rank, ranks, call = connection.recv()
        except EOFError:
            return
        try:
            with _default_group(dist.PrefixStore(f"call{number}", store), rank, ranks):
                function, args = pickle.loads(call)
                answer = (pickle.dumps(function(*args)), None)
        except BaseException:
            answer = (b"", traceback.format_exc())
        connection.send(answer)


def _quieten() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)


@contextmanager
def _default_group(store: dist.Store, rank: int, ranks: int):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=COLLECTIVE_TIMEOUT)
    yield
    # Not after an exception: the other ranks are not there to say goodbye to.
    dist.destroy_process_group()
