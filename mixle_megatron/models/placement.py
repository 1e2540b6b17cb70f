"""A whole parameter of a model, and where its parts are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlacedParameter:
    """A whole parameter and where its parts are.

    Attributes:
        name: what its module calls it.
        shape: of the whole parameter, without padding.
        names: all names that it has, where it is shared.
        tensor_dim: the dimension that tp cuts, or etp those of an expert; None where each of its ranks
            holds all of it.
        tensor_stride: how many parts that dimension consists of, each of which is cut.
        padded: size of that dimension with padding, where there is some.
        stages: pipeline stages that hold it.
        shards: ``(shard, start, stop)``: which flattened elements of a rank's tensor the optimizer
            keeps on which of its shards; only shards that keep some.
        expert_rank: which rank of ep holds it; None where it belongs to no routed expert.
    """

    name: str
    shape: tuple[int, ...]
    names: tuple[str, ...] = ()
    tensor_dim: int | None = None
    tensor_stride: int = 1
    padded: int | None = None
    stages: tuple[int, ...] = (0,)
    shards: tuple[tuple[int, int, int], ...] = ()
    expert_rank: int | None = None
