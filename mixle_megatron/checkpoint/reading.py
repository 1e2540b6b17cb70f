"""What a session's checkpoint says of itself, and whether it fits a session: before any tensor is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixle_megatron.checkpoint.expected_state import expected_state
from mixle_megatron.checkpoint.first_rank import on_first_rank
from mixle_megatron.checkpoint.fitting import model_faults, object_faults, optimizer_faults, plan_faults
from mixle_megatron.checkpoint.opening import optimizer_of, read_session, stored_tokens
from mixle_megatron.checkpoint.stored_state import OptimizerFormat, stored_state
from mixle_megatron.errors import CheckpointError, DoesNotFit, Fault
from mixle_megatron.optimizer_shards import VALUE, moments
from mixle_megatron.stage import Stage


@dataclass(frozen=True)
class Reading:
    """A checkpoint that fits a session, and how the session reads it.

    Attributes:
        path: its folder.
        payload: what was saved beside the tensors.
        optimizer_format: how the optimizer's state is cut.
        values_of_model: portable names of the parameters whose fp32 values it has in the model alone.
        random: whether its generators belong to the session's ranks: those of one plan do.
    """

    path: str
    payload: dict[str, Any]
    optimizer_format: OptimizerFormat
    values_of_model: frozenset[str]
    random: bool


def judge_session(
    stage: Stage, path: str, plan: Any, *, tokens: int | None, other_worlds: bool = True
) -> Reading:
    """Compare the checkpoint in the folder ``path`` with the stage; neither is changed. Collective.

    Args:
        stage: what would be restored.
        path: a folder that a session saved.
        plan: the plan of ``stage``.
        tokens: rows of its vocabulary without padding; None where the caller pads it.
        other_worlds: whether it may have been saved by another number of ranks.

    Raises:
        CheckpointError: on every rank alike: it is not a checkpoint, or it is damaged.
        DoesNotFit: likewise, with each tensor of the model and its optimizer that is missing, unexpected
            or of another shape, named once.
    """
    expected = expected_state(stage)
    optimizer = stage.optimizer.config.optimizer
    kinds = (VALUE, *moments(stage.optimizer.chained_optimizers[0]))

    def judge() -> Reading:
        folder = Path(path)
        payload, metadata = read_session(folder)
        saved = payload["parallel_plan"]
        if saved["world_size"] != plan.world_size and not other_worlds:
            raise CheckpointError(
                f"{path} was saved at world size {saved['world_size']}, and this session has "
                f"{plan.world_size}; pass allow_world_size_change=True to reshard it"
            )
        stored = stored_state(metadata)
        of_plan = plan_faults(stored, path, plan, saved)
        if of_plan:
            raise DoesNotFit(of_plan)
        found = model_faults(expected, stored, path, tokens=tokens, stored_tokens=stored_tokens(folder))
        found = found or object_faults(expected, stored, path)
        found += optimizer_faults(
            expected, stored, path, optimizer=optimizer, kinds=kinds, writer=optimizer_of(payload)
        )
        first: dict[str, Fault] = {}
        for fault in found:
            first.setdefault(fault.field, fault)
        if first:
            raise DoesNotFit(first.values())
        of_model = frozenset(expected.cuts) - stored.held[VALUE].keys()
        same_ranks = saved == plan.as_dict()
        return Reading(path, payload, stored.optimizer_format, of_model, random=same_ranks)

    return on_first_rank(judge, doing="read the checkpoint")
