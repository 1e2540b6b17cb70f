"""The norms of a transformer layer in plain torch, under sequence parallelism too."""

from __future__ import annotations

from typing import Any

import torch


class TorchNorm:
    """LayerNorm or RMSNorm as ``config.normalization`` says.

    Megatron's own torch norm refuses sequence parallelism, although a norm computes each token by
    itself. All that is missing is the mark on its weights: each tensor-parallel rank sees only its
    part of the sequence, so Megatron's ``finalize_model_grads`` has to sum their gradients.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> torch.nn.Module:
        kind = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
