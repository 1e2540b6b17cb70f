"""What differs between the versions of Megatron-Core that this package runs on (0.16 to 0.19)."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import megatron.core
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import common
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper


def _version() -> tuple[int, int]:
    major, minor = re.match(r"(\d+)\.(\d+)", megatron.core.__version__).groups()
    return int(major), int(minor)


AUXILIARY_LOSSES_MISS_RANKS = _version() < (0, 19)
"""Under ``calculate_per_token_loss`` the gradients of a router's auxiliary losses are too small by the
factor tp · cp, over whose ranks its tokens are split: each rank weights the loss by its own tokens and
not by those of the microbatch (``TopKRouter.attach_and_log_load_balancing_loss`` and ``apply_z_loss``;
0.19 multiplies by the size of that group)."""


ASYNCHRONOUS_SAVE: dict[str, Any] = (
    {"async_strategy": "mcore"}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
    else {}
)
"""What ``dist_checkpointing.save`` has to be told to save by Megatron's own means: 0.19 would otherwise
ask for a package of NVIDIA's (``nvidia-resiliency-ext``) that needs CUDA."""

COMMON_STATE_WRITER: tuple[tuple[Any, str], ...] = (
    ((common.TorchCommonSaveStrategy, "save_common"),) if hasattr(common, "TorchCommonSaveStrategy") else ()
)
"""The method that writes the common state, on the first rank and at once; 0.19 writes it as a shard."""


def auxiliary_coefficient(coefficient: float, plan: Any) -> float:
    """What Megatron has to be told for an auxiliary loss to have this coefficient under ``plan``."""
    return coefficient * plan.tp * plan.cp if AUXILIARY_LOSSES_MISS_RANKS else coefficient


def router_losses() -> dict[str, torch.Tensor]:
    """What routers have recorded of each auxiliary loss, without its coefficient: ``[layers]``."""
    return {
        name: entry["values"] if isinstance(entry, dict) else entry.values
        for name, entry in _router_record().items()
    }


def clear_router_losses() -> None:
    """Set what routers have recorded to zero."""
    for values in router_losses().values():
        values.zero_()


def forget_recorded_losses() -> None:
    """Forget Megatron's records of auxiliary losses, which are the process's and not a model's.

    Each has as many entries as the model had layers that it was begun for.
    """
    _router_record().clear()
    MTPLossLoggingHelper.tracker.clear()


def _router_record() -> dict[str, Any]:
    """Megatron's record of the process: a tracker's metrics since 0.19, a dictionary of its own before."""
    try:
        logging = importlib.import_module("megatron.core.transformer.moe.moe_logging")
    except ModuleNotFoundError:
        moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        return moe_utils.get_moe_layer_wise_logging_tracker()
    return logging.get_moe_metrics_tracker().metrics
