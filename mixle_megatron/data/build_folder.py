"""``PREFIX.building``: where the pieces of a build lie until it is complete; one build at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mixle_megatron.errors import Fault, Refused

LOCK = "lock"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


def build_folder(prefix: str) -> Path:
    """The folder of the build of a corpus."""
    return Path(f"{prefix}.building")


@contextmanager
def held_folder(prefix: str) -> Iterator[Path]:
    """Make the folder, and keep other builds of this corpus out of it.

    What a build that was killed had under names of its own is deleted; its finished pieces stay. Where a
    file system has no locks, builds that meet do each other's work again, and get the same bytes.

    Raises:
        Refused: another build holds the folder, or it cannot be made.
    """
    folder = build_folder(prefix)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error} ({folder})"
        raise Refused([Fault("--output", prefix, rule, "name a place that can be written")]) from error
    try:
        _lock(descriptor, prefix)
        for left in folder.glob("*.aside*"):
            with suppress(FileNotFoundError):
                left.unlink()
        yield folder
    finally:
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Delete the folder of a build that is complete."""
    shutil.rmtree(folder)


def _lock(descriptor: int, prefix: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        rule, remedy = "is being built by another process", "wait for its end, or name another place"
        raise Refused([Fault("--output", prefix, rule, remedy)]) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
