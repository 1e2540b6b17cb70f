"""The parts of parameters and moments that Megatron's DistributedOptimizer keeps on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

VALUE = "param"
TORCH_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def moments(part: Any) -> tuple[str, ...]:
    """Names of the running averages that the optimizer keeps of each parameter."""
    if part.config.optimizer == "sgd" and part.config.sgd_momentum == 0:
        return ()
    return _MOMENTS[part.config.optimizer]


def model_parameters(optimizer: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Every parameter of the stage with the DistributedOptimizer that updates it."""
    for part in optimizer.chained_optimizers:
        for buffer in part.buffers:
            for parameter in buffer.param_index_map:
                yield part, parameter


def is_own_value(parameter: torch.Tensor) -> bool:
    """Whether the optimizer's fp32 value of a parameter is that parameter's memory, as in fp32 training."""
    return parameter.dtype == torch.float32


def own_value(part: Any, parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's shard of a parameter's fp32 value, flat; None where it holds none."""
    if parameter not in part.model_param_group_index_map:
        return None
    group, order = part.model_param_group_index_map[parameter]
    return part.optimizer.param_groups[group]["params"][order]


def own_tensors(part: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """This rank's shards of a parameter's value and moments; None where it holds none.

    Moments that an optimizer has not made yet, since it has not stepped, are made here as zeros.
    """
    value = own_value(part, parameter)
    if value is None:
        return dict.fromkeys((VALUE, *moments(part)))
    state = part.optimizer.state[value]
    for moment in moments(part):
        if state.get(moment) is None:
            state[moment] = torch.zeros_like(value, dtype=torch.float32)
    if isinstance(part.optimizer, TORCH_ADAMS):
        state.setdefault("step", torch.tensor(0.0))
    return {VALUE: value} | {moment: state[moment] for moment in moments(part)}


def own_range(part: Any, parameter: torch.Tensor) -> slice:
    """Which elements of the flattened parameter this rank's shards are."""
    owned = part._get_model_param_range_map(parameter)["param"]
    return slice(owned.start, owned.end)


def gather(part: Any, parameter: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
    """The whole tensor, from the ranks that hold parts of it; fp32, shaped as ``parameter``."""
    whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if own is not None:
        whole[own_range(part, parameter)] = own.detach()
    if part.data_parallel_group.size() > 1:
        dist.all_reduce(whole, group=part.data_parallel_group)
    return whole.view(parameter.shape)


def gathered_value(optimizer: Any, parameter: torch.Tensor) -> torch.Tensor:
    """A model parameter's fp32 value, whole over the data-parallel ranks."""
    part = next(part for part, each in model_parameters(optimizer) if each is parameter)
    return gather(part, parameter, own_value(part, parameter))
