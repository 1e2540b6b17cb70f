"""Reading the next batches in a thread, while the step computes with this one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any

from mixle_megatron.data.loader import Batch, GlobalBatchLoader
from mixle_megatron.errors import Fault

_AHEAD = 2


def _as_they_are(batches: list[Batch]) -> list[Any]:
    return list(batches)


class PrefetchingLoader:
    """A :class:`GlobalBatchLoader` whose next updates are read ahead by one thread.

    The thread reads two updates ahead, and no more is ever held of the data. What has been read and not
    been handed out does not count as consumed: the state is that of the loader itself.

    Args:
        loader: nobody else may iterate it.
        prepare: what the thread makes of an update's batches, such as tensors in pinned memory.
        until: samples past which nothing is read before it is asked for: the run should end there, and an
            epoch that it never reaches need not be shuffled. None reads ahead always.

    Attributes:
        seconds: how long the last update kept its caller waiting.
    """

    def __init__(
        self,
        loader: GlobalBatchLoader,
        prepare: Callable[[list[Batch]], list[Any]] = _as_they_are,
        *,
        until: int | None = None,
    ) -> None:
        self.seconds = 0.0
        self._loader = loader
        self._prepare = prepare
        self._until = until
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._read: deque[Future[list[Any]]] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        """The next update's part of this rank, counted as consumed; what failed in the thread is raised."""
        began = perf_counter()
        size = self._loader.global_batch_size
        for place in range(len(self._read), _AHEAD + 1):
            first = self._loader.consumed_samples + place * size
            if place == 0 or self._until is None or first < self._until:
                self._read.append(self._thread.submit(self._read_ahead, first))
        batches = self._read.popleft().result()
        self._loader.consumed_samples += size
        self.seconds = perf_counter() - began
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands in its data."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` stands, as the loader does; what was read ahead is forgotten."""
        self._loader.load_state_dict(state)
        self._forget()

    def differences(self, state: Mapping[str, Any]) -> list[Fault]:
        """Where ``state`` stands in other data."""
        return self._loader.differences(state)

    def close(self) -> None:
        """End the thread; what it has begun to read it reads to the end."""
        self._forget()
        self._thread.shutdown(wait=True)

    def _read_ahead(self, first: int) -> list[Any]:
        return self._prepare(self._loader.read(first))

    def _forget(self) -> None:
        for future in self._read:
            future.cancel()
        self._read.clear()
