"""Everything a session resumes from, as one Megatron dist-checkpoint.

A checkpoint is a folder. It is written beside its final name, brought onto the disk, given a manifest,
and then renamed, so that the name never stands for a half-written one, whatever ends the job.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.api import CheckpointException

from mixle_megatron.checkpoint.common_state import SESSION
from mixle_megatron.checkpoint.completeness import damage
from mixle_megatron.checkpoint.durable import WRITING, publish, recover, sync_file, sync_folder
from mixle_megatron.checkpoint.first_rank import on_first_rank
from mixle_megatron.checkpoint.manifest import Facts, checksum_files, files_of_rank, write_manifest
from mixle_megatron.checkpoint.optimizer_state import optimizer_sharded_state, restore_optimizer
from mixle_megatron.checkpoint.safe_loading import safe_loading
from mixle_megatron.checkpoint.write_results import kept_in_process
from mixle_megatron.errors import CheckpointError
from mixle_megatron.random_state import random_state, restore_random_state
from mixle_megatron.stage import Stage

_WRITE = "write the checkpoint"


def save_session(stage: Stage, path: str, payload: dict[str, Any], facts: Facts) -> None:
    """Write the stage and ``payload`` (plain values, equal on all ranks) into the folder ``path``.

    A checkpoint that is there already is replaced once the new one is whole. Each rank checksums and
    syncs the files that it wrote.

    Args:
        stage: what to save.
        path: the folder.
        payload: plain values, equal on all ranks.
        facts: what the manifest says of it.
    """
    final = Path(path)
    aside = final.with_name(final.name + WRITING)
    on_first_rank(lambda: _make_room(aside, final), doing=_WRITE)
    state = sharded_state(stage)
    state[SESSION] = payload
    state["random"] = _ranked(random_state())
    with kept_in_process():
        dist_checkpointing.save(state, str(aside))
    dist.barrier()
    own = files_of_rank(aside, dist.get_rank())
    for name in own:
        sync_file(aside / name)
    tables: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tables, checksum_files(aside, own))
    on_first_rank(lambda: _publish(aside, final, facts, tables), doing=_WRITE)


def load_session(stage: Stage, path: str, plan: Any, *, other_worlds: bool = True) -> dict[str, Any]:
    """Restore the stage from the folder ``path`` and return the payload that was saved with it.

    The generators' states belong to the ranks of one plan; under another plan they are left alone.

    Args:
        stage: what to restore.
        path: a folder that :func:`save_session` wrote.
        plan: the plan of ``stage``.
        other_worlds: whether it may have been saved by another number of ranks.

    Raises:
        CheckpointError: it is not a checkpoint, or its tensors are not those of this model.
    """
    if _is_checkpoint(Path(path)):
        on_first_rank(lambda: _refuse_damaged(Path(path)), doing="read the checkpoint")
    saved = read_payload(path)
    ranks = saved["parallel_plan"]["world_size"]
    if ranks != plan.world_size and not other_worlds:
        raise CheckpointError(
            f"{path} was saved at world size {ranks}, and this session has {plan.world_size}; "
            "pass allow_world_size_change=True to reshard it"
        )
    state = sharded_state(stage)
    same_plan = saved["parallel_plan"] == plan.as_dict()
    if same_plan:
        state["random"] = _ranked(None)
    try:
        with safe_loading():
            loaded = dist_checkpointing.load(state, path)
    except (CheckpointingException, CheckpointException, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} does not fit this model, plan and optimizer: {error}") from error
    for number, chunk in enumerate(stage.chunks):
        chunk.load_state_dict(loaded["model"][f"chunk{number}"])
    stage.scheduler.num_steps = 0  # Megatron's scheduler adds the steps that it loads to its own
    stage.scheduler.load_state_dict(loaded["scheduler"])
    restore_optimizer(stage, loaded["optimizer"])
    restore_loss_scale(stage.optimizer, loaded["loss_scale"])
    if same_plan:
        restore_random_state(loaded["random"])
    return saved


def read_payload(path: str) -> dict[str, Any]:
    """What was saved beside the tensors of the checkpoint ``path``.

    Raises:
        CheckpointError: there is no checkpoint of a session there.
    """
    if not _is_checkpoint(Path(path)):
        raise CheckpointError(f"{path} is not a Megatron dist-checkpoint (it has no metadata.json)")
    with safe_loading():
        common = dist_checkpointing.load_common_state_dict(path)
    if SESSION not in common:
        raise CheckpointError(f"{path} was not written by a session of mixle-megatron: it has no step clock")
    return common[SESSION]


def _refuse_damaged(folder: Path) -> None:
    """Compare names and sizes; the reader of a run's checkpoints has compared checksums before."""
    found = [one for one in damage(folder, checksums=False, needs_manifest=False) if one.prevents_loading]
    if found:
        raise CheckpointError(f"{folder} is damaged: " + "; ".join(map(str, found)))


def sharded_state(stage: Stage) -> dict[str, Any]:
    """Model, optimizer and schedules in Megatron's sharded form."""
    # The innermost modules' state, not their wrappers': its keys are the model's own, whatever chunk
    # of whatever stage holds them.
    metadata = {"dp_cp_group": stage.groups.collection.dp_cp}
    model = {
        f"chunk{number}": chunk.sharded_state_dict(prefix="", metadata=metadata)
        for number, chunk in enumerate(stage.chunks)
    }
    return {
        "model": model,
        "optimizer": optimizer_sharded_state(stage, model),
        "scheduler": stage.scheduler.state_dict(),
        "loss_scale": loss_scale_state(stage.optimizer),
    }


def loss_scale_state(optimizer: Any) -> dict[str, Any] | None:
    """Megatron's gradient scaler, which is the same on every rank; None where there is none."""
    scaler = optimizer.chained_optimizers[0].grad_scaler
    return None if scaler is None else scaler.state_dict()


def restore_loss_scale(optimizer: Any, state: dict[str, Any] | None) -> None:
    """Put back what :func:`loss_scale_state` gave."""
    if state is not None:
        for part in optimizer.chained_optimizers:
            part.grad_scaler.load_state_dict(state)


def _ranked(value: Any) -> ShardedObject:
    return ShardedObject("random", value, (dist.get_world_size(),), (dist.get_rank(),))


def _make_room(aside: Path, final: Path) -> None:
    """Make an empty folder to write in; only a checkpoint, or nothing, may give way to the new one."""
    recover(final)
    if final.exists() and not _is_checkpoint(final) and not _is_empty(final):
        raise FileExistsError(f"{final} is there already, and is no checkpoint that could be replaced")
    aside.mkdir(parents=True)


def _is_checkpoint(folder: Path) -> bool:
    return dist_checkpointing.check_is_distributed_checkpoint(str(folder))


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _publish(aside: Path, final: Path, facts: Facts, tables: list[Any]) -> None:
    write_manifest(aside, facts, tables)
    sync_folder(aside)
    publish(aside, final)
