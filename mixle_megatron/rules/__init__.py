"""What a plan, a model, a batch and a schedule must satisfy together: pure arithmetic.

Every function returns all the faults that it finds, each with its numbers and the nearest values
that work. The API, the YAML and the command line ask the same functions; the names that faults
carry in front of the dot are the caller's (``prefix``).
"""

from __future__ import annotations

from mixle_megatron.errors import Fault
from mixle_megatron.pipeline_split import EVEN, PipelineSplit
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules.batch import batch_faults, resolve_microbatches
from mixle_megatron.rules.data import data_faults, document_attention_faults, validation_set_faults
from mixle_megatron.rules.dimensions import BatchDimensions, ModelDimensions, padded_vocab_size
from mixle_megatron.rules.model import model_faults, plan_model_faults, vocabulary_faults
from mixle_megatron.rules.pipeline import interleaving_faults, is_about_split, recompute_faults
from mixle_megatron.rules.plan import (
    AXES_NOT_EXECUTED,
    axis_faults,
    grid_faults,
    plan_faults,
    size_faults,
    world_faults,
)
from mixle_megatron.rules.training import (
    PRECISIONS,
    PRECISIONS_NOT_EXECUTED,
    precision_faults,
    precision_model_faults,
    schedule_faults,
)
from mixle_megatron.rules.verdict import NOT_EXECUTED, is_unsupported, verdict

__all__ = [
    "AXES_NOT_EXECUTED",
    "NOT_EXECUTED",
    "PRECISIONS",
    "PRECISIONS_NOT_EXECUTED",
    "BatchDimensions",
    "Fault",
    "ModelDimensions",
    "all_faults",
    "axis_faults",
    "batch_faults",
    "data_faults",
    "document_attention_faults",
    "grid_faults",
    "interleaving_faults",
    "is_about_split",
    "is_unsupported",
    "model_faults",
    "padded_vocab_size",
    "plan_faults",
    "plan_model_faults",
    "precision_faults",
    "precision_model_faults",
    "recompute_faults",
    "resolve_microbatches",
    "schedule_faults",
    "size_faults",
    "validation_set_faults",
    "verdict",
    "vocabulary_faults",
    "world_faults",
]


def all_faults(
    plan: PlanRecord,
    *,
    model: ModelDimensions | None = None,
    batch: BatchDimensions | None = None,
    precision: str | None = None,
    world_size: int | None = None,
    split: PipelineSplit = EVEN,
) -> list[Fault]:
    """Everything that is wrong with what is given together; what is None is not judged.

    This is what the API asks, with ``microbatches`` as the plan states them.
    """
    faults = plan_faults(plan)
    sound = not size_faults(plan)
    if sound and world_size is not None:
        faults += world_faults(plan, world_size)
    if model is not None:
        faults += model_faults(model)
    if sound and model is not None:
        faults += plan_model_faults(plan, model, split)
    if sound and batch is not None:
        faults += batch_faults(plan, batch, plan.microbatches)
    if sound and not any(map(is_about_split, faults)):
        faults += interleaving_faults(plan, split, plan.microbatches)
    if precision is not None:
        faults += precision_faults(precision)
    if precision is not None and model is not None:
        faults += precision_model_faults(precision, model.num_moe_experts)
    return faults
