"""The whole parameters of a model that is split over ranks, one at a time, on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from mixle_megatron.models.initialisation import whole_shape
from mixle_megatron.optimizer_shards import gathered_value
from mixle_megatron.stage import Stage


def whole_parameters(stage: Stage) -> Iterator[tuple[str, torch.Tensor]]:
    """Logical names and whole fp32 values, in one order and to the last bit the same on every rank.

    Every rank has to take all of them: each is put together from the optimizer's shards, gathered
    over tp, and sent along the pipeline by the first stage that holds it.
    """
    own = dict(stage.named_parameters())
    pipeline = stage.groups.collection.pp
    described = {name: whole_shape(parameter, stage.groups) for name, parameter in own.items()}
    holders: list[Any] = [None] * pipeline.size()
    dist.all_gather_object(holders, described, group=pipeline)
    seen: set[str] = set()
    for rank, names in enumerate(holders):
        for name, shape in names.items():
            if name in seen:
                continue
            seen.add(name)
            if rank == pipeline.rank():
                whole = _over_tensor_ranks(own[name], stage)
            else:
                whole = torch.empty(shape, dtype=torch.float32, device=stage.device)
            if pipeline.size() > 1:
                dist.broadcast(whole, src=dist.get_global_rank(pipeline, rank), group=pipeline)
            yield name, whole


def _over_tensor_ranks(parameter: torch.Tensor, stage: Stage) -> torch.Tensor:
    """The whole of a parameter whose shards this stage's tensor-parallel ranks hold."""
    own = gathered_value(stage.optimizer, parameter)
    tensor = stage.groups.cuts(parameter)
    if not getattr(parameter, "tensor_model_parallel", False) or tensor.size() == 1:
        return own
    parts = [torch.empty_like(own) for _ in range(tensor.size())]
    dist.all_gather(parts, own.contiguous(), group=tensor)
    dim, stride = parameter.partition_dim, parameter.partition_stride
    pieces = [part.chunk(stride, dim) for part in parts]
    return torch.cat([pieces[rank][each] for each in range(stride) for rank in range(tensor.size())], dim)
