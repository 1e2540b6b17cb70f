"""A safetensors file that is written one tensor at a time.

The library's own writer wants every tensor in memory at once. The format is a header and the tensors'
bytes after one another, so that a header that is made from shapes alone can go before them
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import torch

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorOutline:
    """What has to be known of a tensor before its values are.

    Attributes:
        name: what the file calls it.
        shape: its shape.
        dtype: one of fp64, fp32, bf16 and fp16.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Its bytes."""
        return prod(self.shape) * self.dtype.itemsize


def in_file_order(outlines: Iterable[TensorOutline]) -> list[TensorOutline]:
    """Wider dtypes first, so that every tensor begins at a multiple of its element's size."""
    return sorted(outlines, key=lambda outline: -outline.dtype.itemsize)


def write_safetensors(
    file: BinaryIO,
    outlines: Iterable[TensorOutline],
    tensors: Iterable[torch.Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write a whole safetensors file, taking each tensor when its turn comes.

    Args:
        file: open for writing, at its beginning.
        outlines: of all tensors, as :func:`in_file_order` gives them.
        tensors: the tensors themselves, on the CPU, in the order, shape and dtype of the outlines.
        metadata: text to keep in the header.

    Raises:
        ValueError: a tensor is not what its outline says.
    """
    outlines = list(outlines)
    file.write(_header(outlines, metadata))
    for outline, tensor in zip(outlines, tensors, strict=True):
        if tuple(tensor.shape) != outline.shape or tensor.dtype != outline.dtype:
            raise ValueError(f"{outline} is not the outline of {tuple(tensor.shape)} {tensor.dtype}")
        file.write(tensor.contiguous().flatten().view(torch.uint8).numpy())


def _header(outlines: list[TensorOutline], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for outline in outlines:
        entries[outline.name] = {
            "dtype": _DTYPES[outline.dtype],
            "shape": list(outline.shape),
            "data_offsets": [position, position + outline.size],
        }
        position += outline.size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
