"""One job at a time on a run's folder.

The lock is the kernel's (``flock``) and not the file's: it ends with the process that holds it,
however that ends. The file only says who holds it, and stays. Network file systems pass such locks on
to their server where they are set up to; where one refuses to, so does :func:`run_lock`.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from mixle_megatron.errors import Fault, Refused

LOCK = "run.lock"

_held: set[int] = set()
"""Descriptors of this process's locks."""


@contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Hold the run's folder, which is made if need be, for as long as the context lasts.

    A process forked meanwhile does not hold it, so that none which outlives its parent can.

    Raises:
        Refused: another process holds it, or its file cannot be written or locked.
    """
    descriptor = _opened(run)
    try:
        _lock(descriptor, run)
        _write_holder(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    _held.add(descriptor)
    try:
        yield
    finally:
        _release(descriptor)


def _opened(run: Path) -> int:
    try:
        run.mkdir(parents=True, exist_ok=True)
        return os.open(run / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        fault = Fault("run.dir", str(run.parent), f"cannot be written: {error}", "use a folder that can be")
        raise Refused([fault]) from error


def _lock(descriptor: int, run: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        rule, remedy = f"is in use by {_holder(descriptor)}", "wait for its end, or use another run.name"
        raise Refused([Fault("run.name", run.name, rule, remedy)]) from None
    except OSError as error:
        rule = f"cannot be locked ({error}), so that two jobs might write into it at once"
        raise Refused(
            [Fault("run.dir", str(run.parent), rule, "use a file system that has flock")]
        ) from error


def _release(descriptor: int) -> None:
    """End the lock; a process forked while it was held has nothing to end."""
    if descriptor in _held:
        _held.discard(descriptor)
        os.ftruncate(descriptor, 0)
        os.close(descriptor)


def _write_holder(descriptor: int) -> None:
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _holder(descriptor: int) -> str:
    """Who holds the lock, in words; a process that has only just taken it has not said so yet."""
    text = os.pread(descriptor, 4096, 0)
    if not text:
        return "another process"
    holder = json.loads(text)
    return f"process {holder['pid']} on {holder['host']} since {holder['since']}"


def _let_go() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
