"""Megatron's gather and reduce-scatter of parts of unequal length, which gloo's own do not take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def gather_unequal(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Megatron's gather along dimension 0, of parts of unequal length too: padded to the longest."""

    @functools.wraps(original)
    def gather(
        input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return original(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return gather


def reduce_scatter_unequal(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Megatron's reduce-scatter along dimension 0, of parts of unequal length too.

    Every rank sends each other one its part (gloo's all-to-all takes unequal ones) and adds what it
    gets in rank order.
    """

    @functools.wraps(original)
    def reduce_scatter(
        input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return original(input_, group, input_split_sizes, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        own = sizes[group.rank()]
        received = input_.new_empty((own * group.size(), *input_.shape[1:]))
        dist.all_to_all_single(received, input_.contiguous(), [own] * group.size(), sizes, group=group)
        return received.unflatten(0, (group.size(), own)).sum(0)

    return reduce_scatter
