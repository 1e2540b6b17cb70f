"""Reading every token of an indexed dataset once: their range, and how documents end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixle_megatron.data.index_checks import IndexHeader
from mixle_megatron.data.megatron_dataset import IndexedDataset, get_bin_path

_CHUNK = 4 << 20  # tokens


@dataclass
class TokenScan:
    """What a dataset's tokens are.

    Attributes:
        smallest: the smallest; None where there is none.
        largest: the largest.
        outside: how many are not in the vocabulary.
        first_outside: the place of the first of those among all tokens.
        unended: how many sequences do not end with the end token; 0 where that was not asked.
        first_unended: the first of those.
    """

    smallest: int | None = None
    largest: int | None = None
    outside: int = 0
    first_outside: int | None = None
    unended: int = 0
    first_unended: int | None = None


def scan_tokens(
    prefix: str,
    header: IndexHeader,
    dataset: IndexedDataset,
    *,
    vocab_size: int | None,
    end: int | None,
    watch: Callable[[int], None] = lambda _tokens: None,
) -> TokenScan:
    """Read the tokens of a dataset whose index fits its size.

    Args:
        prefix: of the dataset.
        header: of its index.
        dataset: it, as Megatron reads it.
        vocab_size: tokens from this on are outside, and negative ones; None to compare with nothing.
        end: the token with which every sequence should end; None to look at no end.
        watch: told the number of tokens of each chunk.
    """
    found, before = TokenScan(), 0
    with open(get_bin_path(prefix), "rb") as file:
        while (tokens := np.fromfile(file, dtype=header.dtype, count=_CHUNK)).size:
            _note_range(found, tokens, before, vocab_size)
            if end is not None:
                _note_ends(found, tokens, before, dataset, header.itemsize, end)
            before += tokens.size
            watch(tokens.size)
    return found


def _note_range(found: TokenScan, tokens: NDArray[Any], before: int, vocab_size: int | None) -> None:
    smallest, largest = int(tokens.min()), int(tokens.max())
    found.smallest = smallest if found.smallest is None else min(found.smallest, smallest)
    found.largest = largest if found.largest is None else max(found.largest, largest)
    if vocab_size is not None and (smallest < 0 or largest >= vocab_size):
        outside = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
        found.outside += len(outside)
        if found.first_outside is None:
            found.first_outside = before + int(outside[0])


def _note_ends(
    found: TokenScan, tokens: NDArray[Any], before: int, dataset: IndexedDataset, itemsize: int, end: int
) -> None:
    """Look at the last token of every sequence that ends among ``tokens``."""
    starts = dataset.index.sequence_pointers
    first = max(int(np.searchsorted(starts, before * itemsize, side="right")) - 1, 0)
    after = int(np.searchsorted(starts, (before + tokens.size) * itemsize, side="left"))
    lengths = dataset.sequence_lengths[first:after]
    last = starts[first:after] // itemsize + lengths - 1 - before
    here = (lengths > 0) & (last >= 0) & (last < tokens.size)
    unended = np.flatnonzero(here)[tokens[last[here]] != end]
    if unended.size:
        found.unended += len(unended)
        if found.first_unended is None:
            found.first_unended = first + int(unended[0])
