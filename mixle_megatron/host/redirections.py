"""The one table of what is redirected where the device is the CPU, with its reasons.

Replacing the factory functions and a few tensor methods costs nothing that can be measured, where
a ``TorchFunctionMode`` over every call costs 2 to 40 % of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mixle_megatron.host import shorter_exchanges, shorter_paths, stand_ins, unequal_parts


@dataclass(frozen=True)
class Redirection:
    """One attribute that a stand-in replaces while a CPU session is open.

    Attributes:
        owner: dotted name of the module or class that holds the attribute.
        name: the attribute; None is given to ``make`` where a version of Megatron does not have it.
        reason: why Megatron-Core does not run on a CPU without it, or runs slowly.
        make: from the original attribute to the stand-in.
    """

    owner: str
    name: str
    reason: str
    make: Callable[[Any], Any]


def _instead(stand_in: Any) -> Callable[[Any], Any]:
    return lambda _original: stand_in


def _rows(owner: str, reason: str, **stand_in_by_name: Any) -> tuple[Redirection, ...]:
    return tuple(
        Redirection(owner, name, reason, _instead(stand_in)) for name, stand_in in stand_in_by_name.items()
    )


_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "rand", "randn", "randint")

REDIRECTIONS: tuple[Redirection, ...] = (
    *_rows(
        "torch.cuda",
        "Megatron allocates on torch.cuda.current_device() and asks how many there are",
        current_device=stand_ins.current_device,
        device_count=stand_ins.one_device,
        set_device=stand_ins.no_effect,
    ),
    *_rows(
        "torch.cuda",
        "gradient reduction, the pipeline and HSDP order their work with streams and events",
        current_stream=stand_ins.current_stream,
        default_stream=stand_ins.current_stream,
        stream=stand_ins.stream_context,
        Stream=stand_ins.Stream,
        Event=stand_ins.Event,
    ),
    *_rows(
        "torch.cuda",
        "the pipeline and the checkpoint writer wait for the device and trim its cache",
        synchronize=stand_ins.no_effect,
        empty_cache=stand_ins.no_effect,
    ),
    *_rows(
        "torch.cuda",
        "dropout and activation recomputation save, seed and restore the device's generator",
        get_rng_state=stand_ins.get_rng_state,
        set_rng_state=stand_ins.set_rng_state,
        manual_seed=stand_ins.manual_seed,
    ),
    *_rows(
        "torch.cuda.random",
        "the RNG tracker reads the generator by this name",
        get_rng_state=stand_ins.get_rng_state,
    ),
    *_rows(
        "torch.cuda.nvtx",
        "the schedules mark ranges for NVIDIA's profiler",
        range_push=stand_ins.no_effect,
        range_pop=stand_ins.no_effect,
    ),
    *_rows(
        "megatron.core.tensor_parallel.random",
        "the RNG tracker sets the CUDA generator through torch's C bindings",
        _get_cuda_rng_state=stand_ins.get_rng_state,
        _set_cuda_rng_state=stand_ins.set_rng_state,
    ),
    *(
        Redirection(
            "torch",
            name,
            "Megatron writes device='cuda' in the optimizers, the schedules and attention masks",
            stand_ins.factory_on_cpu,
        )
        for name in _FACTORIES
        if hasattr(torch, name)
    ),
    *(
        Redirection(
            owner,
            name,
            "Megatron compiles it by torch.compile, which needs a C++ compiler on a CPU and refuses "
            "to trace the stand-ins",
            stand_ins.not_compiled,
        )
        for owner, name in (
            ("megatron.core.activations", "squared_relu"),
            ("megatron.core.activations", "quick_gelu"),
            ("megatron.core.transformer.moe.router.TopKRouter", "_apply_expert_bias"),
        )
    ),
    Redirection(
        "megatron.core.transformer.multi_latent_attention",
        "TELinear",
        "0.16 asks whether a layer is an instance of it, and without Transformer Engine it is no class",
        stand_ins.class_or_nothing_of_it,
    ),
    Redirection(
        "megatron.core.transformer.moe.moe_utils",
        "te_general_gemm",
        "the router of 0.16 asks whether it is None, and without Transformer Engine there is no such name",
        stand_ins.unchanged,
    ),
    Redirection(
        "megatron.core.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        "split sizes that are on the CPU already stay tensors, where the collectives take numbers",
        stand_ins.numbers_on_cpu,
    ),
    Redirection(
        "megatron.core.tensor_parallel.mappings",
        "_gather_along_first_dim",
        "tokens of experts are gathered in unequal parts, and gloo's all_gather takes equal ones",
        unequal_parts.gather_unequal,
    ),
    Redirection(
        "megatron.core.tensor_parallel.mappings",
        "_reduce_scatter_along_first_dim",
        "likewise gloo's reduce_scatter",
        unequal_parts.reduce_scatter_unequal,
    ),
    Redirection(
        "torch.Tensor", "to", "tensors are moved to torch.cuda.current_device()", stand_ins.to_on_cpu
    ),
    Redirection(
        "torch.Tensor",
        "cuda",
        "the tied embedding and checkpoints are moved to the device",
        _instead(stand_ins.itself),
    ),
    Redirection(
        "torch.Tensor",
        "pin_memory",
        "pinned memory belongs to CUDA; the checkpoint writer asks for it",
        _instead(stand_ins.itself),
    ),
    Redirection(
        "torch.Tensor",
        "type",
        "the optimizers and gradient clipping compare it with 'torch.cuda.FloatTensor'",
        stand_ins.type_named_as_cuda,
    ),
    *(
        Redirection(owner, name, f"speed: {reason}", make)
        for owner, name, reason, make in (
            (
                "megatron.core.tensor_parallel.layers",
                "linear_with_grad_accumulation_and_async_allreduce",
                "its autograd function exists to overlap and to accumulate by an extension",
                shorter_paths.linear_in_one_call,
            ),
            (
                "megatron.core.tensor_parallel",
                "vocab_parallel_cross_entropy",
                "it takes ten passes over the logits for what other ranks might have",
                shorter_paths.cross_entropy_in_one_call,
            ),
            (
                "megatron.core.tensor_parallel.layers",
                "copy_to_tensor_model_parallel_region",
                "a group of one has nothing to exchange, forward or backward",
                shorter_exchanges.unless_alone,
            ),
            (
                "megatron.core.tensor_parallel.layers",
                "reduce_from_tensor_model_parallel_region",
                "likewise",
                shorter_exchanges.unless_alone,
            ),
            (
                "torch.distributed",
                "all_reduce",
                "gloo reduces a few numbers in as many rounds as many, even those of a group of one",
                shorter_exchanges.all_reduce_in_one_round,
            ),
            *(
                (
                    owner,
                    name,
                    "gloo scatters a sum by computing all of it on every rank",
                    shorter_exchanges.reduce_scatter_by_parts,
                )
                for owner, name in (
                    ("torch.distributed", "reduce_scatter_tensor"),
                    ("megatron.core.tensor_parallel.mappings", "dist_reduce_scatter_func"),
                    ("megatron.core.distributed.param_and_grad_buffer", "dist_reduce_scatter_func"),
                )
            ),
            (
                "megatron.core.tensor_parallel.layers",
                "dist_reduce_scatter_func",
                "likewise, and what would overlap with it has no other processor",
                shorter_exchanges.reduce_scatter_at_once,
            ),
            (
                "megatron.core.distributed.param_and_grad_buffer",
                "dist_all_gather_func",
                "gloo copies the parameters of a group of one onto themselves",
                shorter_exchanges.all_gather_unless_alone,
            ),
            (
                "megatron.core.optimizer.clip_grads",
                "l2_norm_impl",
                "without apex it takes a call for each gradient, and a number out of each result",
                shorter_paths.norm_of_all,
            ),
            (
                "megatron.core.optimizer.optimizer",
                "clip_grad_by_total_norm_fp32",
                "no clipping is an infinite norm here, for which it goes through every gradient",
                shorter_paths.clipped_where_finite,
            ),
            (
                "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
                "_copy_main_params_to_model_params",
                "in fp32 the main parameters are the parameters, and would be copied onto themselves",
                shorter_paths.copies_between_memories,
            ),
        )
    ),
)
