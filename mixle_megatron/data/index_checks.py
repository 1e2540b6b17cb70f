"""Whether the two files of an indexed dataset fit each other, and Megatron's format."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mixle_megatron.data.index_format import (
    DOCUMENT_END_BYTES,
    DTYPES,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    get_bin_path,
    get_idx_path,
    index_bytes,
)

if TYPE_CHECKING:
    from mixle_megatron.data.megatron_dataset import IndexedDataset

_CHUNK = 1 << 20  # sequences


@dataclass(frozen=True)
class IndexHeader:
    """What an index says of itself.

    Attributes:
        dtype: the name of the tokens' type.
        sequences: how many.
        document_ends: one more than documents.
    """

    dtype: str
    sequences: int
    document_ends: int

    @property
    def itemsize(self) -> int:
        """Bytes of a token."""
        return np.dtype(self.dtype).itemsize


def read_header(prefix: str) -> IndexHeader | str:
    """The header of an index; or, where Megatron would not read such an index, why."""
    path = get_idx_path(prefix)
    with open(path, "rb") as file:
        return _header(path, file)


def _header(path: str, file: IO[bytes]) -> IndexHeader | str:
    raw, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    if not raw.startswith(MAGIC) or len(raw) < HEADER_BYTES:
        return f"{path} is no index of Megatron's: it does not begin as one"
    version, code, sequences, ends = struct.unpack("<QBQQ", raw[len(MAGIC) :])
    if version != VERSION or code not in DTYPES:
        return f"{path} is of version {version} and dtype {code}, which Megatron does not read"
    expected = index_bytes(sequences, ends)
    if size not in (expected, expected + sequences):  # with a byte a sequence, where there are modes
        return f"{path} has {size:,} bytes, and its {sequences:,} sequences take {expected:,}"
    file.seek(expected - DOCUMENT_END_BYTES)
    last = struct.unpack("<q", file.read(DOCUMENT_END_BYTES))[0] if ends else None
    if last != sequences:
        return f"{path} has {sequences:,} sequences, and the last of its documents ends at {last}"
    return IndexHeader(DTYPES[code], sequences, ends)


def array_damage(prefix: str, header: IndexHeader, dataset: IndexedDataset) -> Iterator[str]:
    """What is wrong with the arrays of an index, and with the size of the tokens' file."""
    tokens = 0
    for first, lengths, pointers in chunks(dataset):
        ends = tokens + np.cumsum(lengths, dtype=np.int64)
        expected = (ends - lengths) * header.itemsize
        wrong = np.flatnonzero((pointers != expected) | (lengths < 0))
        if wrong.size:
            place = int(wrong[0])
            yield (
                f"sequence {first + place:,} has {lengths[place]:,} tokens from byte {pointers[place]:,} on,"
                f" and belongs at byte {expected[place]:,}"
            )
            return
        tokens = int(ends[-1])
    size, expected_size = os.path.getsize(get_bin_path(prefix)), tokens * header.itemsize
    if size != expected_size:
        yield (
            f"{get_bin_path(prefix)} has {size:,} bytes,"
            f" and its {tokens:,} tokens of {header.dtype} take {expected_size:,}"
        )
    yield from _document_damage(header, dataset.document_indices)


def chunks(dataset: IndexedDataset) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
    """Number of the first sequence, lengths (int32) and byte offsets (int64) of a chunk at a time."""
    for first in range(0, len(dataset), _CHUNK):
        part = slice(first, first + _CHUNK)
        yield first, dataset.sequence_lengths[part], dataset.index.sequence_pointers[part]


def one_sequence_each(dataset: IndexedDataset) -> bool:
    """Whether every document is one sequence, as Megatron's GPT datasets expect."""
    ends = dataset.document_indices
    if len(ends) != len(dataset) + 1:
        return False
    return all(
        np.array_equal(ends[first : first + _CHUNK], np.arange(first, min(first + _CHUNK, len(ends))))
        for first in range(0, len(ends), _CHUNK)
    )


def _document_damage(header: IndexHeader, ends: NDArray[Any]) -> Iterator[str]:
    if ends[0] != 0:
        yield f"the ends of documents begin with {ends[0]:,} and not with 0"
        return
    for first in range(0, header.document_ends - 1, _CHUNK):
        part = ends[first : first + _CHUNK + 1]
        if (part[1:] < part[:-1]).any():
            yield f"the ends of documents go backwards after document {first:,}"
            return
