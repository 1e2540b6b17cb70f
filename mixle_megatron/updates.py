"""What one training step communicates, as mixle's DistributedUpdate declarations.

The contract of every update is exact (``contract_exact``): what it computes is, as mathematics, the
result of one rank. Its numbers are guaranteed to be equal (``exact``) only where nothing is
communicated, since a sum over ranks adds in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mixle.utils.parallel.training_contracts import (
    CollectiveKind,
    DistributedUpdate,
    ParallelAxis,
    PayloadKind,
    StateLayout,
)

from mixle_megatron.topology import Topology

MESH_AXES = (
    ParallelAxis.DP_REPLICATE,
    ParallelAxis.DP_SHARD,
    ParallelAxis.TP,
    ParallelAxis.PP,
    ParallelAxis.CP,
)
"""The axes that every rank has a place on."""

WITHIN_A_STAGE = tuple(axis for axis in MESH_AXES if axis is not ParallelAxis.PP)
"""Those that the ranks of one pipeline stage differ in."""


@dataclass(frozen=True)
class Communicating:
    """What of a model decides what a step communicates.

    Attributes:
        tied_embedding: whether the output layer is the embedding, or further predictions use it: it then
            lies on the first and the last pipeline stage.
        ring_attention: whether keys and values go round the cp ranks (Transformer Engine's default) and
            are not gathered.
        dispatcher: Megatron's token dispatcher; None for a model without experts.
        balances_by_loss: whether routers have a loss for which experts' tokens are counted.
        balances_by_bias: whether routers have biases that follow the experts' tokens.
    """

    tied_embedding: bool
    ring_attention: bool = False
    dispatcher: str | None = None
    balances_by_loss: bool = False
    balances_by_bias: bool = False

    @classmethod
    def of(cls, config: Any, *, tied_embedding: bool, ring_attention: bool) -> Communicating:
        """What a TransformerConfig says of it."""
        experts = bool(config.num_moe_experts)
        by_loss = config.moe_router_load_balancing_type in ("aux_loss", "seq_aux_loss")
        return cls(
            tied_embedding=tied_embedding or bool(config.mtp_num_layers),
            ring_attention=ring_attention,
            dispatcher=config.moe_token_dispatcher_type if experts else None,
            balances_by_loss=experts and by_loss and bool(config.moe_aux_loss_coeff),
            balances_by_bias=experts and config.moe_router_enable_expert_bias,
        )


def declared_updates(plan: Any, model: Communicating) -> tuple[DistributedUpdate, ...]:
    """Every collective of one optimizer update under ``plan``, in the order of a step."""
    parts = (_of_the_passes(plan, model), _of_the_experts(plan, model), _of_the_gradients(plan, model))
    return tuple(update for part in (*parts, _of_the_step(plan, model)) for update in part)


def _of_the_passes(plan: Any, model: Communicating) -> Iterator[DistributedUpdate]:
    """Activations, which move in the forward pass and, as gradients, back in the backward pass."""
    activation, sharded = PayloadKind.ACTIVATION, StateLayout.SHARDED
    if plan.tp > 1:
        tp = (ParallelAxis.TP,)
        note = "sequence parallelism: tokens are gathered before a layer that is split over tp"
        yield _update("activation:tp:all_gather", activation, CollectiveKind.ALL_GATHER, tp, sharded, note)
        note = "sequence parallelism: partial sums are added and scattered over tokens after it"
        yield _update(
            "activation:tp:reduce_scatter", activation, CollectiveKind.REDUCE_SCATTER, tp, sharded, note
        )
        note = "maximum, target logit and normaliser of a softmax over a split vocabulary"
        yield _update("loss:tp", PayloadKind.MESSAGE, CollectiveKind.ALL_REDUCE, tp, sharded, note)
    if plan.cp > 1:
        yield from _of_the_attention(model)
    if plan.pp > 1:
        pp, local = (ParallelAxis.PP,), StateLayout.PIPELINE_LOCAL
        note = "between neighbouring stages, forward and backward"
        yield _update("activation:pp", activation, CollectiveKind.P2P, pp, local, note)


def _of_the_attention(model: Communicating) -> Iterator[DistributedUpdate]:
    kind, cp, sharded = PayloadKind.KV_BLOCK, (ParallelAxis.CP,), StateLayout.SHARDED
    if model.ring_attention:
        note = "keys and values go round the ranks, and their gradients back"
        yield _update("kv_block:cp", kind, CollectiveKind.P2P, cp, sharded, note)
        return
    note = "keys and values of the whole sequence, in the forward and again in the backward pass"
    yield _update("kv_block:cp:all_gather", kind, CollectiveKind.ALL_GATHER, cp, sharded, note)
    note = "their gradients, to the rank that has the token"
    yield _update("kv_block:cp:reduce_scatter", kind, CollectiveKind.REDUCE_SCATTER, cp, sharded, note)


def _of_the_experts(plan: Any, model: Communicating) -> Iterator[DistributedUpdate]:
    """Tokens to their experts and back; Megatron cuts ep and etp from all ranks of a stage."""
    local = StateLayout.EXPERT_LOCAL
    axes = _active(plan, (ParallelAxis.EP, ParallelAxis.ETP))
    if model.dispatcher is not None and axes:
        if model.dispatcher == "alltoall":
            note = "how many tokens each rank has for each expert"
            yield _update("token:counts", PayloadKind.MESSAGE, CollectiveKind.ALL_GATHER, axes, local, note)
            if plan.ep > 1:
                ep, note = (ParallelAxis.EP,), "tokens to the ranks of their experts, and results back"
                yield _update("token:ep", PayloadKind.TOKEN, CollectiveKind.ALL_TO_ALL, ep, local, note)
            axes = _active(plan, (ParallelAxis.ETP,))
        if axes:
            note = "tokens to every rank that computes a part of their experts"
            yield _update("token:all_gather", PayloadKind.TOKEN, CollectiveKind.ALL_GATHER, axes, local, note)
            note = "results, added up, to the rank that has the token"
            kind = CollectiveKind.REDUCE_SCATTER
            yield _update("token:reduce_scatter", PayloadKind.TOKEN, kind, axes, local, note)
    axes = _active(plan, (ParallelAxis.TP, ParallelAxis.CP))
    if model.balances_by_loss and axes:
        note = "tokens of each expert in the microbatch, for the auxiliary loss"
        replicated, kind = StateLayout.REPLICATED, CollectiveKind.ALL_REDUCE
        yield _update("message:router", PayloadKind.MESSAGE, kind, axes, replicated, note)


def _of_the_gradients(plan: Any, model: Communicating) -> Iterator[DistributedUpdate]:
    gradient, all_reduce = PayloadKind.GRADIENT, CollectiveKind.ALL_REDUCE
    if plan.tp > 1:
        note = "parameters that every tp rank holds and applies to its part of the sequence"
        axes = (ParallelAxis.TP,)
        yield _update("gradient:tp", gradient, all_reduce, axes, StateLayout.REPLICATED, note)
    if plan.pp > 1 and model.tied_embedding:
        axes, note = (ParallelAxis.PP,), "between the first and the last stage"
        local = StateLayout.PIPELINE_LOCAL
        yield _update("gradient:tied_embedding", gradient, all_reduce, axes, local, note)
    topology = Topology(plan)
    shards = tuple(ParallelAxis(axis) for axis in topology.optimizer_shard_axes)
    layout = StateLayout.SHARDED if shards else StateLayout.REPLICATED
    if shards:
        note = "summed over tokens, in fp32, to the shard of the optimizer that updates it"
        yield _update("gradient", gradient, CollectiveKind.REDUCE_SCATTER, shards, layout, note)
    if topology.num_distributed_optimizer_instances > 1:
        axes, note = (ParallelAxis.DP_REPLICATE,), "between the instances of the optimizer"
        yield _update("gradient:dp_replicate", gradient, all_reduce, axes, layout, note)
    elif not shards:
        note = "one data-parallel rank"
        yield _update("gradient", gradient, CollectiveKind.NONE, (), layout, note)
    if model.dispatcher is not None and topology.expert_optimizer_shards > 1:
        axes = _active(plan, WITHIN_A_STAGE)
        note = "of experts, over the ranks of these axes that hold the same ones"
        kind = CollectiveKind.REDUCE_SCATTER
        yield _update("gradient:experts", gradient, kind, axes, StateLayout.EXPERT_LOCAL, note)


def _of_the_step(plan: Any, model: Communicating) -> Iterator[DistributedUpdate]:
    message, all_reduce = PayloadKind.MESSAGE, CollectiveKind.ALL_REDUCE
    everywhere = _active(plan, MESH_AXES)
    if everywhere:
        note = "loss, tokens and examples of the update, and what each replica is doing"
        yield _update("message:sums", message, all_reduce, everywhere, StateLayout.REPLICATED, note)
    shards = tuple(ParallelAxis(axis) for axis in Topology(plan).optimizer_shard_axes)
    normed = tuple(axis for axis in everywhere if axis is not ParallelAxis.DP_REPLICATE or axis in shards)
    if normed:
        note = "squared norm of the gradient over all shards of the optimizer"
        yield _update("message:gradient_norm", message, all_reduce, normed, StateLayout.SHARDED, note)
    balanced = _active(plan, WITHIN_A_STAGE)
    if model.balances_by_bias and balanced:
        note = "tokens of each expert in the update, which its bias follows"
        yield _update("message:expert_bias", message, all_reduce, balanced, StateLayout.REPLICATED, note)
    if shards:
        note = "updated shards, to every rank that computes with them (ZeRO-1)"
        kind, gather = PayloadKind.PARAMETER, CollectiveKind.ALL_GATHER
        yield _update("parameter", kind, gather, shards, StateLayout.SHARDED, note)
    if model.dispatcher is not None and Topology(plan).expert_optimizer_shards > 1:
        axes = _active(plan, WITHIN_A_STAGE)
        note = "updated shards of experts, to the ranks of these axes that hold the same ones"
        kind, gather = PayloadKind.PARAMETER, CollectiveKind.ALL_GATHER
        yield _update("parameter:experts", kind, gather, axes, StateLayout.EXPERT_LOCAL, note)


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
