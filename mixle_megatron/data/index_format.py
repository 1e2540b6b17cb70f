"""The layout of Megatron's two files, for what reads them without Megatron, and so without torch."""

from __future__ import annotations

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1

DTYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}
"""The names of the tokens' types by the code that an index has for them."""

HEADER_BYTES = 34
"""Before an index's arrays: magic, version, dtype, and the numbers of sequences and of document ends."""

SEQUENCE_BYTES = 4 + 8
"""Of an index, for each sequence: its length and its place."""

DOCUMENT_END_BYTES = 8
"""Of an index, for each end of a document; there is one more of them than of documents."""


def index_bytes(sequences: int, document_ends: int) -> int:
    """The size of an index that has no modes."""
    return HEADER_BYTES + sequences * SEQUENCE_BYTES + document_ends * DOCUMENT_END_BYTES


def get_bin_path(prefix: str) -> str:
    """The file of the tokens."""
    return f"{prefix}.bin"


def get_idx_path(prefix: str) -> str:
    """The file of the index."""
    return f"{prefix}.idx"
