"""The optimizer's state as each rank holds it, which nothing has to be gathered for.

A parameter's moments, and its fp32 value where the model's own is rounded from it, are stored as matrices
``[ranks, elements]``: one row for each tensor-parallel rank that the parameter is cut over, flattened, of
which each data-parallel rank writes the elements that it keeps. Other data-parallel ranks read other parts
of the same rows.

Megatron's own format of this name stores buckets of its gradient buffers, whose borders move with the
data-parallel ranks as soon as a model fills more than one, and it brings no step for torch's adam, does
not know sgd, and needs every rank to hold a part of every bucket.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from mixle_megatron.checkpoint.expected_state import cut_of
from mixle_megatron.checkpoint.portable_names import portable_name
from mixle_megatron.checkpoint.stored_state import PIECES
from mixle_megatron.optimizer_shards import VALUE, is_own_value, model_parameters, own_range, own_tensors
from mixle_megatron.stage import Stage


def pieces(
    stage: Stage, shards: Mapping[int, Any], valueless: Collection[int], *, loading: bool = False
) -> dict[str, ShardedTensor]:
    """The parts of values and moments on this rank, in Megatron's sharded form; no copies.

    Args:
        stage: whose optimizer.
        shards: the model's sharded form, by the ids of its parameters.
        valueless: ids of the parameters whose fp32 values are the model's, and are no part of this.
        loading: whether they are to be read; what is the model's, which is read too, then has other memory.
    """
    names = {id(parameter): portable_name(logical) for logical, parameter in stage.named_parameters()}
    state = {}
    for part, parameter, kind, own in _own(stage, valueless):
        of_model = loading and kind == VALUE and is_own_value(parameter)
        row, rows = cut_of(stage, parameter)
        state[f"{kind}.{len(state)}"] = ShardedTensor(
            key=f"{PIECES}.{kind}.{names[id(parameter)]}",
            data=(torch.empty_like(own) if of_model else own.detach()).view(1, -1),
            dtype=own.dtype,
            local_shape=(1, own.numel()),
            global_shape=(rows, parameter.numel()),
            global_offset=(row, own_range(part, parameter).start),
            axis_fragmentations=None,  # parts of any size
            replica_id=(*shards[id(parameter)].replica_id[:-1], part.distributed_optimizer_instance_id),
        )
    return state


def restore_pieces(stage: Stage, loaded: Mapping[str, torch.Tensor], valueless: Collection[int]) -> None:
    """Put back what :func:`pieces` described."""
    for number, (_, _, kind, own) in enumerate(_own(stage, valueless)):
        own.copy_(loaded[f"{kind}.{number}"].view(-1))


def _own(stage: Stage, valueless: Collection[int]) -> Iterator[tuple[Any, torch.Tensor, str, torch.Tensor]]:
    """What this rank keeps: the optimizer, the parameter, the kind of state, and the flat part."""
    for part, parameter in model_parameters(stage.optimizer):
        for kind, own in own_tensors(part, parameter).items():
            if own is not None and not (kind == VALUE and id(parameter) in valueless):
                yield part, parameter, kind, own
