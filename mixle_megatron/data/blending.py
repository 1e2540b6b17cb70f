"""Several corpora as one source of samples, mixed by weights as Megatron's BlendedDataset mixes them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mixle_megatron.data.built_once import build_once
from mixle_megatron.data.gpt_epochs import GPTEpochs

LONG_ROUND = 1 << 16
"""Samples after which a rounded weight is off by no more than one in so many."""

_LONGEST = 1 << 24  # whose table is still built at once


class BlendedSource:
    """Samples of several corpora, as a :class:`~mixle_megatron.data.source.SampleSource`.

    The blend goes round and round. A round is as many samples as the corpora have together, but at most
    2**24, and Megatron's ``build_blending_indices`` deals its places to the corpora: every place to the one
    that is furthest behind its weight. Each corpus gives its own samples in its own order, epoch after
    epoch, whatever the others do and however long the run is. One corpus alone is its own epochs, and a
    round is an epoch.

    Args:
        corpora: the corpora, all of one sequence length, each with a sample at least.
        weights: their shares of the samples; they need not add up to one.
        fingerprint: of the corpora, their weights and their split.
        seed: what they were shuffled with.
        field: the key of the blend in the config.
        unsupervised_after: a token after which nothing is predicted, or None.
        cache: a folder for the table, which any number of processes may share.
        shortest_round: samples that a round has at least, so that small weights are kept.

    Attributes:
        sequence_length: S.
        seed: as given.
        fingerprint: as given.
        field: as given.
        unsupervised_after: as given.
    """

    def __init__(
        self,
        corpora: Sequence[GPTEpochs],
        weights: Sequence[float],
        *,
        fingerprint: str,
        seed: int,
        field: str,
        unsupervised_after: int | None,
        cache: str | os.PathLike[str],
        shortest_round: int = 1,
    ) -> None:
        self.sequence_length = corpora[0].sequence_length
        self.seed = seed
        self.fingerprint = fingerprint
        self.field = field
        self.unsupervised_after = unsupervised_after
        self._corpora = tuple(corpora)
        self._weights = (np.asarray(weights, dtype=np.float64) / np.sum(weights)).tolist()
        self._cache = Path(cache)
        self._shortest_round = shortest_round

    def __len__(self) -> int:
        """Samples in a round."""
        together = sum(len(corpus) for corpus in self._corpora)
        return together if len(self._corpora) == 1 else min(max(together, self._shortest_round), _LONGEST)

    def place(self, global_index: int) -> tuple[int, int]:
        """Which corpus sample ``global_index`` of the run is of, and which of that corpus's samples it is.

        Raises:
            IndexError: the index is negative.
        """
        if global_index < 0:
            raise IndexError(f"no sample {global_index}")
        if len(self._corpora) == 1:
            return 0, global_index
        turn, within = divmod(global_index, len(self))
        corpus, sample = int(self._table[0][within]), int(self._table[1][within])
        return corpus, turn * int(self._per_round[corpus]) + sample

    def drawn(self, samples: int) -> list[int]:
        """How many of the first ``samples`` of the run are of each corpus."""
        if len(self._corpora) == 1:
            return [samples]
        turn, within = divmod(samples, len(self))
        begun = np.bincount(self._table[0][:within], minlength=len(self._corpora))
        return (turn * self._per_round + begun).tolist()

    def sample(self, global_index: int) -> NDArray[np.int64]:
        """Sample ``global_index`` of the run: int64, shape (S + 1,)."""
        corpus, sample = self.place(global_index)
        return self._corpora[corpus].sample(sample)

    def batch(self, global_indices: Sequence[int]) -> NDArray[np.int64]:
        """Several samples in the order asked for: int64, shape (len(global_indices), S + 1)."""
        rows = np.empty((len(global_indices), self.sequence_length + 1), dtype=np.int64)
        for row, index in zip(rows, global_indices, strict=True):
            row[:] = self.sample(index)
        return rows

    @cached_property
    def _table(self) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """Of each place of a round, the corpus and the number of its sample; mapped."""
        described = json.dumps([self._weights, len(self)])
        key = hashlib.blake2b(described.encode(), digest_size=12).hexdigest()
        folder = self._cache / f"blend-{key}"
        build_once(folder, lambda: blending_indices(self._weights, len(self)))
        corpus, sample = (np.load(folder / name, mmap_mode="r") for name in ("corpus.npy", "sample.npy"))
        return corpus, sample

    @cached_property
    def _per_round(self) -> NDArray[np.int64]:
        """Places of each corpus in a round."""
        return np.bincount(self._table[0], minlength=len(self._corpora))


def blending_indices(weights: Sequence[float], size: int) -> dict[str, NDArray]:
    """Megatron's order of a blend.

    Args:
        weights: shares of the corpora; they add up to one.
        size: places.

    Returns:
        ``corpus.npy``, int16, and ``sample.npy``, int64, each of shape (size,).
    """
    from megatron.core.datasets import helpers

    corpus, sample = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    helpers.build_blending_indices(corpus, sample, list(weights), len(weights), size, False)
    return {"corpus.npy": corpus, "sample.npy": sample}
