"""Many of Megatron's indexed datasets as one, in memory that their number and length do not change.

Megatron's own ``IndexedDatasetBuilder.add_index`` gives the same bytes. It keeps two Python numbers for
each document of the whole until the index is written, and a third then: some 200 bytes a document, tens
of gigabytes for a corpus of the web. Here each part's numbers are read, moved and written in turn.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixle_megatron.checkpoint.durable import sync_file
from mixle_megatron.data.megatron_dataset import (
    DType,
    IndexedDataset,
    IndexWriter,
    get_bin_path,
    get_idx_path,
)

_BUFFER = 8 << 20


def concatenate(
    parts: Sequence[tuple[str, int, int]],
    prefix: str,
    dtype: type[np.number],
    watch: Callable[[int], None] = lambda _tokens: None,
) -> None:
    """Write the dataset that holds the documents of all parts in order, and bring it to the disk.

    Args:
        parts: prefix, documents and tokens of each; in each a document is one sequence.
        prefix: of the dataset to write.
        dtype: of the tokens of all of them.
        watch: told the tokens of each part that is copied; what it raises ends the work.

    Raises:
        OSError: a part cannot be read, or the dataset cannot be written.
        RuntimeError: Megatron does not find in the dataset what should be there.
    """
    with open(get_bin_path(prefix), "wb") as out:
        for path, _, tokens in parts:
            with open(get_bin_path(path), "rb") as part:
                shutil.copyfileobj(part, out, _BUFFER)
            watch(tokens)
    with _ConcatenatedIndex(get_idx_path(prefix), dtype) as index:
        index.write_parts(parts)
    for path in (get_bin_path(prefix), get_idx_path(prefix)):
        sync_file(Path(path))
    _refuse_other(parts, prefix, dtype)


class _ConcatenatedIndex(IndexWriter):
    """Megatron's writer of an index, which gets it part by part."""

    def write_parts(self, parts: Sequence[tuple[str, int, int]]) -> None:
        """Write the counts and the three arrays: lengths, byte offsets, and ends of documents."""
        documents = sum(count for _, count, _ in parts)
        size = DType.size(self.dtype)
        self.idx_writer.write(struct.pack("<QQ", documents, documents + 1))
        for lengths, _, _ in _lengths(parts):
            self.idx_writer.write(lengths.astype(np.int32, copy=False).tobytes())
        for lengths, _, tokens_before in _lengths(parts):
            ends = np.cumsum(lengths, dtype=np.int64) + tokens_before
            self.idx_writer.write(((ends - lengths) * size).tobytes())
        self.idx_writer.write(np.zeros(1, dtype=np.int64).tobytes())
        before = 0
        for _, count, _ in parts:
            self.idx_writer.write(np.arange(before + 1, before + count + 1, dtype=np.int64).tobytes())
            before += count


def _lengths(parts: Sequence[tuple[str, int, int]]) -> Iterator[tuple[NDArray[Any], int, int]]:
    """Of each part, the lengths of its documents, and how many documents and tokens are before it."""
    documents = tokens = 0
    for path, count, size in parts:
        dataset = IndexedDataset(path, mmap=False)
        lengths = np.array(dataset.sequence_lengths)  # the dataset takes its own with it when it goes
        if len(lengths) != count or int(lengths.sum(dtype=np.int64)) != size:
            raise RuntimeError(f"{get_idx_path(path)} is not what its record says")
        yield lengths, documents, tokens
        documents, tokens = documents + count, tokens + size


def _refuse_other(parts: Sequence[tuple[str, int, int]], prefix: str, dtype: type[np.number]) -> None:
    """Compare what has been written with what Megatron reads from it."""
    found = IndexedDataset(prefix, mmap=False)
    documents, tokens = (sum(part[place] for part in parts) for place in (1, 2))
    last = found.index.sequence_pointers[-1] + found.sequence_lengths[-1] * DType.size(dtype)
    size = Path(get_bin_path(prefix)).stat().st_size
    if not len(found) == found.document_indices[-1] == documents or not last == size == tokens * DType.size(
        dtype
    ):
        raise RuntimeError(f"{prefix}: Megatron reads another dataset than was written")
