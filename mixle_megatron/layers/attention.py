"""Causal attention on torch's ``scaled_dot_product_attention``."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch.nn.functional import pad, scaled_dot_product_attention

from mixle_megatron.layers.context_parallel import attend_across_ranks

GATHERING_COMMUNICATION = (None, "p2p", "all_gather")
"""Values of Megatron's ``cp_comm_type`` under which :class:`TorchAttention` runs."""


class TorchAttention(MegatronModule):
    """Megatron's core attention without Transformer Engine and without an explicit softmax.

    Computes ``softmax(scale * q k^T + causal) v`` per head, query groups included. Takes the same
    arguments as Megatron's ``DotProductAttention``, and the widths that multi-latent attention adds;
    what it does not compute is refused when the layer is built or called.

    Under context parallelism each rank passes its two chunks of the sequence, in Megatron's zigzag
    order, and keys and values are gathered over ``pg_collection.cp``
    (:mod:`~mixle_megatron.layers.context_parallel`). ``cp_comm_type`` names how Transformer Engine
    moves them: "p2p", Megatron-LM's default, and "all_gather" give the same result, and both gather here.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type is not AttnMaskType.causal:
            raise NotImplementedError(f"TorchAttention is causal only, not {attn_mask_type}")
        self._cp_group = _context_parallel_group(config, cp_comm_type, pg_collection)
        if softmax_scale is None:
            softmax_scale = 1.0 / math.sqrt(k_channels or config.kv_channels)
        if config.apply_query_key_layer_scaling:
            softmax_scale /= max(1, layer_number)
        self.softmax_scale = softmax_scale
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
        """Attend causally, or as a mask says.

        Args:
            query: ``[sequence, batch, heads, head_dim]``, this rank's heads and its part of the sequence.
            key: ``[sequence, batch, groups, head_dim]``; heads is a multiple of groups.
            value: ``[sequence, batch, groups, value_dim]``.
            attention_mask: takes the place of the causal mask, ``[batch, 1, sequence, sequence]``, queries
                before keys: bool, true where a token is hidden, as Megatron has it; or what to add to the
                scores, in the dtype of ``query``, which takes no further memory in any layer.

        Returns:
            ``[sequence, batch, heads * value_dim]``.

        Raises:
            NotImplementedError: for a bias or packed sequences, or a mask under context parallelism.
            ValueError: under context parallelism, if the sequence is not two chunks of one length.
        """
        if attention_bias is not None or packed_seq_params is not None:
            raise NotImplementedError("TorchAttention takes neither a bias nor packed sequences")
        value_dim = value.shape[-1]
        dropout = self.dropout if self.training else 0.0
        # Each tensor-parallel rank drops other heads, so it draws from its own generator.
        drawing = tensor_parallel.get_cuda_rng_tracker().fork() if dropout > 0.0 else nullcontext()
        with drawing:
            context = self._attend(*_of_one_width(query, key, value), attention_mask, dropout)
        return context[..., :value_dim].flatten(2)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
    ) -> torch.Tensor:
        if self._cp_group is None:
            return self._attention(query, key, value, _added(mask, query), dropout=dropout)
        if mask is not None:
            raise NotImplementedError("TorchAttention takes no mask where ranks share the sequence")
        attention = partial(self._attention, dropout=dropout)
        return attend_across_ranks(query, key, value, self._cp_group, attention)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        dropout: float,
    ) -> torch.Tensor:
        """``[sequence, batch, heads, width]``; causal over the same tokens where no mask is given."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if self._cp_group is None:
            # torch's kernel for CPUs reads each head's tokens one after another: worth a copy, and
            # what it was copied from is kept by nobody. Chunks of a shared sequence are copies already.
            query, key, value = (tensor.contiguous() for tensor in (query, key, value))
        context = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return context.permute(2, 0, 1, 3)


def _context_parallel_group(config: Any, cp_comm_type: str | None, pg_collection: Any) -> Any:
    """The group to gather over, or None where the sequence is whole."""
    if config.context_parallel_size == 1:
        return None
    if cp_comm_type not in GATHERING_COMMUNICATION:
        raise NotImplementedError(f"TorchAttention gathers keys and values; cp_comm_type is {cp_comm_type!r}")
    group = getattr(pg_collection, "cp", None)
    if group is None or group.size() != config.context_parallel_size:
        ranks = "no group" if group is None else f"a group of {group.size()} ranks"
        rule = f"config.context_parallel_size is {config.context_parallel_size}"
        raise ValueError(f"{rule}, but pg_collection.cp holds {ranks}")
    return group


def _added(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """The mask as what is added to the scores; torch's own booleans mean the opposite of Megatron's."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return like.new_zeros(mask.shape).masked_fill_(mask, -math.inf)


def _of_one_width(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Fill the channels up with zeros, which change no score; torch's fused kernels take one width."""
    width = max(tensor.shape[-1] for tensor in tensors)
    return tuple(
        tensor if tensor.shape[-1] == width else pad(tensor, (0, width - tensor.shape[-1]))
        for tensor in tensors
    )
