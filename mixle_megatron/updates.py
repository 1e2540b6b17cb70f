"""What one training step communicates, as mixle's DistributedUpdate declarations.

The contract of every update is exact (``contract_exact``): what it computes is, as mathematics, the
result of one rank. Its numbers are guaranteed to be equal (``exact``) only where nothing is
communicated, since a sum over ranks adds in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mixle.utils.parallel.training_contracts import (
    CollectiveKind,
    DistributedUpdate,
    ParallelAxis,
    PayloadKind,
    StateLayout,
)

SHARD_AXES = (ParallelAxis.DP_SHARD, ParallelAxis.CP)
"""The axes that the distributed optimizer's state is sharded over."""

MESH_AXES = (
    ParallelAxis.DP_REPLICATE,
    ParallelAxis.DP_SHARD,
    ParallelAxis.TP,
    ParallelAxis.PP,
    ParallelAxis.CP,
)
"""The axes that every rank has a place on."""


def declared_updates(plan: Any, *, tied_embedding: bool) -> tuple[DistributedUpdate, ...]:
    """Every collective of one optimizer update under ``plan``, in the order of a step.

    Args:
        plan: the plan.
        tied_embedding: whether the output layer is the embedding, which then lies on the first and
            the last pipeline stage.
    """
    return (*_of_the_passes(plan), *_of_the_gradients(plan, tied_embedding), *_of_the_step(plan))


def _of_the_passes(plan: Any) -> Iterator[DistributedUpdate]:
    """Activations, which move in the forward pass and, as gradients, back in the backward pass."""
    tp, pp = (ParallelAxis.TP,), (ParallelAxis.PP,)
    if plan.tp > 1:
        yield _update(
            "activation:tp:all_gather",
            PayloadKind.ACTIVATION,
            CollectiveKind.ALL_GATHER,
            tp,
            StateLayout.SHARDED,
            "sequence parallelism: tokens are gathered before a layer that is split over tp",
        )
        yield _update(
            "activation:tp:reduce_scatter",
            PayloadKind.ACTIVATION,
            CollectiveKind.REDUCE_SCATTER,
            tp,
            StateLayout.SHARDED,
            "sequence parallelism: partial sums are added and scattered over tokens after it",
        )
        yield _update(
            "loss:tp",
            PayloadKind.MESSAGE,
            CollectiveKind.ALL_REDUCE,
            tp,
            StateLayout.SHARDED,
            "maximum, target logit and normaliser of a softmax over a split vocabulary",
        )
    if plan.pp > 1:
        yield _update(
            "activation:pp",
            PayloadKind.ACTIVATION,
            CollectiveKind.P2P,
            pp,
            StateLayout.PIPELINE_LOCAL,
            "between neighbouring stages, forward and backward",
        )


def _of_the_gradients(plan: Any, tied_embedding: bool) -> Iterator[DistributedUpdate]:
    if plan.tp > 1:
        yield _update(
            "gradient:tp",
            PayloadKind.GRADIENT,
            CollectiveKind.ALL_REDUCE,
            (ParallelAxis.TP,),
            StateLayout.REPLICATED,
            "parameters that every tp rank holds and applies to its part of the sequence",
        )
    if plan.pp > 1 and tied_embedding:
        yield _update(
            "gradient:tied_embedding",
            PayloadKind.GRADIENT,
            CollectiveKind.ALL_REDUCE,
            (ParallelAxis.PP,),
            StateLayout.PIPELINE_LOCAL,
            "between the first and the last stage",
        )
    shards = _active(plan, SHARD_AXES)
    if shards:
        yield _update(
            "gradient",
            PayloadKind.GRADIENT,
            CollectiveKind.REDUCE_SCATTER,
            shards,
            StateLayout.SHARDED,
            "summed over tokens, in fp32, to the shard of the optimizer that updates it",
        )
    if plan.dp_replicate > 1:
        yield _update(
            "gradient:dp_replicate",
            PayloadKind.GRADIENT,
            CollectiveKind.ALL_REDUCE,
            (ParallelAxis.DP_REPLICATE,),
            StateLayout.SHARDED if shards else StateLayout.REPLICATED,
            "between the instances of the optimizer",
        )
    if not shards and plan.dp_replicate == 1:
        yield _update(
            "gradient",
            PayloadKind.GRADIENT,
            CollectiveKind.NONE,
            (),
            StateLayout.REPLICATED,
            "one data-parallel rank",
        )


def _of_the_step(plan: Any) -> Iterator[DistributedUpdate]:
    everywhere = _active(
        plan, tuple(ParallelAxis(axis) for axis in ("dp_replicate", "dp_shard", "tp", "pp", "cp"))
    )
    if everywhere:
        yield _update(
            "message:sums",
            PayloadKind.MESSAGE,
            CollectiveKind.ALL_REDUCE,
            everywhere,
            StateLayout.REPLICATED,
            "loss, tokens and examples of the update, and what each replica is doing",
        )
    normed = tuple(axis for axis in everywhere if axis is not ParallelAxis.DP_REPLICATE)
    if normed:
        yield _update(
            "message:gradient_norm",
            PayloadKind.MESSAGE,
            CollectiveKind.ALL_REDUCE,
            normed,
            StateLayout.SHARDED,
            "squared norm of the gradient over all shards of the optimizer",
        )
    if _active(plan, SHARD_AXES):
        yield _update(
            "parameter",
            PayloadKind.PARAMETER,
            CollectiveKind.ALL_GATHER,
            _active(plan, SHARD_AXES),
            StateLayout.SHARDED,
            "updated shards, to every rank that computes with them (ZeRO-1)",
        )


def _active(plan: Any, axes: tuple[ParallelAxis, ...]) -> tuple[ParallelAxis, ...]:
    return tuple(axis for axis in axes if getattr(plan, axis.value) > 1)


def _update(
    node_id: str,
    payload: PayloadKind,
    collective: CollectiveKind,
    axes: tuple[ParallelAxis, ...],
    layout: StateLayout,
    note: str,
) -> DistributedUpdate:
    return DistributedUpdate(
        node_id=node_id,
        payload=payload,
        collective=collective,
        mesh_axes=axes,
        state_layout=layout,
        exact=collective is CollectiveKind.NONE,
        contract_exact=True,
        notes=(note,),
    )
