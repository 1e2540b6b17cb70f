"""How a plan's pipeline stages must divide a model's layers and a call's microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from mixle_megatron.errors import Fault
from mixle_megatron.pipeline_split import EVEN, PipelineSplit
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules.dimensions import ModelDimensions
from mixle_megatron.rules.layout import layout_faults
from mixle_megatron.rules.nearest import divisors, listed, multiples_around, nearest, use

VIRTUAL = "virtual_pipeline_model_parallel_size"
FIRST = "num_layers_in_first_pipeline_stage"
LAST = "num_layers_in_last_pipeline_stage"


def pipeline_faults(
    plan: PlanRecord,
    model: ModelDimensions,
    split: PipelineSplit = EVEN,
    *,
    plan_prefix: str = "plan",
    model_prefix: str = "model",
    prefix: str = "pipeline",
) -> list[Fault]:
    """Whether the plan's stages, as ``split`` has them, hold the model's layers.

    Args:
        plan: the plan.
        model: the model's sizes, with defaults resolved.
        split: which layers each stage holds.
        plan_prefix: what the plan's fields are called after.
        model_prefix: what the model's fields are called after.
        prefix: what the split's fields are called after.
    """
    names = {"plan_prefix": plan_prefix, "model_prefix": model_prefix, "prefix": prefix}
    contradictions = list(_contradictions(plan, split, plan_prefix, prefix))
    if split.pipeline_model_parallel_layout is not None:
        return contradictions + layout_faults(plan.pp, model, split, **names)
    if contradictions:
        return contradictions
    if split.num_layers_in_first_pipeline_stage is None and split.num_layers_in_last_pipeline_stage is None:
        return [*_even_faults(plan, model, split, plan_prefix, model_prefix, prefix)]
    return [*_uneven_faults(plan, model, split, plan_prefix, model_prefix, prefix)]


def is_about_split(fault: Fault, prefix: str = "pipeline") -> bool:
    """Whether a fault leaves no stages to judge anything else by."""
    return fault.field.startswith(f"{prefix}.")


def _contradictions(plan: PlanRecord, split: PipelineSplit, plan_prefix: str, prefix: str) -> Iterator[Fault]:
    """What must not be stated together, or not with one stage."""
    layout = split.pipeline_model_parallel_layout
    for name in (FIRST, LAST):
        value = getattr(split, name)
        if value is not None and layout is not None:
            rule = f"is stated together with {prefix}.pipeline_model_parallel_layout"
            yield Fault(f"{prefix}.{name}", value, rule, "leave one of them out")
        elif value is not None and plan.pp == 1:
            rule = f"has no other stage to leave layers to with {plan_prefix}.pp=1"
            yield Fault(f"{prefix}.{name}", value, rule, f"leave it out, or use {plan_prefix}.pp=2 or more")
    stated = split.virtual_pipeline_model_parallel_size
    if stated is not None and stated > 1 and plan.pp == 1 and layout is None:
        rule = f"needs more stages to interleave than {plan_prefix}.pp=1"
        yield Fault(f"{prefix}.{VIRTUAL}", stated, rule, f"leave it out, or use {plan_prefix}.pp=2 or more")


def _even_faults(
    plan: PlanRecord,
    model: ModelDimensions,
    split: PipelineSplit,
    plan_prefix: str,
    model_prefix: str,
    prefix: str,
) -> Iterator[Fault]:
    """Every stage holds the same number of layers, at least one, in equal chunks."""
    layers, chunks = model.num_layers, split.chunks(plan.pp)
    if layers % plan.pp:
        working = [pp for pp in divisors(layers) if layers // pp % chunks == 0 and (pp > 1 or chunks == 1)]
        rule = f"does not divide {model_prefix}.num_layers={layers}"
        yield Fault(f"{plan_prefix}.pp", plan.pp, rule, use(working, plan.pp))
    elif layers // plan.pp % chunks:
        rule = (
            f"does not divide the {layers // plan.pp} layer(s) of a stage "
            f"({model_prefix}.num_layers={layers} / {plan_prefix}.pp={plan.pp})"
        )
        yield Fault(f"{prefix}.{VIRTUAL}", chunks, rule, use(divisors(layers // plan.pp), chunks))


def _uneven_faults(
    plan: PlanRecord,
    model: ModelDimensions,
    split: PipelineSplit,
    plan_prefix: str,
    model_prefix: str,
    prefix: str,
) -> Iterator[Fault]:
    """What the first and the last stage leave is shared out among the others, and all is cut in chunks.

    Faults are about the first of the two numbers that is stated. Where both leave no stage between
    them, Megatron's interleaving divides by the number of those stages
    (``get_transformer_layer_offset``).
    """
    stated = {name: getattr(split, name) for name in (FIRST, LAST) if getattr(split, name) is not None}
    name, value = next(iter(stated.items()))
    others, rest = plan.pp - len(stated), model.num_layers - sum(stated.values())
    chunks = split.chunks(plan.pp)
    field, whole = f"{prefix}.{name}", f"{model_prefix}.num_layers={model.num_layers}"
    beside = f" beside {prefix}.{LAST}={stated[LAST]}" if len(stated) == 2 else ""
    remedy = use(_working_sizes(rest + value, value, others, chunks), value)
    if others == 0 and chunks > 1:
        rule = (
            f"needs no {prefix}.{LAST}={stated[LAST]} beside it with {plan_prefix}.pp=2 and {chunks} chunks"
        )
        yield Fault(field, value, rule, f"leave {LAST} out: that stage holds the rest")
    elif others == 0 and rest:
        rule = f"is not the rest of {whole}{beside}, with {plan_prefix}.pp=2"
        yield Fault(field, value, rule, remedy)
    elif others and (rest < others or rest % others):
        rule = f"leaves {max(rest, 0)} of {whole}{beside} to {others} stages, which cannot share them equally"
        yield Fault(field, value, rule, remedy)
    else:
        sizes = [*stated.values(), *([rest // others] if others else [])]
        if any(size % chunks for size in sizes):
            rule = f"does not divide the {listed(sorted(set(sizes)))} layer(s) of a stage"
            yield Fault(f"{prefix}.{VIRTUAL}", chunks, rule, use(divisors(gcd(*sizes)), chunks))


def _working_sizes(layers: int, given: int, others: int, chunks: int) -> list[int]:
    """Sizes of one stage, near a given one, that leave equal shares in equal chunks to ``others``.

    ``layers`` are what that stage and the others hold together.
    """
    step = max(others, 1) * chunks
    if layers % chunks:
        return []
    if others == 0:
        return [layers] if layers > 0 else []
    turns = {(layers - given) // step + turn for turn in range(-2, 4)}
    return [layers - turn * step for turn in turns if turn >= 1 and layers - turn * step >= 1]


def interleaving_faults(
    plan: PlanRecord,
    split: PipelineSplit,
    microbatches: int,
    *,
    sequences: int | None = None,
    plan_prefix: str = "plan",
    batch_prefix: str = "batch",
) -> list[Fault]:
    """Whether the interleaved schedule can run this many microbatches.

    Megatron deals them to chunks in groups of pp
    (``forward_backward_pipelining_with_interleaving``).

    Args:
        plan: the plan; its ``microbatches`` is not looked at.
        split: which layers each stage holds.
        microbatches: of one schedule call.
        sequences: those of a call on one data-parallel rank, where known.
        plan_prefix: what the plan's fields are called after.
        batch_prefix: what the batch's fields are called after.
    """
    if plan.pp == 1 or split.chunks(plan.pp) == 1 or microbatches % plan.pp == 0:
        return []
    rule = (
        f"is no multiple of {plan_prefix}.pp={plan.pp}, in groups of which {split.chunks(plan.pp)} chunks "
        "a stage are interleaved"
    )
    if sequences is None:
        remedy = use(multiples_around(microbatches, plan.pp), microbatches)
    else:
        working = nearest([size for size in divisors(sequences) if size % plan.pp == 0], microbatches, most=3)
        sizes = listed([sequences // number for number in working])
        remedy = f"use {listed(working)}, with {batch_prefix}.micro_batch_size {sizes}" if working else ""
    return [Fault(f"{plan_prefix}.microbatches", microbatches, rule, remedy)]


def recompute_faults(
    granularity: str,
    method: str,
    num_layers: int | None,
    *,
    layers_per_stage: int,
    mtp_num_layers: int | None = None,
    prefix: str = "model",
) -> list[Fault]:
    """Megatron's conditions on activation recomputation (``TransformerConfig.__post_init__``).

    Args:
        granularity: ``none``, ``selective`` (core attention) or ``full`` (whole layers).
        method: ``none``, ``uniform`` or ``block``.
        num_layers: layers of a unit or of a stage; None where not stated.
        layers_per_stage: layers of the largest chunk of a stage (``PipelineSplit.most_layers``).
        mtp_num_layers: prediction layers, which Megatron recomputes one at a time; None for none.
        prefix: what the fields are called after.
    """
    field, layers = f"{prefix}.recompute_num_layers", f"use a number from 1 to {layers_per_stage}"
    stated = f"{prefix}.recompute_granularity={granularity}"
    faults = []
    if granularity == "full" and method == "none":
        rule = f"must be chosen with {stated}"
        faults.append(Fault(f"{prefix}.recompute_method", method, rule, "use uniform or block"))
    if granularity == "full" and num_layers is None:
        faults.append(Fault(field, None, f"must be stated with {stated}", layers))
    if granularity == "full" and num_layers is not None and num_layers > layers_per_stage:
        rule = f"is more than the {layers_per_stage} layers of a pipeline stage"
        faults.append(Fault(field, num_layers, rule, layers))
    if granularity == "full" and method == "uniform" and mtp_num_layers and (num_layers or 1) > 1:
        rule = f"must be 1 with {prefix}.mtp_num_layers={mtp_num_layers}, whose layers are recomputed singly"
        faults.append(Fault(field, num_layers, rule, "use 1"))
    if granularity == "selective" and num_layers is not None:
        faults.append(Fault(field, num_layers, f"must not be stated with {stated}", "leave it out"))
    return faults
