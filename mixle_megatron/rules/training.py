"""What precision, learning-rate schedule and weight-decay schedule must satisfy."""

from __future__ import annotations

from mixle_megatron.errors import Fault
from mixle_megatron.optimizer_settings import OptimizerSettings
from mixle_megatron.precision import EXECUTED, NAMES, withheld_reason
from mixle_megatron.rules.nearest import listed
from mixle_megatron.rules.verdict import NOT_EXECUTED

PRECISIONS = EXECUTED
"""Precisions that this version executes."""

PRECISIONS_NOT_EXECUTED = {name: withheld_reason(name) for name in NAMES if name not in EXECUTED}
"""Precision names that are known and that this version does not execute, with the reason."""


def precision_faults(precision: str, *, field: str = "precision") -> list[Fault]:
    """Whether this version executes the precision."""
    if precision in PRECISIONS:
        return []
    remedy = f"use {listed(PRECISIONS)}"
    reason = PRECISIONS_NOT_EXECUTED.get(precision)
    if reason is None:
        return [Fault(field, precision, "is not the name of a precision", remedy)]
    return [Fault(field, precision, NOT_EXECUTED + reason, remedy)]


def precision_model_faults(precision: str, num_moe_experts: int | None) -> list[Fault]:
    """Whether this version trains such a model in the precision.

    Megatron gives the optimizer of experts a loss scale of its own, which overflows of the other do not
    change, while the loss is multiplied by one of them.
    """
    if precision != "fp16" or num_moe_experts is None:
        return []
    rule = NOT_EXECUTED + "with experts Megatron has two loss scales, which part at the first overflow"
    return [Fault("precision", precision, rule, "use bf16 or fp32")]


def schedule_faults(schedule: OptimizerSettings, *, prefix: str = "optimizer") -> list[Fault]:
    """What Megatron's ``OptimizerParamScheduler`` asserts, said before it is built."""
    return [
        *_learning_rate_faults(schedule, prefix),
        *_weight_decay_faults(schedule, prefix),
        *_loss_scale_faults(schedule, prefix),
    ]


def _learning_rate_faults(schedule: OptimizerSettings, prefix: str) -> list[Fault]:
    faults = []
    for name in ("min_lr", "init_lr"):
        value = getattr(schedule, name)
        if value > schedule.lr:
            rule = f"is above {prefix}.lr={schedule.lr:g}"
            faults.append(Fault(f"{prefix}.{name}", value, rule, f"use at most {schedule.lr:g}"))
    if schedule.warmup_steps >= schedule.decay_steps:
        rule = f"is not above {prefix}.warmup_steps={schedule.warmup_steps}"
        remedy = f"use {schedule.warmup_steps + 1} or more, or fewer warm-up steps"
        faults.append(Fault(f"{prefix}.decay_steps", schedule.decay_steps, rule, remedy))
    return faults + _wsd_faults(schedule, prefix)


def _wsd_faults(schedule: OptimizerSettings, prefix: str) -> list[Fault]:
    """A WSD schedule decays in its last ``wsd_decay_steps``, after the warm-up."""
    if schedule.schedule != "WSD":
        return []
    field = f"{prefix}.wsd_decay_steps"
    most = max(schedule.decay_steps - schedule.warmup_steps, 1)
    remedy = f"use a number from 1 to {most}"
    if schedule.wsd_decay_steps is None:
        return [Fault(field, None, f"must be stated with {prefix}.schedule=WSD", remedy)]
    if schedule.wsd_decay_steps > most:
        rule = f"is more than the {most} updates between warm-up and the end of the decay"
        return [Fault(field, schedule.wsd_decay_steps, rule, remedy)]
    return []


def _weight_decay_faults(schedule: OptimizerSettings, prefix: str) -> list[Fault]:
    start, end = schedule.start_weight_decay_value, schedule.end_weight_decay_value
    if schedule.weight_decay_incr_style == "constant" and start != end:
        rule = (
            f"is not {prefix}.start_weight_decay={start:g}, and {prefix}.weight_decay_incr_style is constant"
        )
        remedy = f"use {start:g}, or weight_decay_incr_style linear or cosine"
        return [Fault(f"{prefix}.end_weight_decay", end, rule, remedy)]
    if end < start:
        rule = f"is below {prefix}.start_weight_decay={start:g}; Megatron's weight decay only grows"
        return [Fault(f"{prefix}.end_weight_decay", end, rule, f"use {start:g} or more")]
    return []


def _loss_scale_faults(schedule: OptimizerSettings, prefix: str) -> list[Fault]:
    """What Megatron's ``DynamicGradScaler`` asserts."""
    faults = []
    for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
        value = getattr(schedule, name)
        if not value > 0:
            faults.append(Fault(f"{prefix}.{name}", value, "must be above 0", "use 1"))
    if not faults and schedule.min_loss_scale > schedule.initial_loss_scale:
        rule = f"is above {prefix}.initial_loss_scale={schedule.initial_loss_scale:g}"
        remedy = f"use at most {schedule.initial_loss_scale:g}"
        faults.append(Fault(f"{prefix}.min_loss_scale", schedule.min_loss_scale, rule, remedy))
    return faults
