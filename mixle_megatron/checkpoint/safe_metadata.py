"""Reading torch's ``.metadata`` without running anything that is in it.

The file is a pickle, which torch itself loads with ``pickle.load``: whoever wrote it decides what is
called. Here the pickle builds nothing but inert records, one class of them for each class that torch
or Megatron puts into the file; torch's own objects are then made from what the records hold, once it
has been checked. Of torch's own, the pickle only ever reaches ``torch.Size`` and the dtypes, which
are immutable. torch 2.13 and 2.14 write the same classes; older ones and Megatron-Core up to 0.15
wrote a few more.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from operator import add, gt
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from mixle_megatron.errors import CheckpointError

METADATA = ".metadata"

_RECORDED = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    # the plans of all saving ranks, which Megatron keeps for its next save
    "torch.distributed.checkpoint.planner": (
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
        "BytesIOWriteData",
    ),
    "torch.serialization": ("_get_layout",),
    # before torch 2.3
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    # before Megatron-Core 0.16
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
    # where torch saved it to, where that was given as a path
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    # how the first releases of Python 3.11 pickle a member of an Enum; a record as all others are
    "builtins": ("getattr",),
}
"""Classes and functions that the file may name, by module; each becomes a record, and none is called."""

_DTYPES = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def read_metadata(path: Path) -> Metadata:
    """What torch's ``.metadata`` file says: every tensor's shape, dtype and pieces, and where they lie.

    Layout, memory format and pinning, which torch no longer uses, are given as torch's defaults, and
    the saving ranks' plans are left out.

    Args:
        path: the ``.metadata`` file of a checkpoint.

    Raises:
        CheckpointError: it cannot be read, names a class that a checkpoint has no use for, or says
            something that cannot be, such as a piece outside of its tensor or a file outside of the
            checkpoint's folder.
    """
    try:
        with path.open("rb") as file, _no_collection():
            return _metadata(_Unpickler(file).load())
    except CheckpointError as error:
        raise CheckpointError(f"{path} {error}") from None
    except Exception as error:  # a damaged pickle can make the unpickler raise anything
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """Hold the garbage collector off: it would walk all the records again and again, for most of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _Record:
    """Stands for an object of the pickle: what it would have been made from, and no behaviour."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Builds plain values, records, sizes and dtypes, and nothing else."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        # Made anew for each file: whatever a pickle does to a class, it does to its own.
        self._admitted: dict[tuple[str, str], Any] = {("torch", "Size"): torch.Size} | _DTYPES
        for module, names in _RECORDED.items():
            for name in names:
                self._admitted[module, name] = type(name, (_Record,), {})

    def find_class(self, module: str, name: str) -> Any:
        """The record class, size or dtype of that name; everything else is refused."""
        if (module, name) not in self._admitted:
            raise CheckpointError(f"names {module}.{name}, which no checkpoint needs; it was not called")
        return self._admitted[module, name]


# From records to torch's objects: hundreds of thousands of them, so messages are only made when needed


def _metadata(record: Any) -> Metadata:
    fields = _fields(record, "Metadata", "MCoreMetadata")
    storage_data = fields.get("storage_data")
    if not isinstance(storage_data, dict):
        raise CheckpointError("does not say where its tensors lie")
    metadata = Metadata(
        state_dict_metadata={
            _typed(str, name): _entry(name, entry) for name, entry in fields["state_dict_metadata"].items()
        },
        planner_data=_plain(fields.get("planner_data")),
        storage_data={_index(index): _place(place) for index, place in storage_data.items()},
        storage_meta=StorageMeta(),
    )
    # absent from what torch wrote before 2.9, whose class had no such field
    metadata.version = _plain(fields.get("version"))
    if "mcore_data" in fields:
        metadata.mcore_data = _plain(fields["mcore_data"])
    return metadata


def _entry(name: str, record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(record, _Record) and type(record).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(record, "TensorStorageMetadata")
    size = _size(fields["size"])
    chunks = [_chunk(chunk, name, size) for chunk in _typed(list, fields["chunks"])]
    return TensorStorageMetadata(_properties(fields["properties"]), size, chunks)


def _properties(record: Any) -> TensorProperties:
    if not isinstance(record, _Record) or type(record).__name__ != "TensorProperties":
        raise CheckpointError("has a tensor without properties")
    return TensorProperties(dtype=_typed(torch.dtype, _typed(tuple, record.state)[0]))


def _chunk(record: Any, name: str, whole: torch.Size) -> ChunkStorageMetadata:
    fields = _fields(record, "ChunkStorageMetadata")
    offsets, sizes = _size(fields["offsets"]), _size(fields["sizes"])
    ends = [*map(add, offsets, sizes)]
    if not len(offsets) == len(sizes) == len(whole) or any(map(gt, ends, whole)):
        raise CheckpointError(f"has a piece of {name} that ends at {ends}, outside of its shape {[*whole]}")
    return ChunkStorageMetadata(offsets, sizes)


def _index(record: Any) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _typed(str, fields["fqn"]),
        None if offset is None else _size(offset),
        None if index is None else _typed(int, index),
    )


def _place(record: Any) -> _StorageInfo:
    fields = _fields(record, "_StorageInfo")
    name = _inside(_typed(str, fields["relative_path"]))
    offset, length = _typed(int, fields["offset"]), _typed(int, fields["length"])
    if offset < 0 or length < 0:
        raise CheckpointError(f"names bytes {offset} to {offset + length} of {name}")
    transforms = fields.get("transform_descriptors")
    if transforms is None:  # left out: torch's class had no such field before 2.7
        return _StorageInfo(name, offset, length)
    return _StorageInfo(name, offset, length, _plain(transforms))


@cache
def _inside(name: str) -> str:
    """A file's name that cannot lead out of the checkpoint's folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise CheckpointError(f"names the file {name!r}, which is not in the checkpoint's folder")
    return name


def _size(value: Any) -> torch.Size:
    """A shape or an offset; torch's own class admits whole numbers only, and negative ones."""
    size = value if type(value) is torch.Size else torch.Size(_typed(list, value))
    if any(number < 0 for number in size):
        raise CheckpointError(f"has {[*size]} where a shape or an offset should be")
    return size


def _fields(record: Any, *names: str) -> dict[str, Any]:
    """The fields of a record of one of these classes."""
    found = type(record).__name__
    if not isinstance(record, _Record) or found not in names:
        raise CheckpointError(f"has a {found} where {names[0]} should be")
    return _typed(dict, record.state)


def _plain(value: Any) -> Any:
    """``value``, which consists of plain values only."""
    if isinstance(value, dict):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    if value is not None and not isinstance(value, str | int | float | bytes | bool):
        raise CheckpointError(f"has a {type(value).__name__} where plain values should be")
    return value


def _typed(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise CheckpointError(f"has a {type(value).__name__} where {kind.__name__} should be")
    return value
