"""Values that a config states and nothing reads, because of another value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mixle_megatron.config.schema import Config
from mixle_megatron.errors import Fault

Condition = tuple[str, Callable[[Any], bool]]

_READ_BY: dict[tuple[str, ...], Condition] = {
    (
        "optimizer.adam_beta1",
        "optimizer.adam_beta2",
        "optimizer.adam_eps",
        "optimizer.decoupled_weight_decay",
    ): ("optimizer.name", lambda name: name == "adam"),
    ("optimizer.sgd_momentum",): ("optimizer.name", lambda name: name == "sgd"),
    ("optimizer.min_lr",): ("optimizer.schedule", lambda schedule: schedule != "constant"),
    ("optimizer.init_lr",): ("optimizer.warmup_steps", lambda steps: steps > 0),
    ("optimizer.wsd_decay_steps", "optimizer.lr_wsd_decay_style"): (
        "optimizer.schedule",
        lambda schedule: schedule == "WSD",
    ),
    ("model.rotary_base", "model.rotary_percent"): (
        "model.position_embedding_type",
        lambda kind: kind == "rope",
    ),
    ("model.add_qkv_bias",): ("model.add_bias_linear", lambda biases: not biases),
}
"""Keys, and the key whose value decides whether they are read."""


def unread_values(config: Config) -> list[Fault]:
    """Values other than the default that have no effect; they are worth a warning, and no refusal.

    A file may well state them, and an override choose another optimizer or schedule.
    """
    warnings = []
    for keys, (decider, is_read) in _READ_BY.items():
        decision = _value(config, decider)
        if is_read(decision):
            continue
        for key in keys:
            value = _value(config, key)
            if value != _default(config, key):
                warnings.append(Fault(key, value, f"has no effect with {decider}={decision}"))
    return warnings


def _value(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _default(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return type(getattr(config, section)).model_fields[name].default
