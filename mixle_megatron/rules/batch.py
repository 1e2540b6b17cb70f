"""What the batch of one update must satisfy under a plan."""

from __future__ import annotations

from mixle_megatron.errors import Fault
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules.dimensions import BatchDimensions
from mixle_megatron.rules.nearest import divisors, listed, multiples_around, nearest


def resolve_microbatches(plan: PlanRecord, batch: BatchDimensions) -> int | None:
    """Microbatches of one schedule call that give the global batch, or None where none do."""
    together = batch.micro_batch_size * plan.data_parallel_size * plan.gradient_accumulation_steps
    return None if batch.global_batch_size % together else batch.global_batch_size // together


def batch_faults(
    plan: PlanRecord,
    batch: BatchDimensions,
    microbatches: int | None = None,
    *,
    plan_prefix: str = "plan",
    batch_prefix: str = "batch",
) -> list[Fault]:
    """Whether global_batch_size = micro_batch_size · dp · gradient_accumulation_steps · microbatches.

    Args:
        plan: the plan; its ``microbatches`` is not looked at.
        batch: the batch of one update.
        microbatches: what the user states, or None for ``auto``.
        plan_prefix: what the plan's fields are called after.
        batch_prefix: what the batch's fields are called after.
    """
    resolved = resolve_microbatches(plan, batch)
    if resolved is None:
        return [_indivisible(plan, batch, plan_prefix, batch_prefix)]
    if microbatches is None or microbatches == resolved:
        return []
    given = microbatches * batch.global_batch_size // resolved
    rule = (
        f"gives an update of {_factors(plan, batch, plan_prefix, batch_prefix)} · {microbatches} = {given} "
        f"sequences, not {batch_prefix}.global_batch_size={batch.global_batch_size}"
    )
    return [Fault(f"{plan_prefix}.microbatches", microbatches, rule, f"use auto or {resolved}")]


def _factors(plan: PlanRecord, batch: BatchDimensions, plan_prefix: str, batch_prefix: str) -> str:
    return (
        f"{batch_prefix}.micro_batch_size={batch.micro_batch_size} · "
        f"{plan_prefix}.dp_replicate={plan.dp_replicate} · {plan_prefix}.dp_shard={plan.dp_shard} · "
        f"{plan_prefix}.gradient_accumulation_steps={plan.gradient_accumulation_steps}"
    )


def _indivisible(plan: PlanRecord, batch: BatchDimensions, plan_prefix: str, batch_prefix: str) -> Fault:
    whole, micro, dp = batch.global_batch_size, batch.micro_batch_size, plan.data_parallel_size
    accumulation = plan.gradient_accumulation_steps
    together = micro * dp * accumulation
    rule = f"is not a multiple of {_factors(plan, batch, plan_prefix, batch_prefix)} = {together}"
    choices = [f"{batch_prefix}.global_batch_size {listed(multiples_around(whole, together))}"]
    choices += _divisor_choice(f"{batch_prefix}.micro_batch_size", whole, dp * accumulation, micro)
    choices += _divisor_choice(
        f"{plan_prefix}.dp_replicate · {plan_prefix}.dp_shard", whole, micro * accumulation, dp
    )
    choices += _divisor_choice(f"{plan_prefix}.gradient_accumulation_steps", whole, micro * dp, accumulation)
    return Fault(f"{batch_prefix}.global_batch_size", whole, rule, "use " + ", or ".join(choices))


def _divisor_choice(name: str, whole: int, others: int, current: int) -> list[str]:
    """The values of one factor that divide the batch with the other factors as they are."""
    if whole % others:
        return []
    values = nearest(divisors(whole // others), current, most=3)
    return [f"{name} {listed(values)}"]
