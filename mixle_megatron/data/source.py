"""Samples by their number in the run: what a loader asks of any source, and packed windows as one.

The samples of a run are numbered from 0 without end; sample i is in epoch ``i // len(source)``. What
sample i is depends on the source alone, never on who asks, so that every plan sees the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

_EPOCHS_KEPT = 2  # a batch may lie across the end of an epoch


@runtime_checkable
class SampleSource(Protocol):
    """Where a loader gets samples.

    Attributes:
        sequence_length: S, the tokens of a training sequence.
        seed: what the order was shuffled with; None where it is not shuffled.
        fingerprint: a short text, equal for equal data; sequence length and order are no part of it.
        field: the key of the config that says what the data is.
        unsupervised_after: a token after which nothing is predicted; None where everything is.
    """

    sequence_length: int
    seed: int | None
    fingerprint: str
    field: str
    unsupervised_after: int | None

    def __len__(self) -> int:
        """Samples in one epoch."""
        ...

    def sample(self, global_index: int) -> NDArray[np.int64]:
        """Sample ``global_index`` >= 0 of the run: int64, shape (S + 1,)."""
        ...

    def batch(self, global_indices: Sequence[int]) -> NDArray[np.int64]:
        """Several samples in the order asked for: int64, shape (len(global_indices), S + 1)."""
        ...

    def drawn(self, samples: int) -> list[int]:
        """How many of the first ``samples`` of the run come from each part of the data; their sum is that."""
        ...


class Tokens(Protocol):
    """Tokens one after another.

    Attributes:
        tokens: integers of shape (num_tokens,), mapped or in memory.
        num_tokens: how many.
        digest: a short text, equal for equal tokens.
    """

    @property
    def tokens(self) -> NDArray[Any]: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def digest(self) -> str: ...


class WindowSequence:
    """The windows of a token stream, shuffled anew each epoch, as a :class:`SampleSource`.

    Window k is the S + 1 tokens from k * S on: the first S are a sequence's inputs, the last S its
    targets, and no token is a target twice. What is left at the end is dropped (``dropped_tokens``).
    The tokens stay on disk; a sample reads its own rows.

    Args:
        stream: the tokens.
        sequence_length: S, at least 1.
        seed: shuffles, differently each epoch; None keeps the order of the text.
        field: the key of the config that says what the tokens are.

    Raises:
        ValueError: ``sequence_length`` is less than 1.
    """

    unsupervised_after = None

    def __init__(
        self, stream: Tokens, *, sequence_length: int, seed: int | None, field: str = "data.paths"
    ) -> None:
        if sequence_length < 1:
            raise ValueError(f"sequence_length must be at least 1, got {sequence_length}")
        self.stream = stream
        self.sequence_length = sequence_length
        self.seed = seed
        self.fingerprint = stream.digest
        self.field = field
        self._orders: dict[int, NDArray[np.int64]] = {}

    @property
    def num_windows(self) -> int:
        """Windows in the stream, and so in one epoch; 0 for a stream shorter than a window."""
        return max(self.stream.num_tokens - 1, 0) // self.sequence_length

    @property
    def dropped_tokens(self) -> int:
        """Tokens at the end of the stream that are in no window: at most S, 0 of an empty stream."""
        covered = self.num_windows * self.sequence_length
        return self.stream.num_tokens - (covered + 1 if covered else 0)

    def __len__(self) -> int:
        return self.num_windows

    def window(self, number: int) -> NDArray[np.int64]:
        """Window ``number`` in the order of the text: int64, shape (S + 1,), a copy."""
        start = number * self.sequence_length
        return self.stream.tokens[start : start + self.sequence_length + 1].astype(np.int64)

    def window_number(self, global_index: int) -> int:
        """Which window sample ``global_index`` of the run is.

        Raises:
            IndexError: the index is negative, or the stream has no window.
        """
        if global_index < 0 or not self.num_windows:
            raise IndexError(f"no sample {global_index} among {self.num_windows} windows an epoch")
        epoch, position = divmod(global_index, self.num_windows)
        return position if self.seed is None else int(self._order(epoch, self.seed)[position])

    def sample(self, global_index: int) -> NDArray[np.int64]:
        """Sample ``global_index`` of the run: int64, shape (S + 1,)."""
        return self.window(self.window_number(global_index))

    def batch(self, global_indices: Sequence[int]) -> NDArray[np.int64]:
        """Several samples in the order asked for: int64, shape (len(global_indices), S + 1)."""
        rows = np.empty((len(global_indices), self.sequence_length + 1), dtype=np.int64)
        for row, index in zip(rows, global_indices, strict=True):
            row[:] = self.sample(index)
        return rows

    def drawn(self, samples: int) -> list[int]:
        """All of the first ``samples`` come from the one stream."""
        return [samples]

    def _order(self, epoch: int, seed: int) -> NDArray[np.int64]:
        """The order of one epoch; the newest few are kept."""
        if epoch not in self._orders:
            while len(self._orders) >= _EPOCHS_KEPT:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = epoch_order(self.num_windows, seed=seed, epoch=epoch)
        return self._orders[epoch]


def epoch_order(length: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of ``range(length)`` that follows from seed and epoch: int64, shape (length,).

    It is the order of raw 64-bit draws of Philox, whose stream numpy keeps across versions, while it
    does not promise so of ``Generator.permutation``: a run must find its order again after an upgrade.
    """
    key = hashlib.blake2b(f"{seed}/order/{epoch}".encode(), digest_size=16).digest()
    draws = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(length)
    return np.argsort(draws, kind="stable").astype(np.int64, copy=False)
