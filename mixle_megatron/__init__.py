"""NVIDIA Megatron-Core as mixle's distributed training backend ``"megatron"``, on GPU and on CPU.

Importing this package registers the backend and loads neither torch nor Megatron; its public names
are looked up when they are used.
"""

from __future__ import annotations

import importlib
from typing import Any

from mixle_megatron.registration import register, register_when_mixle_is_there

__version__ = "0.1.0.dev0"

_PUBLIC = {
    "MegatronBackend": "mixle_megatron.backend",
    "MegatronSession": "mixle_megatron.session",
    "GPT": "mixle_megatron.models.gpt",
    "DocumentBounds": "mixle_megatron.documents",
    "OptimizerSettings": "mixle_megatron.optimizer_settings",
    "CallableProvider": "mixle_megatron.models.callable_provider",
    "PipelineSplit": "mixle_megatron.pipeline_split",
    "CheckpointError": "mixle_megatron.errors",
    "Fault": "mixle_megatron.errors",
    "MixleMegatronError": "mixle_megatron.errors",
    "Refused": "mixle_megatron.errors",
    "SessionError": "mixle_megatron.errors",
    "Unsupported": "mixle_megatron.errors",
    "ray_train_loop": "mixle_megatron.cluster.ray_train",
}

__all__ = ["__version__", "register", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


register_when_mixle_is_there()
