"""Where Megatron's checkpoint writer leaves its results while the writing rank waits for it."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.dist_checkpointing.strategies import filesystem_async


@contextmanager
def kept_in_process() -> Iterator[None]:
    """Let a synchronous save hand its results over a queue of this process.

    Megatron starts a server process for that queue, since an asynchronous writer runs in another
    process. It imports the whole program again, which takes seconds and half a gigabyte on every
    rank, and it outlives a rank that is killed. A synchronous save writes and waits in one process.
    """
    shared = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = shared
