"""Whether a checkpoint holds all that it says it does, by its own metadata and by its manifest."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from math import prod
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from mixle_megatron.checkpoint.common_state import COMMON, COMMON_STATE, common_file, read_common, read_object
from mixle_megatron.checkpoint.damage import Damage
from mixle_megatron.checkpoint.manifest import MANIFEST, verify
from mixle_megatron.checkpoint.safe_metadata import METADATA, read_metadata
from mixle_megatron.errors import CheckpointError

CONFIG = "metadata.json"
"""Megatron's own file in a checkpoint: the format of the others. It is written last."""

BACKEND = "torch_dist"
"""The only format that Megatron-Core 0.16 and later write."""


def damage(folder: Path, *, checksums: bool, needs_manifest: bool) -> list[Damage]:
    """Everything that is wrong with the checkpoint ``folder``.

    Args:
        folder: the checkpoint.
        checksums: whether to read every file and compare it with the manifest.
        needs_manifest: whether it is damage to have no manifest, as one has that Megatron-Core wrote
            alone: then only sizes and completeness can be judged.
    """
    found = []
    if needs_manifest or (folder / MANIFEST).exists():
        found = verify(folder, checksums=checksums)
    known = {one.file for one in found}
    return found + [one for one in lacking(folder) if one.file not in known]


def lacking(folder: Path) -> list[Damage]:
    """What the checkpoint's own metadata says that it holds, and it does not; needs no manifest."""
    found = [*_config_damage(folder)]
    path = folder / METADATA
    if not path.is_file():
        return [*found, Damage(METADATA, "missing", "is missing, and with it where each tensor lies")]
    try:
        metadata = read_metadata(path)
    except CheckpointError as error:
        return [*found, Damage(METADATA, "unreadable", str(error).removeprefix(f"{path} "))]
    found += _file_damage(folder, metadata)
    found += _tensor_damage(metadata)
    if not found:
        found += _object_damage(folder, metadata)
    return found


def _config_damage(folder: Path) -> Iterator[Damage]:
    path = folder / CONFIG
    if not path.is_file():
        yield Damage(CONFIG, "missing", "is missing; Megatron writes it last, so the save did not end")
        return
    try:
        backend = json.loads(path.read_text(encoding="utf-8"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield Damage(CONFIG, "unreadable", f"cannot be read: {error!r}")
        return
    if backend != BACKEND:
        yield Damage(CONFIG, "unreadable", f"names the format {backend!r}; {BACKEND} is read")


def _file_damage(folder: Path, metadata: Metadata) -> Iterator[Damage]:
    """Files that are missing, or end before the last byte that the metadata places in them."""
    ends: dict[str, int] = defaultdict(int)
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends[place.relative_path], place.offset + place.length)
    for name, end in sorted(ends.items()):
        path = folder / name
        if not path.is_file():
            yield Damage(name, "missing", f"is missing ({end:,} bytes)")
        elif (size := path.stat().st_size) < end:
            yield Damage(name, "truncated", f"has {size:,} bytes, and should have {end:,}")


def _tensor_damage(metadata: Metadata) -> Iterator[Damage]:
    """Tensors whose pieces do not make up the whole, or lie nowhere."""
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            if MetadataIndex(name) not in metadata.storage_data:
                yield Damage(METADATA, "incomplete", f"says of {name} in no file where it lies")
            continue
        held, whole = sum(prod(chunk.sizes) for chunk in entry.chunks), prod(entry.size)
        if held != whole:
            yield Damage(METADATA, "incomplete", f"has {held:,} of the {whole:,} numbers of {name}")
        placed = sum(MetadataIndex(name, chunk.offsets) in metadata.storage_data for chunk in entry.chunks)
        if placed != len(entry.chunks):
            detail = f"says of {placed} of the {len(entry.chunks)} pieces of {name} where they lie"
            yield Damage(METADATA, "incomplete", detail)


def _object_damage(folder: Path, metadata: Metadata) -> Iterator[Damage]:
    """Objects that are no plain values, which no rank should find out while the others load."""
    try:
        read_common(folder, metadata)
    except CheckpointError as error:
        yield Damage(common_file(folder, metadata) or COMMON, "unreadable", str(error))
    for index, place in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata.get(index.fqn), TensorStorageMetadata):
            continue
        if index == COMMON_STATE:
            continue
        try:
            read_object(folder, index.fqn, place)
        except CheckpointError as error:
            yield Damage(place.relative_path, "unreadable", str(error))
