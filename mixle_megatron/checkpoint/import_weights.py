"""Weights from a file into an open session, which checks first that they are its model's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mixle_megatron.checkpoint.portable_names import VOCABULARY, portable_name
from mixle_megatron.checkpoint.weight_mismatches import mismatches
from mixle_megatron.checkpoint.weight_sources import WeightSource
from mixle_megatron.config.model import ModelSection
from mixle_megatron.config.schema import dimensions_of
from mixle_megatron.errors import Fault, refuse_if_any
from mixle_megatron.models.initialisation import with_padding
from mixle_megatron.models.naming import logical_name
from mixle_megatron.stage import Stage

_EXTRA_STATE = "_extra_state"

_UNSEEN_IN_SHAPES = (
    *("num_attention_heads", "num_query_groups", "position_embedding_type", "rotary_base", "rotary_percent"),
    *("layernorm_epsilon", "activation_func", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax"),
    *("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk"),
)
"""Fields of the ``model`` section that decide what a model computes and not what its tensors look like."""


def fill_stage(stage: Stage, model: ModelSection, source: WeightSource) -> None:
    """Give a session of one rank the weights of ``source``, in place of those that it began with.

    Args:
        stage: the whole model, with an optimizer that has not stepped.
        model: what the stage was built from.
        source: the weights.

    Raises:
        Refused: the weights are not those of this model, with every mismatch; nothing is then changed.
    """
    sizes = dimensions_of(model)
    own = dict(_named_tensors(stage))
    expected = {name: _shape(name, tensor, sizes.vocab_size) for name, tensor in own.items()}
    described = described_faults(source.path, source.model, model)
    refuse_if_any(
        described + mismatches(expected, source.shapes, model="the config's model", source=str(source.path))
    )
    with torch.no_grad():
        for name, tensor in own.items():
            whole = source.read(name)
            tensor.copy_(with_padding(whole, sizes) if name in VOCABULARY else whole)
    stage.optimizer.reload_model_params()


def described_faults(path: Path, described: ModelSection | None, model: ModelSection) -> list[Fault]:
    """What ``path`` says of its model that no shape would show, and that ``model`` states otherwise."""
    if described is None:
        return []
    theirs, ours = _resolved(described), _resolved(model)
    return [
        Fault(f"model.{name}", ours[name], f"is {theirs[name]} in {path}", f"use {theirs[name]}")
        for name in _UNSEEN_IN_SHAPES
        if theirs[name] != ours[name]
    ]


def _resolved(model: ModelSection) -> dict[str, Any]:
    groups = dimensions_of(model).num_query_groups
    return {name: getattr(model, name) for name in _UNSEEN_IN_SHAPES} | {"num_query_groups": groups}


def _named_tensors(stage: Stage) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and what else belongs to the model, by portable name."""
    for chunk in stage.chunks:
        for name, tensor in chunk.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor) and not name.endswith(_EXTRA_STATE):
                yield portable_name(logical_name(chunk, name)), tensor


def _shape(name: str, tensor: torch.Tensor, vocab_size: int) -> tuple[int, ...]:
    return (vocab_size, *tensor.shape[1:]) if name in VOCABULARY else tuple(tensor.shape)
