"""Logical names: what a parameter is called in the whole model, whatever stage holds it."""

from __future__ import annotations

import re

import torch

_LAYER = re.compile(r"^(?P<stack>.*\blayers)\.(?P<index>\d+)\.(?P<rest>.*)$")

TIED_OUTPUT = "output_layer.weight"
TIED_EMBEDDING = "embedding.word_embeddings.weight"


def logical_name(module: torch.nn.Module, name: str) -> str:
    """The logical name of a stage's parameter.

    Megatron numbers the layers of a stage from zero and keeps each layer's own number, counted
    from one over the whole model. The copy of a tied embedding that the last stage holds as its
    output layer is called as the embedding is.

    Args:
        module: the stage, without its wrappers.
        name: as ``module.named_parameters()`` gives it.
    """
    if name == TIED_OUTPUT and getattr(module, "share_embeddings_and_output_weights", False):
        return TIED_EMBEDDING
    match = _LAYER.match(name)
    if match is None:
        return name
    layer = module.get_submodule(f"{match['stack']}.{match['index']}")
    number = getattr(layer, "layer_number", None)
    if number is None:
        return name
    return f"{match['stack']}.{number - 1}.{match['rest']}"
