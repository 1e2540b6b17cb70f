"""Whether process groups that the caller made are those of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from mixle_megatron.errors import Fault
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules import grid_faults
from mixle_megatron.topology import Topology

_OF_LAYERS = ("tp", "cp", "pp")
_OF_REPLICAS = ("dp_cp", "intra_dp_cp")
_OF_EXPERTS = ("ep", "expt_tp", "expt_dp", "intra_expt_dp")
_REMEDY = (
    "call initialize_model_parallel() with the plan's sizes and Megatron's own order, or leave it to prepare"
)


def module_group_faults(collection: Any, plan: PlanRecord) -> list[Fault]:
    """What of the groups that a module's layers communicate over is not as the plan has it.

    Where the plan is no grid over the ranks that are there, nothing is judged.
    """
    if not _is_grid_of_these_ranks(plan):
        return []
    return [
        fault
        for name in _OF_LAYERS
        for fault in _difference(f"module.pg_collection.{name}", name, getattr(collection, name, None), plan)
    ]


def parallel_state_faults(plan: PlanRecord, *, experts: bool) -> list[Fault]:
    """What of Megatron's parallel_state is not as the plan has it, where the caller initialised it.

    A session takes its groups then. Its order of axes and its optimizer instances are not otherwise
    seen, and over other replicas than the plan's the wrong gradients would be added up.

    Args:
        plan: the plan; where it is no grid over the ranks that are there, nothing is judged.
        experts: whether the model has experts. Those groups are not used for a dense one.
    """
    if not parallel_state.model_parallel_is_initialized() or not _is_grid_of_these_ranks(plan):
        return []
    names = _OF_LAYERS + _OF_REPLICAS + (_OF_EXPERTS if experts else ())
    collection = ProcessGroupCollection.use_mpu_process_groups(list(names))
    return [
        fault
        for name in names
        for fault in _difference(f"parallel_state.{name}", name, getattr(collection, name), plan)
    ]


def _is_grid_of_these_ranks(plan: PlanRecord) -> bool:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return not grid_faults(plan) and plan.world_size == ranks


def position_in(group: Any, size: int) -> int | None:
    """This rank's place in a group of ``size``; None where the group is not of that size."""
    return group.rank() if group.size() == size else None


def _difference(field: str, name: str, group: Any, plan: PlanRecord) -> Iterator[Fault]:
    own = dist.get_rank() if dist.is_initialized() else 0
    planned = Topology(plan).group(name, own)
    if len(planned) == 1 and (group is None or group.size() == 1):
        return  # nothing is ever sent over it
    actual = None if group is None else _ranks(group)
    if actual is None:
        yield Fault(field, None, f"is no group that exists, and the plan has one of {list(planned)}", _REMEDY)
    elif actual != planned:
        yield Fault(field, list(actual), f"are not the ranks {list(planned)} of the plan", _REMEDY)


def _ranks(group: Any) -> tuple[int, ...] | None:
    """The global ranks of a group; None where it is destroyed, which torch says by a ValueError."""
    try:
        return tuple(dist.get_global_rank(group, place) for place in range(group.size()))
    except ValueError:
        return None
