"""The tensors of a checkpoint by portable name, each read by itself in one process without any group."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan, Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from mixle_megatron.checkpoint.portable_names import OPTIMIZER, natural_order, stacked
from mixle_megatron.errors import CheckpointError

_MAIN_VALUE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?:fp32_)?param\.(.+)")


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of the model and where the checkpoint has it.

    Attributes:
        name: its portable name.
        key: what the checkpoint calls it, alone or stacked with others.
        at: where it stands in the leading dimensions of ``key``.
        shape: of the tensor itself, with rows of padding where it has some.
        dtype: in which it is stored.
        is_main_value: whether this is the optimizer's fp32 value, and not the model's own.
    """

    name: str
    key: str
    at: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_main_value: bool


class StoredTensors:
    """The model's tensors in a checkpoint's folder: the optimizer's values of them where it has some.

    Attributes:
        folder: the checkpoint.
        tensors: by portable name, in an order that people would count in.
        has_optimizer: whether there is an optimizer's state too, in whatever format.
    """

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self.folder = folder
        self._metadata = metadata
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        stored = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.has_optimizer = any(map(OPTIMIZER.match, stored))
        found = sorted(_tensors_of(stored), key=lambda tensor: natural_order(tensor.name))
        self.tensors = {tensor.name: tensor for tensor in found}

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor, put together from the parts that ranks wrote, in the dtype it is stored in.

        Beside it, never more than one of those parts is in memory.

        Raises:
            CheckpointError: a part is missing or cannot be read.
        """
        tensor = self.tensors[name]
        whole = torch.empty((*(1 for _ in tensor.at), *tensor.shape), dtype=tensor.dtype)
        items = self._parts(tensor)
        if sum(prod(item.lengths) for item in items) != whole.numel():
            raise CheckpointError(f"{self.folder} does not hold all of {tensor.key} ({name})")
        try:
            self._reader.read_data(LoadPlan(items), _Into(whole)).wait()
        except Exception as error:  # torch raises what the damage happens to lead to
            text = f"{self.folder}: {tensor.key} cannot be read ({type(error).__name__}: {error})"
            raise CheckpointError(text) from error
        return whole.view(tensor.shape)

    def _parts(self, tensor: ModelTensor) -> list[ReadItem]:
        """What has to be read where for one tensor, each region once."""
        start = (*tensor.at, *(0 for _ in tensor.shape))
        stop = (*(each + 1 for each in tensor.at), *tensor.shape)
        chunks = self._metadata.state_dict_metadata[tensor.key].chunks
        items = {}
        for chunk in chunks:
            first = [max(one, other) for one, other in zip(start, chunk.offsets, strict=True)]
            ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            lengths = [min(one, other) - low for one, other, low in zip(stop, ends, first, strict=True)]
            if all(length > 0 for length in lengths):
                index = MetadataIndex(tensor.key, chunk.offsets)
                items[tuple(chunk.offsets)] = ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(tensor.key),
                    dest_offsets=_difference(first, start),
                    storage_index=index,
                    storage_offsets=_difference(first, chunk.offsets),
                    lengths=torch.Size(lengths),
                )
        return list(items.values())


class _Into(DefaultLoadPlanner):
    """Lets torch's reader write into one tensor."""

    def __init__(self, whole: torch.Tensor) -> None:
        super().__init__()
        self._whole = whole

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._whole


def _tensors_of(stored: dict[str, Any]) -> Iterator[ModelTensor]:
    main_values = {match[1]: key for key in stored if (match := _MAIN_VALUE.fullmatch(key))}
    for key in stored:
        if OPTIMIZER.match(key):
            continue
        source = main_values.get(key, key)
        entry = stored[source]
        for name, at in stacked(key, entry.size):
            shape = tuple(entry.size[len(at) :])
            yield ModelTensor(name, source, at, shape, entry.properties.dtype, source != key)


def _difference(ends: Sequence[int], starts: Sequence[int]) -> torch.Size:
    return torch.Size(end - start for end, start in zip(ends, starts, strict=True))
