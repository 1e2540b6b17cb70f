"""The optimizer's state in Megatron's sharded form, in either of two formats.

``fully_reshardable``: each parameter's moments, and its fp32 value where the model's own is rounded from it,
are written whole, under the names of
Megatron's format of that name, and every plan can load them. Megatron's own writer of it is not used:
where padding lies between two buckets of its gradient buffer, as after a tied embedding whose size is no
multiple of its alignment, it reads every later parameter at a shifted place and writes the wrong numbers
without a word (seen in 0.16.1 and 0.19.2). Nor does it know sgd, nor ranks that hold no shard.

``dp_reshardable``: each rank writes what it holds (:mod:`mixle_megatron.checkpoint.optimizer_pieces`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from mixle_megatron.checkpoint.optimizer_pieces import pieces, restore_pieces
from mixle_megatron.checkpoint.stored_state import DP_RESHARDABLE
from mixle_megatron.optimizer_shards import (
    TORCH_ADAMS,
    VALUE,
    gather,
    is_own_value,
    model_parameters,
    moments,
    own_range,
    own_tensors,
    own_value,
)
from mixle_megatron.stage import Stage

_TORCH_OPTIMIZERS = (*TORCH_ADAMS, torch.optim.SGD)


def optimizer_sharded_state(
    stage: Stage, model: Any, optimizer_format: str, valueless: Collection[int], *, loading: bool = False
) -> dict[str, Any]:
    """The optimizer's state in Megatron's sharded form, beside the model's sharded state ``model``.

    Args:
        stage: whose.
        model: the model's sharded state.
        optimizer_format: ``fully_reshardable`` or ``dp_reshardable``.
        valueless: ids of the parameters whose fp32 values are the model's, and are no part of this.
        loading: whether it only says what is to be read, and its tensors are overwritten. These are the
            optimizer's own where it has them in one piece, and they are no part of the model.
    """
    shards = {id(shard.data): shard for shard in nested_values(model)}
    if optimizer_format == DP_RESHARDABLE:
        return pieces(stage, shards, valueless, loading=loading)
    state: dict[str, Any] = {}
    for index, (part, parameter) in enumerate(model_parameters(stage.optimizer)):
        own = own_tensors(part, parameter)
        for key in moments(part) if id(parameter) in valueless else (VALUE, *moments(part)):
            if loading:
                whole = _room(part, parameter, own[key], key == VALUE and is_own_value(parameter))
            else:
                whole = _whole(part, parameter, own[key])
            state[f"{index}.{key}"] = _like(shards[id(parameter)], key, whole)
    return state


def _whole(part: Any, parameter: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
    """The whole tensor; the optimizer's own where no other rank holds a part of it."""
    if own is not None and part.data_parallel_group.size() == 1:
        return own.detach().view(parameter.shape).float()
    return gather(part, parameter, own)


def _room(part: Any, parameter: torch.Tensor, own: torch.Tensor | None, of_model: bool) -> torch.Tensor:
    """A tensor to read the whole into; not into the model's, which is read too."""
    alone = part.data_parallel_group.size() == 1
    if own is not None and alone and own.dtype == torch.float32 and not of_model:
        return own.detach().view(parameter.shape)
    return torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)


def restore_optimizer(
    stage: Stage,
    loaded: dict[str, torch.Tensor],
    optimizer_format: str,
    values: Mapping[int, torch.Tensor],
) -> None:
    """Put back what :func:`optimizer_sharded_state` described, at the scheduler's step.

    Args:
        stage: whose; its model has been restored.
        loaded: what was read.
        optimizer_format: as there.
        values: by their ids, the parameters that were left out there, in fp32.
    """
    with torch.no_grad():
        if optimizer_format == DP_RESHARDABLE:
            restore_pieces(stage, loaded, values)
        else:
            _restore_whole(stage, loaded, values)
        for part, parameter in model_parameters(stage.optimizer):
            own = own_value(part, parameter)
            if own is not None and id(parameter) in values and not is_own_value(parameter):
                own.copy_(values[id(parameter)].flatten()[own_range(part, parameter)])
    _set_step(stage.optimizer, stage.scheduler.num_steps)


def _restore_whole(stage: Stage, loaded: dict[str, torch.Tensor], valueless: Collection[int]) -> None:
    for index, (part, parameter) in enumerate(model_parameters(stage.optimizer)):
        for key, tensor in own_tensors(part, parameter).items():
            if tensor is None or (key == VALUE and id(parameter) in valueless):
                continue
            read = loaded[f"{index}.{key}"].flatten()[own_range(part, parameter)]
            if read.data_ptr() != tensor.data_ptr():
                tensor.copy_(read)


def _set_step(optimizer: Any, step: int) -> None:
    """Set the count of updates that adam corrects its bias with.

    torch keeps a tensor of its own for each parameter, and counts each up; Transformer Engine and
    apex keep one number a group.
    """
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.tensor(float(step), dtype=torch.float32)
        if not isinstance(part.optimizer, _TORCH_OPTIMIZERS):
            for group in part.optimizer.param_groups:
                group["step"] = step


def _like(shard: Any, key: str, tensor: torch.Tensor) -> Any:
    """``tensor`` placed as the model's ``shard`` is, under the optimizer's key for it."""
    changes: dict[str, Any] = {"key": f"optimizer.state.{key}.{shard.key}", "data": tensor}
    if isinstance(shard, ShardedTensor):
        changes["dtype"] = tensor.dtype
    return replace(shard, **changes)
