"""What ``prepare``'s ``optimizer``, ``lr`` and ``max_grad_norm`` amount to. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from mixle_megatron.errors import Fault
from mixle_megatron.optimizer_settings import OptimizerSettings
from mixle_megatron.rules import schedule_faults

NAME_PREFIX = "megatron_"
"""How the name of an optimizer begins in receipts and checkpoints."""

_SGD = OptimizerSettings(name="sgd", weight_decay=0.0, sgd_momentum=0.9, clip_grad=0.0, decays_vectors=True)
BY_NAME = {
    # As mixle's torch_native resolves them: torch.optim's defaults, and momentum 0.9.
    "adam": OptimizerSettings(
        name="adam", weight_decay=0.0, decoupled_weight_decay=False, clip_grad=0.0, decays_vectors=True
    ),
    "adamw": OptimizerSettings(name="adam", weight_decay=0.01, clip_grad=0.0, decays_vectors=True),
    "sgd": _SGD,
    "sgd_momentum": _SGD,
}
"""Megatron's optimizers under the names that mixle uses, doing what mixle's do."""

_WITHOUT_EQUAL = {
    "auto": "routes to Muon, Adagrad and momentum by the shape of each parameter; Megatron's Muon is another "
    "algorithm than mixle's",
    "muon": "is another algorithm in Megatron than in mixle",
    "adagrad": "is not one of Megatron's optimizers",
    "rprop": "is not one of Megatron's optimizers",
}


def resolve_optimizer(
    optimizer: Any, lr: float | None, max_grad_norm: float | None
) -> tuple[OptimizerSettings, list[Fault]]:
    """The settings, and what is wrong with the arguments; None is adam."""
    given = {name: value for name, value in (("lr", lr), ("clip_grad", max_grad_norm)) if value is not None}
    if isinstance(optimizer, OptimizerSettings):
        return optimizer, _settings_faults(optimizer, given)
    name = _name(optimizer)
    if name not in BY_NAME:
        return BY_NAME["adam"], [_unknown("optimizer", optimizer)]
    return dataclasses.replace(BY_NAME[name], **{key: float(value) for key, value in given.items()}), []


def _settings_faults(settings: OptimizerSettings, given: dict[str, float]) -> list[Fault]:
    if settings.name not in ("adam", "sgd"):
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


def _name(optimizer: Any) -> str:
    """A name as mixle reads it; None is adam, and what is no name is called after its type."""
    if optimizer is None:
        return "adam"
    return optimizer.lower().replace("-", "_") if isinstance(optimizer, str) else type(optimizer).__name__


def _unknown(field: str, value: Any) -> Fault:
    reason = _WITHOUT_EQUAL.get(_name(value), "is not an optimizer of this backend")
    return Fault(field, value, reason, "use adam, adamw, sgd, sgd_momentum or OptimizerSettings")


def optimizer_receipt(settings: OptimizerSettings) -> dict[str, Any]:
    """The optimizer by name, with its settings, as receipts and checkpoints carry it."""
    return {**dataclasses.asdict(settings), "name": NAME_PREFIX + settings.name}
