"""Everything a session resumes from, in Megatron's sharded form, and how it is put back."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.api import CheckpointException

from mixle_megatron.checkpoint.expected_state import model_state
from mixle_megatron.checkpoint.optimizer_state import optimizer_sharded_state, restore_optimizer
from mixle_megatron.checkpoint.reading import Reading
from mixle_megatron.checkpoint.safe_loading import safe_loading
from mixle_megatron.checkpoint.stored_state import FULLY_RESHARDABLE, OptimizerFormat
from mixle_megatron.errors import CheckpointError
from mixle_megatron.random_state import restore_random_state
from mixle_megatron.stage import Stage


def restore_session(stage: Stage, reading: Reading, *, keep_schedule: bool = False) -> dict[str, Any]:
    """Restore the stage from a checkpoint that :func:`judge_session` found to fit.

    The generators' states belong to the ranks of one plan; under another plan they are left alone.

    Args:
        stage: what to restore.
        reading: of the checkpoint.
        keep_schedule: go on with the stage's own learning rates and weight decay, at the checkpoint's step.

    Returns:
        ``scheduler``, ``scaler`` (of losses) and ``rng`` as they were saved; None where none was put back.

    Raises:
        CheckpointError: it could not be read after all; the stage may then be restored in part.
    """
    state = sharded_state(stage, reading.optimizer_format, loading=True)
    if reading.random:
        state["random"] = random_of_rank(None)
    loaded = load_sharded(state, reading.path)
    for number, chunk in enumerate(stage.chunks):
        chunk.load_state_dict(loaded["model"][f"chunk{number}"])
    _restore_schedule(stage.scheduler, loaded["scheduler"], keep=keep_schedule)
    restore_optimizer(stage, loaded["optimizer"], reading.optimizer_format)
    restore_loss_scale(stage.optimizer, loaded["loss_scale"])
    if reading.random:
        restore_random_state(loaded["random"])
    return {
        "scheduler": None if keep_schedule else loaded["scheduler"],
        "scaler": loaded["loss_scale"],
        "rng": loaded.get("random"),
    }


def load_sharded(state: dict[str, Any], path: str) -> dict[str, Any]:
    """What Megatron reads from the checkpoint ``path`` for the sharded ``state``; its tensors are filled.

    Raises:
        CheckpointError: it cannot be read, or holds what is not safe to.
    """
    try:
        with safe_loading():
            return dist_checkpointing.load(state, path)
    except (CheckpointingException, CheckpointException, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def sharded_state(
    stage: Stage, optimizer_format: OptimizerFormat = FULLY_RESHARDABLE, *, loading: bool = False
) -> dict[str, Any]:
    """Model, optimizer and schedules in Megatron's sharded form.

    Args:
        stage: whose.
        optimizer_format: how the optimizer's state is cut.
        loading: whether it only says what is to be read: then nothing is gathered.
    """
    model = model_state(stage)
    return {
        "model": model,
        "optimizer": optimizer_sharded_state(stage, model, optimizer_format, loading=loading),
        "scheduler": stage.scheduler.state_dict(),
        "loss_scale": loss_scale_state(stage.optimizer),
    }


def _restore_schedule(scheduler: Any, saved: dict[str, Any], *, keep: bool) -> None:
    scheduler.num_steps = 0  # Megatron's scheduler adds the steps that it loads to its own
    if keep:
        scheduler.step(increment=saved["num_steps"])
    else:
        scheduler.load_state_dict(saved)


def loss_scale_state(optimizer: Any) -> dict[str, Any] | None:
    """Megatron's gradient scaler, which is the same on every rank; None where there is none."""
    scaler = optimizer.chained_optimizers[0].grad_scaler
    return None if scaler is None else scaler.state_dict()


def restore_loss_scale(optimizer: Any, state: dict[str, Any] | None) -> None:
    """Put back what :func:`loss_scale_state` gave, where this precision scales losses too."""
    for part in optimizer.chained_optimizers:
        if state is not None and part.grad_scaler is not None:
            part.grad_scaler.load_state_dict(state)


def random_of_rank(value: Any) -> ShardedObject:
    """The generators' state of this rank, in Megatron's sharded form."""
    return ShardedObject("random", value, (dist.get_world_size(),), (dist.get_rank(),))
