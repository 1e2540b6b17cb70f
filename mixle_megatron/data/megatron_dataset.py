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

__all__ = [
    "DType",
    "IndexWriter",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "get_bin_path",
    "get_idx_path",
]
