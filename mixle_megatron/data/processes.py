"""Working on many tasks in several processes, each of which says what it has done meanwhile.

The pools of the standard library either lose a task whose process is killed or cannot end processes that
are at work. Here a killed process ends the whole with an error, and so does the caller whenever it likes.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar

from mixle_megatron.data.build_errors import BuildFailed

EVERY = 0.2
"""Seconds between two reports of a process, and between two looks at whether to go on."""

Task = TypeVar("Task")
Delta = TypeVar("Delta", bound="Addable")
Work = Callable[[Any, Callable[[Any], None]], Any]


class Addable(Protocol):
    """Something done, which two pieces of make one."""

    def __add__(self, other: Any) -> Any: ...


def work_on(
    tasks: Sequence[Task],
    opened: Callable[[], Work],
    *,
    workers: int,
    watch: Callable[[Any], None],
) -> Iterator[tuple[int, Any]]:
    """The number and the result of each task, as they come.

    Args:
        tasks: what is to be done, begun in this order.
        opened: called once in each process; gives ``work(task, report)``, which calls ``report`` with
            what it has done since. Everything is pickled to get there and back.
        workers: how many processes; one is this process itself.
        watch: called here with each report, and with None when there has been none for a while. What it
            raises, or the caller does between two results, ends all processes at once.

    Raises:
        BuildFailed: a process has died.
        Exception: what a task raised; the others are given up.
    """
    if workers == 1:
        work = opened()
        for number, task in enumerate(tasks):
            yield number, work(task, watch)
        return
    context = multiprocessing.get_context("forkserver")
    crew = [_Worker(context, opened) for _ in range(min(workers, len(tasks)))]
    try:
        yield from _results(crew, tasks, watch)
    finally:
        for worker in crew:
            worker.end()


def start_server(*modules: str) -> None:
    """Let the server from which the processes fork begin to import ``modules``, while this one does."""
    from multiprocessing import forkserver

    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
    forkserver.ensure_running()


def _results(
    crew: Sequence[_Worker], tasks: Sequence[Any], watch: Callable[[Any], None]
) -> Iterator[tuple[int, Any]]:
    waiting = iter(enumerate(tasks))
    for worker in crew:
        worker.begin(next(waiting))
    while busy := {worker.connection: worker for worker in crew if worker.number is not None}:
        ready = wait(list(busy), timeout=EVERY)
        if not ready:
            watch(None)
        for connection in ready:
            worker = busy[connection]
            kind, value = worker.receive()
            if kind == "report":
                watch(value)
            elif kind == "failed":
                raise value
            else:
                number, worker.number = worker.number, None
                following = next(waiting, None)
                if following is not None:
                    worker.begin(following)
                yield number, value


class _Worker:
    """A process, and the number of the task that it is at."""

    def __init__(self, context: Any, opened: Callable[[], Work]) -> None:
        self.connection, theirs = context.Pipe()
        self.number: int | None = None
        self._process: BaseProcess = context.Process(target=_serve, args=(theirs, opened), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, numbered: tuple[int, Any]) -> None:
        """Hand out a task."""
        self.number, task = numbered
        with suppress(ConnectionError):  # which receive() explains
            self.connection.send(task)

    def receive(self) -> tuple[str, Any]:
        """What the process says next."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            hint = "; memory may have run out: use fewer --workers" if code == -signal.SIGKILL else ""
            raise BuildFailed(f"worker process {self._process.pid} {how}{hint}") from None

    def end(self) -> None:
        """End the process, whatever it is at."""
        self.connection.close()
        self._process.kill()
        self._process.join()


def _serve(connection: Connection, opened: Callable[[], Work]) -> None:
    """A process: work on what comes, until nothing can."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal
    work = None
    with suppress(EOFError, ConnectionError):  # the caller has ended
        while True:
            task = connection.recv()
            reports = _Reports(connection)
            try:
                work = work or opened()
                result = work(task, reports)
            except ConnectionError:
                raise
            except Exception as error:
                error.add_note(traceback.format_exc())
                connection.send(("failed", error))
            else:
                reports.send()
                connection.send(("done", result))


class _Reports:
    """Adds up what a task reports, and sends it now and then."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._unsent: Any = None
        self._sent = time.monotonic()

    def __call__(self, delta: Any) -> None:
        self._unsent = delta if self._unsent is None else self._unsent + delta
        if time.monotonic() - self._sent >= EVERY:
            self.send()

    def send(self) -> None:
        """Send what has not been."""
        if self._unsent is not None:
            self._connection.send(("report", self._unsent))
            self._unsent, self._sent = None, time.monotonic()
