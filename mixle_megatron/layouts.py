"""Where every parameter of a model lies: mixle's ParameterLayout from what the ranks really hold.

Placements are written as torch's DTensor writes them, with what Megatron adds to that:

* ``tp``: ``Replicate()``, or ``Shard(dim=0)``: dimension 0 is cut into tp equal parts, in rank order.
  ``Shard(dim=0, stride=3)``: it is first cut into 3 parts, and each rank holds its part of all of
  them. ``padded=58``: it is padded with zeros to that size before it is cut.
* ``pp``: ``Stage(1)``, or ``Stage(0, 3)`` where two stages hold copies (a tied embedding).
* ``dp_shard``: ``OptimizerRange(0:[0,96), 1:[96,160))``: which elements of the flattened tensor that a
  rank holds the optimizer keeps on which shard (ZeRO-1). Parameters themselves are not sharded there.
  The axis is named after all that the shards are ranks of, such as ``dp_shard*cp``.
* A routed expert has ``ep``: ``Rank(1)``, which of its ranks holds it; ``etp`` in place of ``tp``; and
  ``edp`` in place of ``dp_shard``: the ranks that hold the same experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from mixle.utils.parallel.training_contracts import ParameterLayout, StateLayout

from mixle_megatron.models.initialisation import is_vocabulary, whole_shape
from mixle_megatron.models.naming import TIED_EMBEDDING, TIED_OUTPUT, is_expert
from mixle_megatron.models.placement import PlacedParameter
from mixle_megatron.optimizer_shards import model_parameters, own_range, own_value
from mixle_megatron.stage import Stage
from mixle_megatron.topology import Topology


def parameter_layouts(
    stage: Stage, plan: Any, vocab_size: int, in_callers_terms: Callable[[PlacedParameter], PlacedParameter]
) -> tuple[ParameterLayout, ...]:
    """The layout of every logical parameter, the same on every rank. Collective.

    Args:
        stage: this rank's stage.
        plan: the plan that it was built for.
        vocab_size: rows of the vocabulary without its padding.
        in_callers_terms: a parameter of Megatron's module as the caller's module has it.
    """
    placed = (_without_padding(each, vocab_size) for each in _over_stages(_own_parameters(stage), stage))
    topology = Topology(plan)
    return tuple(_layout(in_callers_terms(each), topology) for each in placed)


def _own_parameters(stage: Stage) -> list[PlacedParameter]:
    """What this rank's stage holds, in the order of the module."""
    shards = _optimizer_shards(stage)
    number = stage.groups.collection.pp.rank()
    tied = (TIED_EMBEDDING, TIED_OUTPUT) if stage.ties_embeddings else ()
    own = {}
    for logical, parameter in stage.named_parameters():
        cut = getattr(parameter, "tensor_model_parallel", False)
        own[logical] = PlacedParameter(
            name=logical,
            shape=whole_shape(parameter, stage.groups),
            names=tied if logical == TIED_EMBEDDING else (),
            tensor_dim=parameter.partition_dim if cut else None,
            tensor_stride=parameter.partition_stride if cut else 1,
            stages=(number,),
            shards=shards[id(parameter)],
            expert_rank=stage.groups.collection.ep.rank() if is_expert(logical) else None,
        )
    return list(own.values())


def _optimizer_shards(stage: Stage) -> dict[int, tuple[tuple[int, int, int], ...]]:
    """For each parameter of this stage, by its id, what each shard of the optimizer keeps."""
    held: dict[int, tuple[Any, dict[int, tuple[int, int]]]] = {}
    for part, parameter in model_parameters(stage.optimizer):
        _, ranges = held.setdefault(id(part), (part, {}))
        ranges[id(parameter)] = (0, 0)
        if own_value(part, parameter) is not None:
            owned = own_range(part, parameter)
            ranges[id(parameter)] = (owned.start, owned.stop)
    shards = {}
    for part, ranges in held.values():
        gathered: list[Any] = [None] * part.data_parallel_group.size()
        dist.all_gather_object(gathered, list(ranges.values()), group=part.data_parallel_group)
        for index, parameter in enumerate(ranges):
            kept = [(rank, *theirs[index]) for rank, theirs in enumerate(gathered)]
            shards[parameter] = tuple(each for each in kept if each[2] > each[1])
    return shards


def _over_stages(own: list[PlacedParameter], stage: Stage) -> Iterable[PlacedParameter]:
    """The parameters of all stages and experts; one that several stages hold is one parameter."""
    experts = _gathered([each for each in own if each.expert_rank is not None], stage.groups.collection.ep)
    others = [each for each in own if each.expert_rank is None]
    whole: dict[str, PlacedParameter] = {}
    for parameter in _gathered(others + experts, stage.groups.collection.pp):
        first = whole.get(parameter.name)
        stages = parameter.stages if first is None else first.stages + parameter.stages
        whole[parameter.name] = replace(first or parameter, stages=stages)
    return whole.values()


def _gathered(own: list[PlacedParameter], group: Any) -> list[PlacedParameter]:
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, own, group=group)
    return [each for theirs in gathered for each in theirs]


def _without_padding(placed: PlacedParameter, vocab_size: int) -> PlacedParameter:
    rows = placed.shape[0]
    if not is_vocabulary(placed.name) or rows == vocab_size:
        return placed
    return replace(placed, shape=(vocab_size, *placed.shape[1:]), padded=rows)


def _layout(placed: PlacedParameter, topology: Topology) -> ParameterLayout:
    plan = topology.plan
    expert = placed.expert_rank is not None
    tensor, cut = ("etp", plan.etp) if expert else ("tp", plan.tp)
    shards = topology.expert_optimizer_shards if expert else topology.optimizer_shards
    placements = []
    if cut > 1:
        placements.append((tensor, _tensor_placement(placed)))
    if plan.pp > 1:
        placements.append(("pp", f"Stage({', '.join(map(str, placed.stages))})"))
    if expert and plan.ep > 1:
        placements.append(("ep", f"Rank({placed.expert_rank})"))
    if shards > 1:
        ranges = ", ".join(f"{shard}:[{start},{stop})" for shard, start, stop in placed.shards)
        axis = "edp" if expert else "*".join(topology.optimizer_shard_axes)
        placements.append((axis, f"OptimizerRange({ranges})"))
    return ParameterLayout(
        logical_id=placed.name,
        global_shape=placed.shape,
        placements=tuple(placements),
        shared_group="=".join(placed.names) or None,
        optimizer_state=_state_layout(placed, plan, is_cut=cut > 1, is_sharded=shards > 1),
    )


def _tensor_placement(placed: PlacedParameter) -> str:
    if placed.tensor_dim is None:
        return "Replicate()"
    stride = f", stride={placed.tensor_stride}" if placed.tensor_stride > 1 else ""
    padded = f", padded={placed.padded}" if placed.padded is not None else ""
    return f"Shard(dim={placed.tensor_dim}{stride}{padded})"


def _state_layout(placed: PlacedParameter, plan: Any, *, is_cut: bool, is_sharded: bool) -> StateLayout:
    """Who owns its optimizer state: the narrowest that holds."""
    if placed.expert_rank is not None and plan.ep > 1:
        return StateLayout.EXPERT_LOCAL
    if is_sharded or (is_cut and placed.tensor_dim is not None):
        return StateLayout.SHARDED
    return StateLayout.PIPELINE_LOCAL if plan.pp > 1 else StateLayout.REPLICATED
