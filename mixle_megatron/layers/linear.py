"""Parallel linear layers that add their bias in the matrix product.

Megatron's MLP and attention ask their linear layers to leave the bias out, for a fused kernel of CUDA to
add it together with the activation or the residual. Where there is none, adding it afterwards is
one more pass over the activations, forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


class TorchColumnParallelLinear(ColumnParallelLinear):
    """Megatron's ColumnParallelLinear, whose output has the bias in it even where asked to leave it out."""

    def __init__(self, *args: Any, skip_bias_add: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, skip_bias_add=False, **kwargs)


class TorchRowParallelLinear(RowParallelLinear):
    """Megatron's RowParallelLinear, which adds the bias itself where no sum over ranks comes first."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self._is_whole:
            kwargs["bias"] = self.bias
        return super()._forward_impl(input, weight, **kwargs)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[sequence, batch, input]`` to ``[sequence, batch, output]``, and the bias that is left to add."""
        output, bias = super().forward(input_)
        return output, None if self._is_whole else bias

    @property
    def _is_whole(self) -> bool:
        return self.skip_bias_add and self.tp_group.size() == 1
