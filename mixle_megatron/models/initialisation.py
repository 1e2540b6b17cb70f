"""The same initial model under every plan, with never more than one whole parameter in memory."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mixle_megatron.models.naming import logical_name
from mixle_megatron.process_groups import MegatronGroups
from mixle_megatron.rules.dimensions import ModelDimensions

_RESIDUAL_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight")
_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class Initialisation:
    """Megatron's initial distributions: normal, and narrower where a layer adds to the residual.

    Attributes:
        seed: the run's seed.
        std: ``init_method_std``.
        num_layers: layers of the whole model; layers that write to the residual stream are drawn
            with ``std / sqrt(2 num_layers)`` (Megatron's ``scaled_init_method_normal``).
    """

    seed: int
    std: float
    num_layers: int

    def draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The whole parameter ``name``, fp32 on the CPU, from a generator of its own.

        The generator is seeded by SHA-256 of the seed and the name, so that a parameter does not
        depend on which others this rank holds.
        """
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        std = self.std / math.sqrt(2.0 * self.num_layers) if name.endswith(_RESIDUAL_OUTPUTS) else self.std
        return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)


def initialise(
    module: torch.nn.Module,
    initialisation: Initialisation,
    dimensions: ModelDimensions,
    groups: MegatronGroups,
) -> None:
    """Draw every matrix of this stage; norms and biases keep the ones and zeros they were built with."""
    with torch.no_grad():
        for name, parameter in matrices(module):
            rows = dimensions.vocab_size if is_vocabulary(name) else None
            whole = initialisation.draw(name, whole_shape(parameter, groups, rows))
            if rows is not None:
                whole = with_padding(whole, dimensions)
            parameter.copy_(shard(whole, parameter, groups))


def is_vocabulary(name: str) -> bool:
    """Whether the parameter of this logical name has a row for each token."""
    return name.endswith(_VOCABULARY)


def with_padding(whole: torch.Tensor, dimensions: ModelDimensions) -> torch.Tensor:
    """A vocabulary's rows ``[vocab_size, hidden]`` with those of its padding, which are zero."""
    padding = whole.new_zeros(dimensions.padded_vocab_size - dimensions.vocab_size, whole.shape[1])
    return torch.cat([whole, padding])


def matrices(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of two or more dimensions with their logical names."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            yield logical_name(module, name), parameter


def whole_shape(
    parameter: torch.Tensor, groups: MegatronGroups, vocabulary_rows: int | None = None
) -> tuple[int, ...]:
    """Shape of the whole parameter that this rank holds a tensor-parallel shard of."""
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= groups.cuts(parameter).size()
    if vocabulary_rows is not None:
        shape[0] = vocabulary_rows
    return tuple(shape)


def shard(whole: torch.Tensor, parameter: torch.Tensor, groups: MegatronGroups) -> torch.Tensor:
    """This rank's part of ``whole``, cut as Megatron cuts ``parameter``.

    A stride of 2 marks a gated layer: its first half is the gate and its second the value, and
    each rank holds its part of both.
    """
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    dim, stride = parameter.partition_dim, parameter.partition_stride
    size, rank = groups.cuts(parameter).size(), groups.cuts(parameter).rank()
    return torch.cat([part.chunk(size, dim)[rank] for part in whole.chunk(stride, dim)], dim)
