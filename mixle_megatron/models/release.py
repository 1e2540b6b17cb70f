"""Taking the parameters of a trained module out of Megatron's wrapper and optimizer again.

DistributedDataParallel moves every parameter into a buffer, and hangs a hook on it that takes each
gradient away; the optimizer leaves further tensors on it. A module that goes on being used without
them has to have ordinary parameters.
"""

from __future__ import annotations

import torch

Marks = dict[torch.nn.Parameter, frozenset[str]]
"""For each parameter, the names of the attributes that it has of its own."""


def marks_of(module: torch.nn.Module) -> Marks:
    """What the module's parameters carry now, such as how Megatron has cut them."""
    return {parameter: frozenset(vars(parameter)) for parameter in module.parameters()}


def is_wrapped(module: torch.nn.Module) -> bool:
    """Whether Megatron's DistributedDataParallel keeps the gradients of the module."""
    return any(hasattr(parameter, "main_grad") for parameter in module.parameters())


def release(marks: Marks) -> None:
    """Leave the parameters their values and their ``marks``, and nothing else."""
    for parameter, names in marks.items():
        _make_independent(parameter)
        for name in set(vars(parameter)) - names:
            delattr(parameter, name)


def _make_independent(parameter: torch.nn.Parameter) -> None:
    """Give a parameter storage of its own, and free it from the wrapper's hooks.

    The hooks hang on the node of autograd that accumulates the gradient. The optimizer's fp32 shards
    are views that keep this node alive, so it has to be exchanged: torch makes a new one for a
    parameter whose dtype was changed.
    """
    values = parameter.data.clone()
    parameter.grad = None
    parameter.data = torch.empty(0, dtype=torch.float64, device=values.device)
    parameter.data = values
