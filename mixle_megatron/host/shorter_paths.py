"""What torch computes on a CPU in fewer passes over memory than Megatron's own code for CUDA.

Each computes what the original computes, to rounding, and hands on to it whatever it does not cover.
They matter because Megatron's code is written around kernels that exist for CUDA alone (an extension
that accumulates weight gradients, collectives that run beside them), and what is left of it without
these costs a CPU a tenth of a step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils import get_total_norm


def linear_in_one_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """``linear_with_grad_accumulation_and_async_allreduce`` where its backward pass exchanges nothing."""

    @functools.wraps(original)
    def linear(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        does_more = gradient_accumulation_fusion or allreduce_dgrad or sequence_parallel
        if does_more or grad_output_buffer is not None or others.get("gtp_remat_size", 1) > 1:
            return original(
                input,
                weight,
                bias,
                gradient_accumulation_fusion,
                allreduce_dgrad,
                sequence_parallel,
                grad_output_buffer,
                **others,
            )
        return functional.linear(input, weight, bias)

    return linear


def cross_entropy_in_one_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """``vocab_parallel_cross_entropy`` where one rank has all the logits.

    Takes logits ``[sequence, batch, vocabulary]`` of any floating dtype and targets
    ``[sequence, batch]``; gives fp32 losses of the targets' shape.
    """

    @functools.wraps(original)
    def cross_entropy(
        vocab_parallel_logits: torch.Tensor,
        target: torch.Tensor,
        label_smoothing: float = 0.0,
        **group: Any,
    ) -> torch.Tensor:
        alone = "tp_group" in group and group["tp_group"].size() == 1  # 0.16 does not say whose logits
        if label_smoothing or not alone:
            return original(vocab_parallel_logits, target, label_smoothing, **group)
        logits = vocab_parallel_logits.float().flatten(0, -2)
        return functional.cross_entropy(logits, target.flatten(), reduction="none").view(target.shape)

    return cross_entropy


def norm_of_all(_original: Any) -> Callable[..., Any]:
    """``l2_norm_impl``: the L2 norm of a list of lists of tensors taken together, ``[1]``, fp32."""

    def norm(
        _chunk_size: int, _overflow: torch.Tensor, tensor_lists: list[list[torch.Tensor]], *_per_tensor: Any
    ) -> tuple[torch.Tensor, None]:
        tensors = [tensor for tensors in tensor_lists for tensor in tensors]
        return get_total_norm(tensors, foreach=True).float().view(1), None

    return norm


def clipped_where_finite(original: Callable[..., None]) -> Callable[..., None]:
    """``clip_grad_by_total_norm_fp32``, but for an infinite norm, which clips nothing."""

    @functools.wraps(original)
    def clip(parameters: Any, max_norm: float, total_norm: float, *others: Any, **named: Any) -> None:
        if max_norm != math.inf:
            original(parameters, max_norm, total_norm, *others, **named)

    return clip


def copies_between_memories(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``_copy_main_params_to_model_params`` where these are two: in fp32 both are one memory."""

    @functools.wraps(original)
    def copy(optimizer: Any) -> None:
        all_fp32 = not optimizer.is_stub_optimizer and not any(optimizer.model_float16_groups)
        if not (all_fp32 and all(_is_own_main(*each) for each in _fp32_pairs(optimizer))):
            original(optimizer)

    return copy


def _fp32_pairs(optimizer: Any) -> Any:
    for mains, models in zip(optimizer.shard_fp32_groups, optimizer.model_fp32_groups, strict=True):
        yield from zip(mains, models, strict=True)


def _is_own_main(main: torch.Tensor, model: torch.Tensor) -> bool:
    return main.untyped_storage().data_ptr() == model.untyped_storage().data_ptr()
