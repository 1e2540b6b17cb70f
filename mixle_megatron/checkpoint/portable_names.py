"""Names of a model's tensors that do not depend on which layers of Megatron's compute them.

A tensor has one name in an exported file, whether the model that it came from was built with Transformer
Engine or without: the logical name (:mod:`mixle_megatron.models.naming`) of a model without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_SAME = (
    # Transformer Engine fuses a norm with the linear layer after it; Megatron's checkpoints name norms so
    # even where nothing is fused.
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".self_attention.linear_q_down_proj.layer_norm_", ".input_layernorm."),
    (".self_attention.linear_kv_down_proj.layer_norm_", ".input_layernorm."),
    (".self_attention.linear_qkv_down_proj.layer_norm_", ".input_layernorm."),
    (".self_attention.linear_q_up_proj.layer_norm_", ".self_attention.q_layernorm."),
    (".self_attention.linear_kv_up_proj.layer_norm_", ".self_attention.kv_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
    # Megatron-Core 0.19 renamed the module, and keeps the name in its checkpoints.
    (".mtp_model_layer.", ".transformer_layer."),
)

_STACKED_LAYERS = re.compile(r"(?P<stack>decoder\.layers)\.(?P<rest>(?!\d+\.).+)")
_EXPERTS = re.compile(r"(?P<layer>.*\.mlp\.experts)\.experts\.(?P<rest>.+)")
_ONE_EXPERT = re.compile(r"\d+\..+")

OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
"""How the names of an optimizer's tensors begin; Megatron numbers the optimizers of a model that has
several."""

BUFFERS = ("expert_bias",)
"""What a model keeps beside its parameters, in a dtype of its own."""

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors with a row for each token, and rows of padding after them."""


def portable_name(logical: str) -> str:
    """The name in an exported file of a tensor with some logical name, or name in a checkpoint."""
    for theirs, ours in _SAME:
        logical = logical.replace(theirs, ours)
    return logical


def stacked(key: str, shape: Sequence[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors that a checkpoint stores under one key.

    Megatron stacks like layers, and the experts of a layer, in front of a tensor's own dimensions:
    ``decoder.layers.mlp.experts.experts.linear_fc2.weight`` of shape ``(layers, experts, ...)``.

    Yields:
        The portable name of each, and where it stands in the leading dimensions.
    """
    match = _STACKED_LAYERS.fullmatch(key)
    if match is None:
        yield from _of_experts(key, (), shape)
        return
    for layer in range(shape[0]):
        yield from _of_experts(f"{match['stack']}.{layer}.{match['rest']}", (layer,), shape[1:])


def natural_order(name: str) -> list[tuple[int, str]]:
    """A key that sorts names with numbers in them as one counts."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _of_experts(
    name: str, at: tuple[int, ...], shape: Sequence[int]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    match = _EXPERTS.fullmatch(name)
    if match is None:
        yield portable_name(name), at
    elif _ONE_EXPERT.fullmatch(match["rest"]):
        yield portable_name(f"{match['layer']}.local_experts.{match['rest']}"), at
    else:
        for expert in range(shape[0]):
            yield portable_name(f"{match['layer']}.local_experts.{expert}.{match['rest']}"), (*at, expert)
