"""A plan, a batch and a schedule in Megatron's names, as plain values. No torch.

``translate`` and the session build Megatron's objects from these, and ``mixle-megatron plan`` shows
them: what is shown is what is passed.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from mixle_megatron.optimizer_settings import OptimizerSettings
from mixle_megatron.pipeline_split import EVEN, PipelineSplit
from mixle_megatron.rules.dimensions import (
    BatchDimensions,
    ExpertDimensions,
    LatentAttentionDimensions,
    ModelDimensions,
)
from mixle_megatron.topology import Topology


def parallel_state_arguments(plan: Any, split: PipelineSplit = EVEN) -> dict[str, Any]:
    """The plan as ``megatron.core.parallel_state.initialize_model_parallel`` takes it.

    ``expert_tensor_parallel_size`` is always passed: Megatron's own default is tp, mixle's is 1.
    """
    return {
        "tensor_model_parallel_size": plan.tp,
        "pipeline_model_parallel_size": plan.pp,
        "context_parallel_size": plan.cp,
        "expert_model_parallel_size": plan.ep,
        "expert_tensor_parallel_size": plan.etp,
        "num_distributed_optimizer_instances": Topology(plan).num_distributed_optimizer_instances,
        "order": "tp-cp-ep-dp-pp",
        **_virtual_stages(plan, split),
    }


def model_parallel_arguments(plan: Any, split: PipelineSplit = EVEN) -> dict[str, Any]:
    """The plan's part of ``TransformerConfig``; sequence parallelism comes with tp."""
    return {
        "tensor_model_parallel_size": plan.tp,
        "pipeline_model_parallel_size": plan.pp,
        "context_parallel_size": plan.cp,
        "expert_model_parallel_size": plan.ep,
        "expert_tensor_parallel_size": plan.etp,
        "sequence_parallel": plan.tp > 1,
        **{name: value for name, value in split.arguments().items() if name != _VIRTUAL},
        **_virtual_stages(plan, split),
    }


_VIRTUAL = "virtual_pipeline_model_parallel_size"


def _virtual_stages(plan: Any, split: PipelineSplit) -> dict[str, int]:
    """The chunks on each stage; Megatron takes even a stated 1 for the interleaved schedule."""
    chunks = split.chunks(plan.pp)
    return {_VIRTUAL: chunks} if chunks > 1 else {}


def distributed_data_parallel_arguments(plan: Any) -> dict[str, Any]:
    """The plan's part of ``DistributedDataParallelConfig``: the distributed optimizer for every plan."""
    return {
        "use_distributed_optimizer": True,
        "num_distributed_optimizer_instances": Topology(plan).num_distributed_optimizer_instances,
        "grad_reduce_in_fp32": True,
    }


def batch_arguments(plan: Any, batch: BatchDimensions) -> dict[str, int]:
    """The batch as one call of a pipeline schedule takes it.

    ``forward_backward_func`` runs ``num_microbatches``; gradient_accumulation_steps such calls make
    one optimizer update.
    """
    return {
        "micro_batch_size": batch.micro_batch_size,
        "num_microbatches": plan.microbatches,
        "seq_length": batch.seq_length,
        "global_batch_size": batch.global_batch_size,
        "data_parallel_size": plan.data_parallel_size,
    }


def model_arguments(model: ModelDimensions) -> dict[str, Any]:
    """The model's sizes as ``TransformerConfig`` and ``GPTModel`` name them; the vocabulary is padded.

    Those of experts, of latent attention and of prediction layers are there where the model has any;
    with latent attention they are ``MLATransformerConfig``'s.
    """
    parts = {ExpertDimensions: model.num_moe_experts, LatentAttentionDimensions: model.multi_latent_attention}
    optional = [field.name for part, there in parts.items() if there for field in fields(part)]
    optional += ["mtp_num_layers"] if model.mtp_num_layers is not None else []
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.kv_channels,
        "ffn_hidden_size": model.ffn_hidden_size,
        "vocab_size": model.padded_vocab_size,
        "max_sequence_length": model.max_position_embeddings,
        **{name: getattr(model, name) for name in optional},
        **({"rope_type": "rope"} if model.multi_latent_attention else {}),
    }


def optimizer_arguments(settings: OptimizerSettings) -> dict[str, Any]:
    """An optimizer as ``OptimizerConfig`` takes it, with the fields that its kind reads.

    No clipping is an infinite ``clip_grad``: Megatron computes the gradient norm, which receipts
    report, only where it clips.
    """
    own = {
        "adam": ("adam_beta1", "adam_beta2", "adam_eps", "decoupled_weight_decay"),
        "sgd": ("sgd_momentum",),
    }
    shared = ("lr", "min_lr", "weight_decay")
    return {
        "optimizer": settings.name,
        **{name: getattr(settings, name) for name in (*shared, *own[settings.name])},
        "clip_grad": settings.clip_grad if settings.clip_grad > 0 else math.inf,
        "use_distributed_optimizer": True,
    }


def loss_scale_arguments(settings: OptimizerSettings) -> dict[str, Any]:
    """fp16's dynamic loss scale as ``OptimizerConfig`` takes it."""
    names = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    return {"fp16": True, **{name: getattr(settings, name) for name in names}}


def scheduler_arguments(settings: OptimizerSettings) -> dict[str, Any]:
    """The schedules as ``OptimizerParamScheduler`` takes them, in committed updates."""
    return {
        "init_lr": settings.init_lr,
        "max_lr": settings.lr,
        "min_lr": settings.min_lr,
        "lr_warmup_steps": settings.warmup_steps,
        "lr_decay_steps": settings.decay_steps,
        "lr_decay_style": settings.schedule,
        "start_wd": settings.start_weight_decay_value,
        "end_wd": settings.end_weight_decay_value,
        "wd_incr_steps": settings.decay_steps,
        "wd_incr_style": settings.weight_decay_incr_style,
        "wsd_decay_steps": settings.wsd_decay_steps,
        "lr_wsd_decay_style": settings.lr_wsd_decay_style,
    }
