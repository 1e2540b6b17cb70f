"""What a parallel plan must satisfy by itself, and against the ranks that are there."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mixle_megatron.errors import Fault
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules.nearest import divisors, use
from mixle_megatron.rules.verdict import NOT_EXECUTED

AXES_NOT_EXECUTED: dict[str, str] = {}
"""Axes that a plan has and this version does not execute, with the reason. All of them are executed."""


def plan_faults(plan: PlanRecord, *, prefix: str = "plan") -> list[Fault]:
    """Everything that is wrong with the plan alone."""
    sizes = size_faults(plan, prefix=prefix)
    return sizes or axis_faults(plan, prefix=prefix) + expert_grid_faults(plan, prefix=prefix)


def grid_faults(plan: PlanRecord, *, prefix: str = "plan") -> list[Fault]:
    """What keeps the plan from being a grid of ranks: sizes, and the expert grid's divisions."""
    return size_faults(plan, prefix=prefix) or expert_grid_faults(plan, prefix=prefix)


def size_faults(plan: PlanRecord, *, prefix: str = "plan") -> list[Fault]:
    """Fields that are no whole number from 1."""
    return [
        Fault(f"{prefix}.{field.name}", getattr(plan, field.name), "must be a whole number from 1", "use 1")
        for field in fields(plan)
        if not _is_count(getattr(plan, field.name))
    ]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def axis_faults(plan: PlanRecord, *, prefix: str = "plan") -> list[Fault]:
    """Axes larger than 1 that this version does not execute, each by name."""
    return [
        Fault(f"{prefix}.{axis}", getattr(plan, axis), NOT_EXECUTED + reason, "use 1")
        for axis, reason in AXES_NOT_EXECUTED.items()
        if getattr(plan, axis) > 1
    ]


def expert_grid_faults(plan: PlanRecord, *, prefix: str = "plan") -> list[Fault]:
    """Whether etp · ep · edp · pp can lie over the same ranks as tp · cp · dp · pp."""
    faults = []
    dp = plan.data_parallel_size
    if dp % plan.ep:
        parts = f"{prefix}.dp_replicate={plan.dp_replicate} · {prefix}.dp_shard={plan.dp_shard}"
        rule = f"does not divide {parts} = {dp}"
        faults.append(Fault(f"{prefix}.ep", plan.ep, rule, use(divisors(dp), plan.ep)))
        return faults
    ranks = plan.tp * plan.cp * dp // plan.ep
    if ranks % plan.etp:
        rule = f"does not divide {prefix}.tp · {prefix}.cp · dp / {prefix}.ep = {ranks}"
        faults.append(Fault(f"{prefix}.etp", plan.etp, rule, use(divisors(ranks), plan.etp)))
    return faults


def world_faults(plan: PlanRecord, world_size: int, *, prefix: str = "plan") -> list[Fault]:
    """Whether the plan has as many ranks as there are (``world_size``)."""
    if size_faults(plan) or plan.world_size == world_size:
        return []
    axes = " · ".join(
        f"{axis}={getattr(plan, axis)}" for axis in ("dp_replicate", "dp_shard", "tp", "pp", "cp")
    )
    rule = f"({axes}) is not the number of ranks there are, {world_size}"
    remedy = f"start {plan.world_size} ranks"
    others = plan.world_size // plan.dp_shard
    if world_size % others == 0:
        remedy += f", or use {prefix}.dp_shard={world_size // others}"
    return [Fault(f"{prefix}.world_size", plan.world_size, rule, remedy)]
