"""Values that a config states and nothing reads, because of another value."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import BaseModel

from mixle_megatron.config.experts import ExpertFields
from mixle_megatron.config.latent_attention import LatentAttentionFields
from mixle_megatron.config.schema import Config
from mixle_megatron.config.schema_faults import shown
from mixle_megatron.errors import Fault

Condition = tuple[str, Callable[[Any], bool]]


def _is_stated(value: Any) -> bool:
    return value is not None


def _keys(section: type[BaseModel], switch: str) -> tuple[str, ...]:
    """The keys that only the key ``switch`` among them brings to effect."""
    return tuple(f"model.{name}" for name in section.model_fields if name != switch)


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
    ("model.kv_channels", "model.add_qkv_bias"): ("model.multi_latent_attention", lambda latent: not latent),
    ("model.add_qkv_bias",): ("model.add_bias_linear", lambda biases: not biases),
    ("data.reset_position_ids",): (
        "model.position_embedding_type",
        lambda kind: kind == "learned_absolute",
    ),
    _keys(ExpertFields, "num_moe_experts"): ("model.num_moe_experts", _is_stated),
    ("model.moe_aux_loss_coeff",): (
        "model.moe_router_load_balancing_type",
        lambda kind: kind != "none",
    ),
    ("model.moe_router_pre_softmax",): (
        "model.moe_router_score_function",
        lambda function: function == "softmax",
    ),
    ("model.moe_router_num_groups",): ("model.moe_router_group_topk", _is_stated),
    ("model.moe_router_bias_update_rate",): ("model.moe_router_enable_expert_bias", bool),
    ("model.moe_token_drop_policy",): ("model.moe_expert_capacity_factor", _is_stated),
    _keys(LatentAttentionFields, "multi_latent_attention"): ("model.multi_latent_attention", bool),
    ("evaluation.sets",): ("evaluation.every", lambda every: every > 0),
    ("model.mtp_loss_scaling_factor",): ("model.mtp_num_layers", _is_stated),
    (
        "optimizer.initial_loss_scale",
        "optimizer.min_loss_scale",
        "optimizer.loss_scale_window",
        "optimizer.hysteresis",
    ): ("precision", lambda precision: precision == "fp16"),
}
"""Keys, and the key whose value decides whether they are read."""


def unread_values(config: Config) -> list[Fault]:
    """Values other than the default that have no effect; they are worth a warning, and no refusal.

    A file may well state them, and an override choose another optimizer or schedule.
    """
    warnings: dict[str, Fault] = {}
    for keys, (decider, is_read) in _READ_BY.items():
        decision = _value(config, decider)
        if is_read(decision):
            continue
        for key in filter(partial(_has, config), keys):
            value = _value(config, key)
            if value != _default(config, key) and key not in warnings:
                rule = f"has no effect with {decider}={shown(decision)}"
                warnings[key] = Fault(key, shown(value), rule)
    return list(warnings.values())


def _has(config: Config, key: str) -> bool:
    """Whether the section that the config has of its kinds knows the key."""
    section, _, name = key.rpartition(".")
    return hasattr(getattr(config, section) if section else config, name)


def _value(config: Config, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


def _default(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return type(getattr(config, section)).model_fields[name].default
