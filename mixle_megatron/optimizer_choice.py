"""What ``prepare``'s ``optimizer``, ``lr`` and ``max_grad_norm`` amount to. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from mixle_megatron.errors import Fault
from mixle_megatron.optimizer_settings import OptimizerSettings
from mixle_megatron.rules import schedule_faults

BY_NAME = {
    # torch.optim.Adam and torch.optim.SGD with their defaults, as mixle's torch_native takes these names
    "adam": OptimizerSettings(name="adam", weight_decay=0.0, decoupled_weight_decay=False, clip_grad=0.0),
    "sgd": OptimizerSettings(name="sgd", weight_decay=0.0, sgd_momentum=0.0, clip_grad=0.0),
}
"""Megatron's optimizers under the names that mixle uses."""


def resolve_optimizer(
    optimizer: Any, lr: float | None, max_grad_norm: float | None
) -> tuple[OptimizerSettings, list[Fault]]:
    """The settings, and what is wrong with the arguments; None is adam."""
    given = {name: value for name, value in (("lr", lr), ("clip_grad", max_grad_norm)) if value is not None}
    if isinstance(optimizer, OptimizerSettings):
        return optimizer, _settings_faults(optimizer, given)
    name = "adam" if optimizer is None else optimizer
    if not isinstance(name, str) or name not in BY_NAME:
        return BY_NAME["adam"], [_unknown("optimizer", optimizer)]
    return dataclasses.replace(BY_NAME[name], **{key: float(value) for key, value in given.items()}), []


def _settings_faults(settings: OptimizerSettings, given: dict[str, float]) -> list[Fault]:
    if settings.name not in BY_NAME:
        return [_unknown("optimizer.name", settings.name)]
    stated_twice = [
        Fault(
            "max_grad_norm" if name == "clip_grad" else name,
            value,
            f"is given beside OptimizerSettings, whose {name} states it too",
            "give it in one place",
        )
        for name, value in given.items()
    ]
    return stated_twice + schedule_faults(settings)


def _unknown(field: str, value: Any) -> Fault:
    return Fault(field, value, "is not an optimizer of this backend", "use adam, sgd or OptimizerSettings")


def optimizer_receipt(settings: OptimizerSettings) -> dict[str, Any]:
    """The optimizer by name, with its settings, as receipts and checkpoints carry it."""
    return {**dataclasses.asdict(settings), "name": f"megatron_{settings.name}"}
