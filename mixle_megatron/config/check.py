"""Which rules a config answers to: the sections that each of them needs, in one place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mixle_megatron.config.schema import batch_of, decay_steps_of, dimensions_of, split_of
from mixle_megatron.errors import Fault
from mixle_megatron.optimizer_settings import OptimizerSettings
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules import (
    batch_faults,
    data_faults,
    document_attention_faults,
    interleaving_faults,
    is_about_split,
    model_faults,
    plan_faults,
    plan_model_faults,
    precision_faults,
    precision_model_faults,
    recompute_faults,
    resolve_microbatches,
    schedule_faults,
    validation_set_faults,
    vocabulary_faults,
    world_faults,
)


def rule_faults(sections: Mapping[str, Any], world_size: int | None = None) -> list[Fault]:
    """Every rule whose sections are all there.

    Args:
        sections: the validated sections by name; those that the schema refused are left out.
        world_size: ranks that are there, or None where that is not known.
    """

    def there(*names: str) -> bool:
        return all(sections.get(name) is not None for name in names)

    faults: list[Fault] = []
    if there("plan"):
        faults += _plan(sections, world_size)
    if there("model"):
        faults += model_faults(dimensions_of(sections["model"]))
    if there("plan", "pipeline", "model"):
        faults += _plan_and_model(sections)
    if there("plan", "batch", "model"):
        faults += _batch(sections)
    if there("plan", "pipeline", "batch", "model") and not any(map(is_about_split, faults)):
        faults += _interleaving(sections)
    if there("model", "data") and sections["data"].source == "text":
        faults += vocabulary_faults(sections["model"].vocab_size, sections["data"].tokenizer)
    if there("data"):
        faults += data_faults(sections["data"])
    if there("plan", "data") and getattr(sections["data"], "reset_attention_mask", False):
        faults += document_attention_faults(_plan_record(sections["plan"]), "data.reset_attention_mask")
    if there("evaluation"):
        faults += validation_set_faults(sections["evaluation"].sets)
    if there("optimizer", "run"):
        faults += _schedule(sections)
    if there("precision"):
        faults += precision_faults(sections["precision"])
    if there("precision", "model"):
        faults += precision_model_faults(sections["precision"], sections["model"].num_moe_experts)
    return faults


def _plan_record(section: Any) -> PlanRecord:
    """The plan for rules that do not look at its microbatches."""
    return PlanRecord.from_mapping(section.model_dump() | {"microbatches": 1})


def _plan(sections: Mapping[str, Any], world_size: int | None) -> list[Fault]:
    plan = _plan_record(sections["plan"])
    return plan_faults(plan) + ([] if world_size is None else world_faults(plan, world_size))


def _plan_and_model(sections: Mapping[str, Any]) -> list[Fault]:
    plan, model, split = _plan_record(sections["plan"]), sections["model"], split_of(sections["pipeline"])
    faults = plan_model_faults(plan, dimensions_of(model, plan.tp), split)
    if any(map(is_about_split, faults)):
        return faults
    return faults + recompute_faults(
        model.recompute_granularity,
        model.recompute_method,
        model.recompute_num_layers,
        layers_per_stage=max(split.most_layers(model.num_layers, plan.pp), 1),
        mtp_num_layers=model.mtp_num_layers,
    )


def _interleaving(sections: Mapping[str, Any]) -> list[Fault]:
    """Whether the microbatches that come of the batch, where there are any, can be interleaved."""
    plan, batch = _plan_record(sections["plan"]), batch_of(sections["batch"], sections["model"])
    microbatches = resolve_microbatches(plan, batch)
    if microbatches is None:
        return []
    sequences = microbatches * batch.micro_batch_size
    return interleaving_faults(plan, split_of(sections["pipeline"]), microbatches, sequences=sequences)


def _batch(sections: Mapping[str, Any]) -> list[Fault]:
    stated = sections["plan"].microbatches
    batch = batch_of(sections["batch"], sections["model"])
    return batch_faults(_plan_record(sections["plan"]), batch, None if stated == "auto" else stated)


def _schedule(sections: Mapping[str, Any]) -> list[Fault]:
    optimizer = sections["optimizer"]
    decay_steps = decay_steps_of(optimizer, sections["run"])
    return schedule_faults(OptimizerSettings.from_section(optimizer, decay_steps=decay_steps))


def located(faults: Iterable[Fault], sources: Mapping[str, str]) -> list[Fault]:
    """The faults with where their values came from, in the order in which those were written."""
    placed = [
        fault if fault.source else replace(fault, source=_source(fault.field, sources)) for fault in faults
    ]
    return sorted(placed, key=_written)


def _source(field: str, sources: Mapping[str, str]) -> str | None:
    """Where the key was written, or what lies under it, or the section that it is missing from."""
    if field not in sources:
        under = [source for key, source in sources.items() if key.startswith(f"{field}.")]
        if under:
            return under[0]
    while field and field not in sources:
        field = field.rpartition(".")[0]
    return sources.get(field)


def _written(fault: Fault) -> tuple[int, int]:
    """Lines of the file in order, then the command line, then what was written nowhere."""
    line = (fault.source or "").rpartition(":")[2]
    if line.isdigit():
        return 0, int(line)
    return (1, 0) if fault.source else (2, 0)
