"""An optimizer and its schedules, as plain values by Megatron's names. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class OptimizerSettings:
    """What ``prepare(optimizer=...)`` takes, and what the ``optimizer`` section of a config becomes.

    Steps are committed updates. ``None`` for a weight decay at the start or the end means
    ``weight_decay``. Megatron decays no biases and norms; ``decays_vectors`` does, as torch.optim.

    The loss scale is fp16's. It multiplies the loss summed over the tokens of a microbatch, not their mean,
    so that it starts and may end far below the scales that are usual for means: with 2,048 tokens 64 is
    131,072 of a mean.
    """

    name: str = "adam"
    lr: float = 1e-3
    min_lr: float = 0.0
    weight_decay: float = 0.01
    decoupled_weight_decay: bool = True
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9
    clip_grad: float = 1.0
    schedule: str = "constant"
    warmup_steps: int = 0
    init_lr: float = 0.0
    decay_steps: int = 1
    wsd_decay_steps: int | None = None
    lr_wsd_decay_style: str = "exponential"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    weight_decay_incr_style: str = "constant"
    initial_loss_scale: float = 64.0
    min_loss_scale: float = 2.0**-16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    decays_vectors: bool = False

    @classmethod
    def from_section(cls, section: Any, *, decay_steps: int) -> OptimizerSettings:
        """The settings that a config's ``optimizer`` section states, with its decay resolved."""
        names = [field.name for field in fields(cls) if field.name != "decays_vectors"]
        stated = {name: getattr(section, name) for name in names}
        return cls(**(stated | {"decay_steps": decay_steps}))

    @property
    def start_weight_decay_value(self) -> float:
        """Weight decay of the first update."""
        return self.weight_decay if self.start_weight_decay is None else self.start_weight_decay

    @property
    def end_weight_decay_value(self) -> float:
        """Weight decay after ``decay_steps`` updates."""
        return self.weight_decay if self.end_weight_decay is None else self.end_weight_decay
