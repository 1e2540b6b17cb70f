"""The routed experts of a chunk of layers, and how their gradients are to be reduced."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_layer import BaseMoELayer

from mixle_megatron.models.naming import is_expert, logical_name


def mark_experts(chunk: torch.nn.Module) -> None:
    """Mark the parameters of routed experts as Megatron's DistributedDataParallel asks for it.

    ``allreduce=False`` sends a gradient to the groups of the expert grid. Megatron sets it where ep,
    or etp against tp, needs it; in 0.16 by ep alone, so that with etp=1 under tp=2 each rank would
    keep the gradient of its own tokens. Here it is set under every plan: the expert grid is right for
    all of them, and every plan has the same two optimizers.
    """
    for name, parameter in chunk.named_parameters():
        if is_expert(logical_name(chunk, name)):
            parameter.allreduce = False


def forget_activations(chunk: torch.nn.Module) -> None:
    """Drop the tensors of the last microbatch that the token dispatchers of a chunk still refer to.

    Their autograd graph refers to the chunk again, in a circle through C++ that Python's collector
    does not see: without this a closed session would keep its memory, its process groups and, under
    gloo, three threads for each of those.
    """
    for layer in chunk.modules():
        if isinstance(layer, BaseMoELayer):
            for name, value in list(vars(layer.token_dispatcher).items()):
                if isinstance(value, torch.Tensor):
                    setattr(layer.token_dispatcher, name, None)
