"""The config of a run, and what follows from it: the plan, the model's sizes, the schedule's length."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

from pydantic import Field

from mixle_megatron.config.data import DataSection
from mixle_megatron.config.fields import Section
from mixle_megatron.config.model import ModelSection
from mixle_megatron.config.optimizer import OptimizerSection
from mixle_megatron.config.sections import (
    BatchSection,
    CheckpointSection,
    EvaluationSection,
    HostSection,
    LoggingSection,
    PipelineSection,
    PlanSection,
    RunSection,
)
from mixle_megatron.pipeline_split import PipelineSplit
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules.batch import resolve_microbatches
from mixle_megatron.rules.dimensions import (
    BatchDimensions,
    ExpertDimensions,
    LatentAttentionDimensions,
    ModelDimensions,
)
from mixle_megatron.rules.dimensions import padded_vocab_size as padded

Precision = Literal[
    "fp32",
    "bf16",
    "fp16",
    "fp8",
    "fp8-delayed",
    "fp8-tensorwise",
    "fp8-blockwise",
    "mxfp8",
    "fp4",
    "nvfp4",
]
"""Every precision name that a config may hold; ``rules`` says which of them this version executes."""


class Config(Section):
    """A whole run: what is trained, on what, and how it is split over ranks."""

    run: RunSection = Field(description="What the run is called, where it writes, how long it is.")
    plan: PlanSection = Field(
        default_factory=PlanSection, description="How many ranks the work is split over."
    )
    pipeline: PipelineSection = Field(
        default_factory=PipelineSection, description="Which layers each pipeline stage holds."
    )
    model: ModelSection = Field(description="The model, by Megatron's names.")
    precision: Precision = Field(
        default="fp32", description="What the forward and backward passes compute in."
    )
    batch: BatchSection = Field(description="The batch of one optimizer update.")
    optimizer: OptimizerSection = Field(description="The optimizer and its schedules, by Megatron's names.")
    data: DataSection = Field(description="Where the tokens come from.")
    checkpoint: CheckpointSection = Field(
        default_factory=CheckpointSection, description="When checkpoints are written."
    )
    evaluation: EvaluationSection = Field(
        default_factory=EvaluationSection, description="When held-out text is evaluated."
    )
    logging: LoggingSection = Field(
        default_factory=LoggingSection, description="What a run shows and writes about itself."
    )
    host: HostSection = Field(default_factory=HostSection, description="What of this host a run uses.")


def effective_plan(config: Config) -> PlanRecord:
    """The plan with ``microbatches`` resolved.

    Where ``auto`` gives no whole number the plan holds 1; the rules refuse such a config.
    """
    stated = config.plan.model_dump()
    plan = PlanRecord.from_mapping(stated | {"microbatches": 1})
    microbatches = stated["microbatches"]
    if microbatches == "auto":
        microbatches = resolve_microbatches(plan, batch_dimensions(config)) or 1
    return PlanRecord.from_mapping(stated | {"microbatches": microbatches})


def pipeline_split(config: Config) -> PipelineSplit:
    """Which layers each stage holds."""
    return split_of(config.pipeline)


def split_of(pipeline: PipelineSection) -> PipelineSplit:
    """The same, from the section that states it."""
    return PipelineSplit(**pipeline.model_dump())


def batch_dimensions(config: Config) -> BatchDimensions:
    """The batch of one update, for the rules."""
    return batch_of(config.batch, config.model)


def batch_of(batch: BatchSection, model: ModelSection) -> BatchDimensions:
    """The batch of one update, from the two sections that state it."""
    return BatchDimensions(batch.global_batch_size, batch.micro_batch_size, model.seq_length)


def padded_vocab_size(config: Config) -> int:
    """Rows of the embedding, padding included."""
    model = config.model
    return padded(model.vocab_size, config.plan.tp, model.make_vocab_size_divisible_by)


_AS_STATED = tuple(
    field.name
    for part in (ExpertDimensions, LatentAttentionDimensions)
    for field in fields(part)
    if field.name != "moe_ffn_hidden_size"
)
"""Sizes of experts and of latent attention that a config states as they are."""


def model_dimensions(config: Config) -> ModelDimensions:
    """The model's sizes with every default resolved."""
    return dimensions_of(config.model, config.plan.tp)


def dimensions_of(model: ModelSection, tp: int = 1) -> ModelDimensions:
    """The sizes of a model section; ``tp`` only sets how far the vocabulary is padded."""
    return ModelDimensions(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups or model.num_attention_heads,
        kv_channels=model.kv_channels or model.hidden_size // model.num_attention_heads,
        ffn_hidden_size=model.ffn_hidden_size or 4 * model.hidden_size,
        seq_length=model.seq_length,
        vocab_size=model.vocab_size,
        padded_vocab_size=padded(model.vocab_size, tp, model.make_vocab_size_divisible_by),
        max_position_embeddings=model.max_position_embeddings or model.seq_length,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        normalization=model.normalization,
        gated_linear_unit=model.gated_linear_unit,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        **{name: getattr(model, name) for name in _AS_STATED},
        moe_ffn_hidden_size=_expert_width(model),
        mtp_num_layers=model.mtp_num_layers,
    )


def _expert_width(model: ModelSection) -> int | None:
    """Width of each expert; of a dense model only what it states."""
    if model.moe_ffn_hidden_size is not None or model.num_moe_experts is None:
        return model.moe_ffn_hidden_size
    return model.ffn_hidden_size or 4 * model.hidden_size


def decay_steps(config: Config) -> int:
    """Updates over which the learning rate decays, warm-up included."""
    return decay_steps_of(config.optimizer, config.run)


def decay_steps_of(optimizer: OptimizerSection, run: RunSection) -> int:
    """The same, from the two sections that state it."""
    return optimizer.decay_steps or max(run.steps, optimizer.warmup_steps + 1)


def effective_config(config: Config) -> Config:
    """The config with every default that follows from other values written out as a number.

    ``plan.microbatches`` stays as stated: ``auto`` lets the same file be run under another plan.
    """
    sizes = model_dimensions(config)
    names = (
        *("num_query_groups", "kv_channels", "ffn_hidden_size", "max_position_embeddings"),
        "moe_ffn_hidden_size",
    )
    optimizer = config.optimizer
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    schedule = {
        "decay_steps": decay_steps(config),
        "start_weight_decay": optimizer.weight_decay if start is None else start,
        "end_weight_decay": optimizer.weight_decay if end is None else end,
    }
    model = config.model.model_copy(update={name: getattr(sizes, name) for name in names})
    return config.model_copy(update={"model": model, "optimizer": optimizer.model_copy(update=schedule)})
