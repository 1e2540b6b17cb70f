"""Causal attention on torch's ``scaled_dot_product_attention``."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch.nn.functional import scaled_dot_product_attention


class TorchAttention(MegatronModule):
    """Megatron's core attention without Transformer Engine and without an explicit softmax.

    Computes ``softmax(scale * q k^T + causal) v`` per head, query groups included. Takes the same
    arguments as Megatron's ``DotProductAttention``; masks other than causal are refused when the
    layer is built.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type is not AttnMaskType.causal:
            raise NotImplementedError(f"TorchAttention is causal only, not {attn_mask_type}")
        if config.context_parallel_size > 1:
            raise NotImplementedError("TorchAttention does not execute context parallelism")
        self.softmax_scale = (
            softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        )
        if config.apply_query_key_layer_scaling:
            self.softmax_scale /= max(1, layer_number)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend causally.

        Args:
            query: ``[sequence, batch, heads, head_dim]``, this rank's heads.
            key: ``[sequence, batch, groups, head_dim]``; heads is a multiple of groups.
            value: as ``key``.

        Returns:
            ``[sequence, batch, heads * head_dim]``.
        """
        sequence, batch, heads, head_dim = query.shape
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if self.training and self.dropout > 0.0:
            # Each tensor-parallel rank drops other heads, so it draws from its own generator.
            with tensor_parallel.get_cuda_rng_tracker().fork():
                context = self._attend(query, key, value, self.dropout)
        else:
            context = self._attend(query, key, value, 0.0)
        return context.permute(2, 0, 1, 3).reshape(sequence, batch, heads * head_dim)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout,
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
