"""A plan, a model's fields, a precision and optimizer settings in Megatron's own configurations.

Each function makes one Megatron object and nothing else; what is chosen, and why, is said where
it is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn import functional

from mixle_megatron.megatron_names import (
    distributed_data_parallel_arguments,
    loss_scale_arguments,
    model_parallel_arguments,
    optimizer_arguments,
    scheduler_arguments,
)
from mixle_megatron.megatron_versions import auxiliary_coefficient
from mixle_megatron.optimizer_settings import OptimizerSettings
from mixle_megatron.pipeline_split import EVEN, PipelineSplit

PARAMETER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of model parameters and activations for each precision that is executed."""

ACTIVATIONS = {
    "gelu": functional.gelu,
    "silu": functional.silu,
    "relu": functional.relu,
}


def activation_function(name: str) -> Any:
    """The function that a config's ``activation_func`` names, as TransformerConfig takes it."""
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]
    from megatron.core import activations

    return {"squared_relu": activations.squared_relu, "quick_gelu": activations.quick_gelu}[name]


def leave_uninitialised(tensor: torch.Tensor) -> torch.Tensor:
    """An ``init_method`` that does nothing.

    Parameters are initialised from the seed and their logical names afterwards; Megatron still has
    to run its initialisation, since that is where it marks how each parameter is sharded.
    """
    return tensor


@dataclass(frozen=True)
class Host:
    """What of a host decides how a plan is translated.

    Attributes:
        device: where parameters live and collectives run.
        transformer_engine: whether layers come from Transformer Engine.
        overlaps_reduction: whether gradients are reduced while the backward pass still runs. On a
            CPU the reduction would only take the cores from it.
    """

    device: torch.device
    transformer_engine: bool
    overlaps_reduction: bool

    @classmethod
    def of(cls, device: torch.device) -> Host:
        """What ``device`` gives; Transformer Engine needs CUDA, and Megatron has to find it."""
        if device.type != "cuda":
            return cls(device, transformer_engine=False, overlaps_reduction=False)
        from megatron.core.extensions import transformer_engine

        return cls(device, transformer_engine=transformer_engine.HAVE_TE, overlaps_reduction=True)

    @property
    def on_cuda(self) -> bool:
        """Whether kernels that exist only for CUDA may be asked for."""
        return self.device.type == "cuda"


def transformer_config(
    plan: Any, model: Mapping[str, Any], *, precision: str, host: Host, split: PipelineSplit = EVEN
) -> TransformerConfig:
    """Megatron's TransformerConfig for ``plan``.

    Args:
        plan: a ``ParallelPlan`` or a record with its fields.
        model: TransformerConfig fields of the model itself, by Megatron's names; ``activation_func``
            may be a name.
        precision: a key of :data:`PARAMETER_DTYPES`.
        host: where it will run; fused kernels are asked for on CUDA alone.
        split: how layers are dealt to pipeline stages.

    The loss is summed over tokens (``calculate_per_token_loss``), so that the session divides once
    by the tokens of the whole update, whatever their distribution over ranks and microbatches.
    """
    dtype = PARAMETER_DTYPES[precision]
    fields = dict(model)
    if isinstance(fields.get("activation_func"), str):
        fields["activation_func"] = activation_function(fields["activation_func"])
    fields |= {
        **model_parallel_arguments(plan, split),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        # Between two stages the transfers of interleaved chunks in both directions would be matched
        # wrongly in one batch, on any backend; Megatron-LM does the same.
        "overlap_p2p_comm": split.chunks(plan.pp) > 1,
        "batch_p2p_comm": split.chunks(plan.pp) == 1,
        "calculate_per_token_loss": True,
        "init_method": leave_uninitialised,
        "output_layer_init_method": leave_uninitialised,
        "embedding_init_method": leave_uninitialised,
        "perform_initialization": True,
        "use_cpu_initialization": False,
        # torch layers and Transformer Engine both take the causal mask from attn_mask_type
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        # Megatron's fused gelu is the tanh approximation, and gelu means the exact one here
        "bias_activation_fusion": host.on_cuda and _is_swiglu(fields),
        "bias_dropout_fusion": host.on_cuda,
        # the fused weight gradient of local layers is an extension of apex; Transformer Engine has its own
        "gradient_accumulation_fusion": host.transformer_engine,
    }
    if fields.get("num_moe_experts") is not None:
        fields |= _expert_arguments(fields, plan, host)
    latent = fields.get("multi_latent_attention", False)
    return (MLATransformerConfig if latent else TransformerConfig)(**fields)


def _expert_arguments(fields: Mapping[str, Any], plan: Any, host: Host) -> dict[str, Any]:
    """What of a mixture of experts depends on the plan, on Megatron's version, or on the host."""
    arguments: dict[str, Any] = {
        name: auxiliary_coefficient(fields[name], plan)
        for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff")
        if fields.get(name) is not None
    }
    # Grouped matrix products are kernels of CUDA; elsewhere experts are computed one after another.
    arguments["moe_grouped_gemm"] = host.on_cuda and bool(fields.get("moe_grouped_gemm"))
    return arguments


def _is_swiglu(fields: Mapping[str, Any]) -> bool:
    return bool(fields.get("gated_linear_unit")) and fields.get("activation_func") is functional.silu


def ddp_config(plan: Any, *, host: Host) -> DistributedDataParallelConfig:
    """DistributedDataParallel's configuration: the distributed optimizer for every plan.

    ``dp_shard`` ranks share one instance of it and ``dp_replicate`` instances exist, so that
    ``dp_shard=1`` is the case of one rank an instance and every plan has one checkpoint format.
    Gradients are accumulated and reduced in fp32.
    """
    return DistributedDataParallelConfig(
        **distributed_data_parallel_arguments(plan),
        overlap_grad_reduce=host.overlaps_reduction and plan.data_parallel_size * plan.cp > 1,
        overlap_param_gather=False,
        average_in_collective=False,
    )


def optimizer_config(settings: OptimizerSettings, *, precision: str) -> OptimizerConfig:
    """Megatron's OptimizerConfig."""
    return OptimizerConfig(
        **optimizer_arguments(settings),
        **(loss_scale_arguments(settings) if precision == "fp16" else {}),
        bf16=precision == "bf16",
        params_dtype=PARAMETER_DTYPES[precision],
    )


def param_scheduler(settings: OptimizerSettings, optimizer: Any) -> OptimizerParamScheduler:
    """Megatron's schedule of learning rate and weight decay, which a checkpoint's own replaces."""
    return OptimizerParamScheduler(
        optimizer,
        **scheduler_arguments(settings),
        use_checkpoint_opt_param_scheduler=True,
        override_opt_param_scheduler=False,
    )
