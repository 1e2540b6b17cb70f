"""What a session would read from a checkpoint, by name: described without reading or changing anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

from mixle_megatron.checkpoint.portable_names import portable_name, stacked
from mixle_megatron.optimizer_shards import model_parameters
from mixle_megatron.stage import Stage

Shape = tuple[int, ...]


@dataclass
class Expected:
    """The state of a model and its optimizer, of one rank or of all.

    Attributes:
        shapes: whole tensors of the model, by portable name, with rows of padding.
        keys: the key in a checkpoint under which each of them is looked for.
        padded: those whose first dimension is the vocabulary's, which each plan pads otherwise.
        trained: names of the tensors that the optimizer updates.
        cuts: for each parameter that it updates, by portable name, how many tensor-parallel ranks it is
            cut over, and the elements on each.
        objects: names of what is no tensor.
    """

    shapes: dict[str, Shape] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    padded: set[str] = field(default_factory=set)
    trained: set[str] = field(default_factory=set)
    cuts: dict[str, tuple[int, int]] = field(default_factory=dict)
    objects: set[str] = field(default_factory=set)

    def add(self, other: Expected) -> None:
        """Add what another rank expects."""
        self.shapes |= other.shapes
        self.keys |= other.keys
        self.padded |= other.padded
        self.trained |= other.trained
        self.cuts |= other.cuts
        self.objects |= other.objects


def expected_state(stage: Stage) -> Expected:
    """What all ranks together would read, on global rank 0; what this rank would, elsewhere. Collective."""
    own = _expected_of_rank(stage)
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, gathered)
    for other in gathered or ():
        own.add(other)
    return own


def model_state(stage: Stage) -> dict[str, Any]:
    """Megatron's sharded form of the model, each chunk of layers by itself.

    It is the innermost modules' and not their wrappers': its keys are the model's own, whatever chunk of
    whatever stage holds them. Its tensors are the parameters.
    """
    metadata = {"dp_cp_group": stage.groups.collection.dp_cp}
    return {
        f"chunk{number}": chunk.sharded_state_dict(prefix="", metadata=metadata)
        for number, chunk in enumerate(stage.chunks)
    }


def cut_of(stage: Stage, parameter: torch.Tensor) -> tuple[int, int]:
    """Which of how many tensor-parallel parts of a parameter this rank holds."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return 0, 1
    group = stage.groups.cuts(parameter)
    return group.rank(), group.size()


def _expected_of_rank(stage: Stage) -> Expected:
    expected = Expected()
    names = _NamesOfKeys()
    trained = {id(parameter) for _, parameter in model_parameters(stage.optimizer)}
    for shard in nested_values(model_state(stage)):
        if isinstance(shard, ShardedObject):
            expected.objects.add(shard.unique_key)
            continue
        for piece in _pieces(shard):
            name, at = names.of(piece)
            expected.shapes[name] = tuple(piece.global_shape[len(at) :])
            expected.keys[name] = piece.key
            if piece.allow_shape_mismatch:
                expected.padded.add(name)
            if id(shard.data) in trained:
                expected.trained.add(name)
    for logical, parameter in stage.named_parameters():
        if id(parameter) in trained:
            expected.cuts[portable_name(logical)] = cut_of(stage, parameter)[1], parameter.numel()
    return expected


def _pieces(shard: Any) -> Iterable[ShardedTensor]:
    """The tensors that a parameter is stored as: a gated layer's halves lie apart in the whole."""
    if not isinstance(shard, ShardedTensorFactory):
        return [shard] if isinstance(shard, ShardedTensor) else []
    return (piece for piece in nested_values([shard.build()]) if isinstance(piece, ShardedTensor))


class _NamesOfKeys:
    """Portable names by key and place, of which keys of many layers and experts stand for many."""

    def __init__(self) -> None:
        self._names: dict[str, dict[tuple[int, ...], str]] = {}

    def of(self, piece: ShardedTensor) -> tuple[str, tuple[int, ...]]:
        """The name of the tensor that ``piece`` is of, and where that stands in its key."""
        if piece.key not in self._names:
            self._names[piece.key] = dict(_places(piece))
        names = self._names[piece.key]
        at = tuple(piece.global_offset[: len(next(iter(names)))])
        return names[at], at


def _places(piece: ShardedTensor) -> Iterator[tuple[tuple[int, ...], str]]:
    for name, at in stacked(piece.key, piece.global_shape):
        yield at, name
