"""The optimizer's state in a form that every plan can load.

Each parameter's fp32 value and moments are written whole, under the names of Megatron's
``fully_reshardable`` format. Megatron's own writer of that format is not used: where padding lies
between two buckets of its gradient buffer, as after a tied embedding whose size is no multiple of
its alignment, it reads every later parameter at a shifted place and writes the wrong numbers
without a word (seen in 0.16.1 and 0.19.2). Nor does it know sgd, nor ranks that hold no shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from mixle_megatron.stage import Stage

_VALUE = "param"
_TORCH_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_TORCH_OPTIMIZERS = (*_TORCH_ADAMS, torch.optim.SGD)
_MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def optimizer_sharded_state(stage: Stage, model: Any) -> dict[str, Any]:
    """The optimizer's state in Megatron's sharded form, beside the model's sharded state ``model``.

    For loading, the same call describes what to read: the tensors in it are overwritten.
    """
    shards = {id(shard.data): shard for shard in nested_values(model)}
    state: dict[str, Any] = {}
    for index, (part, parameter) in enumerate(_model_parameters(stage.optimizer)):
        own = _own_tensors(part, parameter)
        for key in (_VALUE, *moments(part)):
            whole = _gather(part, parameter, own[key])
            state[f"{index}.{key}"] = _like(shards[id(parameter)], key, whole)
    return state


def restore_optimizer(stage: Stage, loaded: dict[str, torch.Tensor]) -> None:
    """Put back what :func:`optimizer_sharded_state` described, at the scheduler's step."""
    with torch.no_grad():
        for index, (part, parameter) in enumerate(_model_parameters(stage.optimizer)):
            for key, tensor in _own_tensors(part, parameter).items():
                if tensor is not None:
                    tensor.copy_(loaded[f"{index}.{key}"].flatten()[_own_range(part, parameter)])
    _set_step(stage.optimizer, stage.scheduler.num_steps)


def moments(part: Any) -> tuple[str, ...]:
    """Names of the running averages that the optimizer keeps of each parameter."""
    if part.config.optimizer == "sgd" and part.config.sgd_momentum == 0:
        return ()
    return _MOMENTS[part.config.optimizer]


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


def _model_parameters(optimizer: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Every parameter of the stage with the DistributedOptimizer that updates it."""
    for part in optimizer.chained_optimizers:
        for buffer in part.buffers:
            for parameter in buffer.param_index_map:
                yield part, parameter


def _own_tensors(part: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """This rank's shards of a parameter's value and moments; None where it holds none.

    Moments that an optimizer has not made yet, since it has not stepped, are made here as zeros.
    """
    keys = (_VALUE, *moments(part))
    if parameter not in part.model_param_group_index_map:
        return dict.fromkeys(keys)
    group, order = part.model_param_group_index_map[parameter]
    value = part.optimizer.param_groups[group]["params"][order]
    state = part.optimizer.state[value]
    for moment in moments(part):
        if state.get(moment) is None:
            state[moment] = torch.zeros_like(value, dtype=torch.float32)
    if isinstance(part.optimizer, _TORCH_ADAMS):
        state.setdefault("step", torch.tensor(0.0))
    return {_VALUE: value} | {moment: state[moment] for moment in moments(part)}


def _own_range(part: Any, parameter: torch.Tensor) -> slice:
    owned = part._get_model_param_range_map(parameter)["param"]
    return slice(owned.start, owned.end)


def _gather(part: Any, parameter: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
    """The whole tensor, from the ranks that hold parts of it; fp32, shaped as ``parameter``."""
    whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if own is not None:
        whole[_own_range(part, parameter)] = own.detach()
    if part.data_parallel_group.size() > 1:
        dist.all_reduce(whole, group=part.data_parallel_group)
    return whole.view(parameter.shape)


def _like(shard: Any, key: str, tensor: torch.Tensor) -> Any:
    """``tensor`` placed as the model's ``shard`` is, under the optimizer's key for it."""
    changes: dict[str, Any] = {"key": f"optimizer.state.{key}.{shard.key}", "data": tensor}
    if isinstance(shard, ShardedTensor):
        changes["dtype"] = tensor.dtype
    return replace(shard, **changes)
