"""Megatron's indexed dataset, as the modules here use it, without what importing Megatron prints."""

from __future__ import annotations

import logging
import warnings

logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # that there is no CUDA runtime
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that would make training faster
    from megatron.core.datasets.indexed_dataset import (
        DType,
        IndexedDataset,
        IndexedDatasetBuilder,
        _IndexWriter,
        get_bin_path,
        get_idx_path,
    )

IndexWriter = _IndexWriter
"""The writer of an index's header and arrays; private in 0.16 to 0.19, and the same in all of them."""

HEADER_BYTES = 34
"""Before an index's arrays: magic, version, dtype, and the numbers of sequences and of document ends."""

SEQUENCE_BYTES = 4 + 8
"""Of an index, for each sequence: its length and its place."""

DOCUMENT_END_BYTES = 8
"""Of an index, for each end of a document; there is one more of them than of documents."""

__all__ = [
    "DOCUMENT_END_BYTES",
    "HEADER_BYTES",
    "SEQUENCE_BYTES",
    "DType",
    "IndexWriter",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "get_bin_path",
    "get_idx_path",
    "index_bytes",
]


def index_bytes(sequences: int, document_ends: int) -> int:
    """The size of an index that has no modes."""
    return HEADER_BYTES + sequences * SEQUENCE_BYTES + document_ends * DOCUMENT_END_BYTES
