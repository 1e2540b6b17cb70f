"""What is in a checkpoint, from its metadata alone: no tensor is read, and nothing in it is run."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from mixle_megatron.checkpoint.common_state import COMMON, SESSION, read_common
from mixle_megatron.checkpoint.completeness import CONFIG
from mixle_megatron.checkpoint.iterations import RELEASE, iteration_name, named_by_tracker, step_of, steps_in
from mixle_megatron.checkpoint.manifest import MANIFEST, read_manifest
from mixle_megatron.checkpoint.portable_names import OPTIMIZER
from mixle_megatron.checkpoint.safe_metadata import METADATA, read_metadata
from mixle_megatron.errors import CheckpointError, Fault, Refused

_ARGUMENTS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "world_size": "world_size",
}
"""The plan in the arguments that Megatron-LM keeps."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor.

    Attributes:
        name: its key in the checkpoint; layers that are alike lie in one tensor, their number first.
        shape: of the whole tensor.
        dtype: as torch names it, without ``torch.``.
        shards: pieces that it lies in.
        bytes: of the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    shards: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """What is in a checkpoint.

    Attributes:
        path: its folder.
        manifest: whether it has one.
        step: committed updates; None where nothing says.
        plan, precision, optimizer_format, model, versions: as the manifest has them; without one, what
            the common state tells, and None where it tells nothing.
        parameters: the model's tensors.
        optimizer: the optimizer's tensors.
        objects: bytes of everything that is no tensor, by name.
        files: sizes by name.
        notes: what could not be read, and why.
    """

    path: Path
    manifest: bool
    step: int | None
    plan: Mapping[str, Any] | None
    precision: str | None
    optimizer_format: str | None
    model: Mapping[str, Any] | None
    versions: Mapping[str, str | None] | None
    parameters: tuple[StoredTensor, ...]
    optimizer: tuple[StoredTensor, ...]
    objects: Mapping[str, int]
    files: Mapping[str, int]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for ``--json``."""
        return asdict(self) | {"path": str(self.path), "totals": self.totals}

    @property
    def totals(self) -> dict[str, int]:
        """Numbers in the parameters, and bytes of each kind."""
        return {
            "parameters": sum(prod(tensor.shape) for tensor in self.parameters),
            "parameter_bytes": sum(tensor.bytes for tensor in self.parameters),
            "optimizer_bytes": sum(tensor.bytes for tensor in self.optimizer),
            "object_bytes": sum(self.objects.values()),
            "file_bytes": sum(self.files.values()),
        }


def locate(path: Path) -> Path:
    """The checkpoint that ``path`` names: itself, or the newest of a run's folder, whole or not.

    Where Megatron-LM's tracker file says ``release``, that is the newest.

    Raises:
        Refused: there is none.
    """
    if _looks_like_checkpoint(path):
        return path
    for checkpoints in (path / "checkpoints", path):
        if named_by_tracker(checkpoints) == RELEASE and (checkpoints / RELEASE).is_dir():
            return checkpoints / RELEASE
        if steps := steps_in(checkpoints):
            return checkpoints / iteration_name(steps[-1])
    rule = "holds no checkpoint" if path.is_dir() else "is no folder"
    remedy = "give an iter_* folder, or a run's folder {run.dir}/{run.name}"
    raise Refused([Fault("PATH", str(path), rule, remedy)])


def _looks_like_checkpoint(path: Path) -> bool:
    if not path.is_dir():
        return False
    known = (MANIFEST, METADATA, CONFIG, COMMON)
    return step_of(path.name) is not None or any((path / name).exists() for name in known)


def inspect(folder: Path) -> Inspection:
    """What is in the checkpoint ``folder``.

    Raises:
        CheckpointError: its ``.metadata`` cannot be read, or is not safe to.
    """
    metadata = read_metadata(folder / METADATA)
    tensors = [*_tensors(metadata)]
    facts, notes = _facts(folder, metadata)
    return Inspection(
        path=folder,
        parameters=tuple(tensor for tensor in tensors if not OPTIMIZER.match(tensor.name)),
        optimizer=tuple(tensor for tensor in tensors if OPTIMIZER.match(tensor.name)),
        objects=_objects(metadata),
        files={file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.is_file()},
        notes=tuple(notes),
        **facts,
    )


def _tensors(metadata: Metadata) -> Iterable[StoredTensor]:
    for name, entry in sorted(metadata.state_dict_metadata.items()):
        if isinstance(entry, TensorStorageMetadata):
            dtype = entry.properties.dtype
            size = prod(entry.size) * dtype.itemsize
            short = str(dtype).removeprefix("torch.")
            yield StoredTensor(name, tuple(entry.size), short, len(entry.chunks), size)


def _objects(metadata: Metadata) -> dict[str, int]:
    """Bytes of each object, over its pieces: their names end in ``/shard_1_2``, one a rank or layer."""
    sizes: dict[str, int] = defaultdict(int)
    for index, place in metadata.storage_data.items():
        if not isinstance(metadata.state_dict_metadata.get(index.fqn), TensorStorageMetadata):
            sizes[index.fqn.split("/shard_")[0]] += place.length
    return dict(sorted(sizes.items()))


# What it was saved from


def _facts(folder: Path, metadata: Metadata) -> tuple[dict[str, Any], list[str]]:
    """What the manifest tells; without one, what the common state does; and what cannot be read."""
    notes = []
    try:
        manifest = read_manifest(folder)
        return {"manifest": True, "versions": dict(manifest.versions), **asdict(manifest.facts)}, []
    except CheckpointError as error:
        notes.append(str(error))
    facts = {"manifest": False, "versions": None, "model": None, "optimizer_format": None}
    try:
        common = read_common(folder, metadata)
    except CheckpointError as error:
        notes.append(str(error))
        common = {}
    told = _of_session(common[SESSION]) if SESSION in common else _of_megatron_lm(common)
    if told["step"] is None:
        told["step"] = step_of(folder.name)
    return facts | told, notes


def _of_session(payload: Any) -> dict[str, Any]:
    values = payload if isinstance(payload, Mapping) else {}
    return {
        "step": values.get("step"),
        "plan": values.get("parallel_plan"),
        "precision": values.get("precision"),
    }


def _of_megatron_lm(common: Mapping[str, Any]) -> dict[str, Any]:
    arguments = common.get("args")
    values = vars(arguments) if isinstance(arguments, Namespace) else {}
    plan = {axis: values[name] for axis, name in _ARGUMENTS.items() if name in values}
    precision = next((name for name in ("bf16", "fp16") if values.get(name)), "fp32" if values else None)
    return {"step": common.get("iteration"), "plan": plan or None, "precision": precision}
