"""Where Megatron's checkpoint writer leaves its results."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async


@contextmanager
def kept_in_process() -> Iterator[queue.Queue[Any]]:
    """Let the saves inside hand their results over a queue of this process, which is given.

    Megatron starts a server process for that queue, since a writer may run in another process. The
    server imports the whole program again, which takes seconds and half a gigabyte on every rank, and
    it outlives a rank that is killed. What a writer in another process found comes back by
    :class:`mixle_megatron.checkpoint.shard_writing.ForkedOutcome`, and is put into the queue here.
    """
    shared = filesystem_async._results_queue
    results = filesystem_async._results_queue = queue.Queue()
    try:
        yield results
    finally:
        filesystem_async._results_queue = shared
