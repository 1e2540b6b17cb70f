"""Which parameter of mixle's ``CausalLM`` is which of Megatron's GPTModel, and how its layout differs."""

from __future__ import annotations

import re

import torch

from mixle_megatron.models.initialisation import is_vocabulary, with_padding
from mixle_megatron.rules.dimensions import ModelDimensions

LOGIT_FACTOR = "mup_output_multiplier"
"""mixle's buffer by which muP multiplies the logits; GPTModel has none."""

_OUTSIDE_LAYERS = {
    "embedding.word_embeddings.weight": "tok.weight",
    "embedding.position_embeddings.weight": "pos.weight",
    "decoder.final_layernorm.weight": "ln.weight",
    "decoder.final_layernorm.bias": "ln.bias",
}

_IN_LAYER = {
    "input_layernorm.": "ln1.",
    "self_attention.linear_qkv.layer_norm_": "ln1.",  # Transformer Engine's fused layers
    "self_attention.linear_qkv.": "attn.qkv.",
    "self_attention.linear_proj.": "attn.proj.",
    "pre_mlp_layernorm.": "ln2.",
    "mlp.linear_fc1.layer_norm_": "ln2.",
    "mlp.linear_fc1.": "mlp.0.",
    "mlp.linear_fc2.": "mlp.2.",
}
"""Prefixes within a layer; the first that fits is meant."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_QKV = re.compile(r".*linear_qkv\.(weight|bias)")


def mixle_name(logical: str) -> str:
    """The name in mixle's module of a parameter with this logical name in GPTModel."""
    match = _LAYER.fullmatch(logical)
    if match is None:
        return _OUTSIDE_LAYERS[logical]
    number, rest = match.groups()
    prefix = next(prefix for prefix in _IN_LAYER if rest.startswith(prefix))
    return f"blocks.{number}.{_IN_LAYER[prefix]}{rest.removeprefix(prefix)}"


def is_qkv(logical: str) -> bool:
    """Whether the parameter holds queries, keys and values; mixle stacks them ``[3, heads, head_dim]``."""
    return _QKV.fullmatch(logical) is not None


def to_megatron(logical: str, whole: torch.Tensor, sizes: ModelDimensions) -> torch.Tensor:
    """mixle's whole parameter in Megatron's layout, the vocabulary padded with zeros.

    mixle stacks queries, keys and values ``[3, heads, head_dim]``; Megatron keeps each head's
    together, ``[heads, 3, head_dim]``, so that tensor parallelism cuts between heads.
    """
    if is_qkv(logical):
        return _swapped(whole, 3, sizes.num_attention_heads, sizes.kv_channels)
    return with_padding(whole, sizes) if is_vocabulary(logical) else whole


def from_megatron(logical: str, whole: torch.Tensor, sizes: ModelDimensions) -> torch.Tensor:
    """The inverse of :func:`to_megatron`."""
    if is_qkv(logical):
        return _swapped(whole, sizes.num_attention_heads, 3, sizes.kv_channels)
    return whole[: sizes.vocab_size] if is_vocabulary(logical) else whole


def _swapped(whole: torch.Tensor, outer: int, inner: int, width: int) -> torch.Tensor:
    """Rows ``[outer, inner, width]`` as ``[inner, outer, width]``."""
    return whole.unflatten(0, (outer, inner, width)).transpose(0, 1).flatten(0, 2)
