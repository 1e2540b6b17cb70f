"""Everything a session resumes from, in Megatron's sharded form, and how it is put back."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

from mixle_megatron.checkpoint.expected_state import model_state
from mixle_megatron.checkpoint.optimizer_state import optimizer_sharded_state, restore_optimizer
from mixle_megatron.checkpoint.portable_names import portable_name
from mixle_megatron.checkpoint.reading import Reading
from mixle_megatron.checkpoint.safe_loading import safe_loading
from mixle_megatron.checkpoint.stored_state import FULLY_RESHARDABLE, OptimizerFormat
from mixle_megatron.errors import CheckpointError
from mixle_megatron.optimizer_shards import is_own_value, model_parameters, moments
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
    valueless = _named(stage, reading.values_of_model)
    state = sharded_state(stage, reading.optimizer_format, valueless, loading=True)
    places = _read_in_fp32(state["model"], valueless)
    if reading.random:
        state["random"] = random_of_rank(None)
    loaded = load_sharded(state, reading.path)
    values = {key: loaded["model"][chunk][name] for key, (chunk, name) in places.items()}
    for number, chunk in enumerate(stage.chunks):
        chunk.load_state_dict(loaded["model"][f"chunk{number}"])
    _restore_schedule(stage.scheduler, loaded["scheduler"], keep=keep_schedule)
    restore_optimizer(stage, loaded["optimizer"], reading.optimizer_format, values)
    parameters = [each for _, each in model_parameters(stage.optimizer)]
    if any(is_own_value(each) and id(each) not in values for each in parameters):
        # The model's tensors were rounded from values of which each rank has put back its own.
        stage.gather_parameters()
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


def saved_state(stage: Stage, optimizer_format: OptimizerFormat = FULLY_RESHARDABLE) -> dict[str, Any]:
    """What a checkpoint holds of model, optimizer and schedules, in Megatron's sharded form.

    A value that is the parameter itself is among the model's tensors, once. An optimizer that keeps nothing
    else keeps it all the same: its state would be none.
    """
    valueless = {
        id(parameter)
        for part, parameter in model_parameters(stage.optimizer)
        if is_own_value(parameter) and moments(part)
    }
    return sharded_state(stage, optimizer_format, valueless)


def sharded_state(
    stage: Stage, optimizer_format: OptimizerFormat, valueless: Collection[int], *, loading: bool = False
) -> dict[str, Any]:
    """Model, optimizer and schedules in Megatron's sharded form.

    Args:
        stage: whose.
        optimizer_format: how the optimizer's state is cut.
        valueless: ids of the parameters whose fp32 values are looked for in the model alone.
        loading: whether it only says what is to be read: then nothing is gathered.
    """
    model = model_state(stage)
    return {
        "model": model,
        "optimizer": optimizer_sharded_state(stage, model, optimizer_format, valueless, loading=loading),
        "scheduler": stage.scheduler.state_dict(),
        "loss_scale": loss_scale_state(stage.optimizer),
    }


def _named(stage: Stage, names: Collection[str]) -> set[int]:
    """The ids of the parameters with these portable names."""
    return {id(parameter) for name, parameter in stage.named_parameters() if portable_name(name) in names}


def _read_in_fp32(model: dict[str, Any], parameters: Collection[int]) -> dict[int, tuple[str, str]]:
    """Let these parameters be read unrounded; where in ``model`` they then are."""
    places = {}
    for chunk, shards in model.items():
        for name, shard in shards.items():
            key = id(getattr(shard, "data", None))
            if key not in parameters:
                continue
            places[key] = chunk, name
            if shard.data.dtype != torch.float32:
                shards[name] = _in_fp32(shard)
    return places


def _in_fp32(shard: Any) -> Any:
    changes: dict[str, Any] = {"data": torch.empty_like(shard.data, dtype=torch.float32)}
    return replace(shard, **changes, **({"dtype": torch.float32} if isinstance(shard, ShardedTensor) else {}))


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
