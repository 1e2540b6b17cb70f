"""The ``optimizer`` section: Megatron's OptimizerConfig and OptimizerParamScheduler, by their names."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mixle_megatron.config.fields import Count, CountOrZero, Fraction, NumberOrZero, Positive, Section


class OptimizerSection(Section):
    """Megatron's optimizer and its schedules of learning rate and weight decay."""

    name: Literal["adam", "sgd"] = Field(default="adam", description="Megatron's optimizer.")
    lr: NumberOrZero = Field(description="Highest learning rate.")
    min_lr: NumberOrZero = Field(default=0.0, description="Learning rate at the end of the decay.")
    weight_decay: NumberOrZero = Field(default=0.01, description="Weight decay; not on biases and norms.")
    decoupled_weight_decay: bool = Field(
        default=True, description="Decay apart from the gradient (AdamW) in adam."
    )
    adam_beta1: Fraction = Field(default=0.9, description="Decay of the gradient's running mean.")
    adam_beta2: Fraction = Field(default=0.999, description="Decay of the squared gradient's running mean.")
    adam_eps: Positive = Field(default=1e-8, description="Added to adam's denominator.")
    sgd_momentum: Fraction = Field(default=0.9, description="Momentum of sgd.")
    clip_grad: NumberOrZero = Field(
        default=1.0, description="Largest global L2 norm of the gradient; 0 clips nothing."
    )

    schedule: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = Field(
        default="constant", description="Decay of the learning rate (Megatron's lr_decay_style)."
    )
    warmup_steps: CountOrZero = Field(
        default=0, description="Updates of linear warm-up; may be longer than the run."
    )
    init_lr: NumberOrZero = Field(default=0.0, description="Learning rate at the start of the warm-up.")
    decay_steps: Count | None = Field(
        default=None,
        description="Updates until min_lr is reached; null: max(run.steps, warmup_steps + 1).",
    )
    wsd_decay_steps: Count | None = Field(
        default=None, description="Updates of the decay that ends a WSD schedule."
    )
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = Field(
        default="exponential", description="Shape of the decay that ends a WSD schedule."
    )
    start_weight_decay: NumberOrZero | None = Field(
        default=None, description="Weight decay at the start; null: weight_decay."
    )
    end_weight_decay: NumberOrZero | None = Field(
        default=None, description="Weight decay at the end; null: weight_decay."
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="How weight decay goes from its start to its end."
    )

    initial_loss_scale: Positive = Field(
        default=64.0, description="fp16: the loss scale at the start, of the sum over a microbatch's tokens."
    )
    min_loss_scale: Positive = Field(default=2.0**-16, description="fp16: the lowest loss scale.")
    loss_scale_window: Count = Field(
        default=1000, description="fp16: updates without overflow after which the loss scale is doubled."
    )
    hysteresis: Count = Field(
        default=2, description="fp16: overflows after which each further one halves the loss scale."
    )
