"""Opening a checkpoint: whether it is whole, and what was saved beside its tensors. Needs no Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from mixle_megatron.checkpoint.common_state import SESSION, read_common
from mixle_megatron.checkpoint.completeness import CONFIG, damage
from mixle_megatron.checkpoint.manifest import MANIFEST, read_manifest
from mixle_megatron.checkpoint.safe_metadata import METADATA, read_metadata
from mixle_megatron.errors import CheckpointError
from mixle_megatron.optimizer_choice import NAME_PREFIX


def read_session(folder: Path) -> tuple[dict[str, Any], Metadata]:
    """What was saved beside the tensors of a session's checkpoint, and what its metadata says of them.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or no session wrote it.
    """
    metadata = read_whole(folder)
    payload = read_common(folder, metadata).get(SESSION)
    if payload is None:
        raise CheckpointError(
            f"{folder} was not written by a session of mixle-megatron: it has no step clock; "
            "load its weights alone with what='model'"
        )
    plan = payload.get("parallel_plan") if isinstance(payload, Mapping) else None
    if not isinstance(plan, Mapping) or not isinstance(plan.get("world_size"), int):
        raise CheckpointError(f"{folder} does not say under which plan it was saved")
    return payload, metadata


def read_whole(folder: Path) -> Metadata:
    """What the metadata of a checkpoint says, which has been found whole by names and sizes.

    The reader of a run's checkpoints has compared checksums before.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    if not is_checkpoint(folder):
        raise CheckpointError(f"{folder} is not a Megatron dist-checkpoint (it has no metadata.json)")
    found = [one for one in damage(folder, checksums=False, needs_manifest=False) if one.prevents_loading]
    if found:
        raise CheckpointError(f"{folder} is damaged: " + "; ".join(map(str, found)))
    return read_metadata(folder / METADATA)


def optimizer_of(payload: Mapping[str, Any]) -> str | None:
    """The name of the optimizer that a session's checkpoint was saved with; None where nothing says."""
    receipt = (payload.get("extra") or {}).get("optimizer_receipt")
    name = receipt.get("name") if isinstance(receipt, Mapping) else None
    return name.removeprefix(NAME_PREFIX) if isinstance(name, str) else None


def stored_tokens(folder: Path) -> int | None:
    """Rows of a checkpoint's vocabulary without padding; None where nothing says."""
    if not (folder / MANIFEST).is_file():
        return None
    return (read_manifest(folder).facts.model or {}).get("vocab_size")


def is_checkpoint(folder: Path) -> bool:
    """Whether Megatron takes the folder for a checkpoint: its save wrote this file last."""
    return (folder / CONFIG).is_file()
