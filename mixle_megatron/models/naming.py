"""Logical names: what a parameter is called in the whole model, whatever stage holds it."""

from __future__ import annotations

import re

import torch

_EXPERT = re.compile(r"^(?P<layer>.*\.mlp)\.experts\.(?P<rest>.*)$")
_LOCAL_EXPERT = re.compile(r"local_experts\.(?P<index>\d+)\.(?P<rest>.*)")
_GROUPED_EXPERT = re.compile(r"(?P<rest>.*\.(?:weight|bias))(?P<index>\d+)")
_LAYER = re.compile(r"^(?P<stack>.*\blayers)\.(?P<index>\d+)\.(?P<rest>.*)$")

TIED_OUTPUT = "output_layer.weight"
TIED_EMBEDDING = "embedding.word_embeddings.weight"


def is_expert(logical: str) -> bool:
    """Whether the parameter of this logical name belongs to a routed expert."""
    return _EXPERT.match(logical) is not None


def logical_name(module: torch.nn.Module, name: str) -> str:
    """The logical name of a stage's parameter.

    Megatron numbers the layers of a stage from zero and keeps each layer's own number, counted
    from one over the whole model; likewise the experts of a rank. The copy of a tied embedding that
    the last stage holds as its output layer is called as the embedding is. Experts have one name
    whether they are computed one after another (``local_experts.3.linear_fc1.weight``) or grouped
    (``linear_fc1.weight3``).

    Args:
        module: a chunk of the stage, without its wrappers.
        name: as ``module.named_parameters()`` gives it.
    """
    if name == TIED_OUTPUT and getattr(module, "share_embeddings_and_output_weights", False):
        return TIED_EMBEDDING
    return _with_layer_number(module, _with_expert_number(module, name))


def _with_layer_number(module: torch.nn.Module, name: str) -> str:
    match = _LAYER.match(name)
    if match is None:
        return name
    layer = module.get_submodule(f"{match['stack']}.{match['index']}")
    number = getattr(layer, "layer_number", None)
    if number is None:
        return name
    return f"{match['stack']}.{number - 1}.{match['rest']}"


def _with_expert_number(module: torch.nn.Module, name: str) -> str:
    match = _EXPERT.match(name)
    if match is None:
        return name
    expert = _LOCAL_EXPERT.fullmatch(match["rest"]) or _GROUPED_EXPERT.fullmatch(match["rest"])
    if expert is None:
        return name
    number = module.get_submodule(match["layer"]).local_expert_indices[int(expert["index"])]
    return f"{match['layer']}.experts.local_experts.{number}.{expert['rest']}"
