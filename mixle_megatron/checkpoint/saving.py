"""Saving a session: what Megatron is asked for, and what is done once every rank has written.

A checkpoint is a folder. It is written beside its final name, brought onto the disk, given a manifest,
and then renamed, so that the name never stands for a half-written one, whatever ends the job. Here is
all of it but the writing itself (:mod:`mixle_megatron.checkpoint.shard_writing`), which a save that
training does not wait for leaves to another process (:mod:`mixle_megatron.checkpoint.asynchronous`).
"""

from __future__ import annotations

import queue
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from mixle_megatron.checkpoint.common_state import SESSION
from mixle_megatron.checkpoint.durable import WRITING, publish, recover, sync_file, sync_folder
from mixle_megatron.checkpoint.first_rank import on_first_rank
from mixle_megatron.checkpoint.manifest import Facts, Table, checksum_files, files_of_rank, write_manifest
from mixle_megatron.checkpoint.opening import is_checkpoint
from mixle_megatron.checkpoint.session_state import random_of_rank, sharded_state
from mixle_megatron.checkpoint.shard_writing import Failed, Outcome, Written, write_shards
from mixle_megatron.checkpoint.write_results import kept_in_process
from mixle_megatron.errors import CheckpointError
from mixle_megatron.megatron_versions import ASYNCHRONOUS_SAVE, COMMON_STATE_WRITER
from mixle_megatron.random_state import random_state
from mixle_megatron.stage import Stage

_DOING = "write the checkpoint"


@dataclass
class _Save:
    """One save under way, on one rank.

    Attributes:
        final: the folder that it will be.
        aside: the folder that is written.
        facts: what the manifest says of it.
        outcome: where this rank's writer leaves what came of it.
        results: where Megatron looks for the writer's results.
        failures: what the first rank could not write itself.
        megatrons: what Megatron does when every rank has written.
    """

    final: Path
    aside: Path
    facts: Facts
    outcome: Outcome
    results: queue.Queue[Any]
    failures: list[Exception]
    megatrons: Sequence[Callable[[], None]]


def request_save(
    stage: Stage,
    path: str,
    payload: dict[str, Any],
    facts: Facts,
    outcome: Outcome,
    strategy: TorchDistSaveShardedStrategy,
) -> AsyncRequest:
    """Make room for a checkpoint and collect what goes into it, in Megatron's terms. Collective.

    A checkpoint that is there already is replaced once the new one is whole. Each rank checksums and
    syncs the files that it wrote.

    Args:
        stage: what to save.
        path: the folder.
        payload: plain values, equal on all ranks.
        facts: what the manifest says of it.
        outcome: where this rank's writer is to leave what came of it.
        strategy: Megatron's; one that has saved the same tensors before knows how they are shared out
            over the files, and that they make up the whole.

    Returns:
        What to execute. Its function writes this rank's files; once that has ended on every rank, the
        last of its finalize functions gives the folder its name, or raises CheckpointError on all.
    """
    final = Path(path)
    aside = final.with_name(final.name + WRITING)
    on_first_rank(lambda: _make_room(aside, final), doing=_DOING)
    state = sharded_state(stage, facts.optimizer_format)
    state[SESSION] = payload
    state["random"] = random_of_rank(random_state())
    _spare_copies(state)
    failures: list[Exception] = []
    with kept_in_process() as results, _first_rank_failures_kept(failures):
        request = dist_checkpointing.save(
            state,
            str(aside),
            strategy,
            validate_access_integrity=strategy.cached_central_plan is None,
            async_sharded_save=True,
            **ASYNCHRONOUS_SAVE,
        )
    save = _Save(final, aside, facts, outcome, results, failures, list(request.finalize_fns))
    if request.async_fn is None:
        outcome.put(Written({}, {}))
        return request._replace(finalize_fns=[partial(_finish, save)])
    transforms = request.async_fn.args[0]  # of Megatron's own function, in both versions
    write = partial(write_shards, outcome, transforms)
    return request._replace(async_fn=write, finalize_fns=[partial(_finish, save)])


def _spare_copies(state: dict[str, Any]) -> None:
    """Give tensors on the CPU that are parts of larger storages ones of their own, over the same memory.

    torch saves whole storages, so that Megatron copies such tensors first: all parameters, which lie in
    its buffers. A synchronous save needs no copy, and for an asynchronous one the kernel keeps what
    training changes.
    """
    for sharded in nested_values(state):
        if isinstance(sharded, ShardedTensor) and _is_part_of_storage(sharded.data):
            numbers = sharded.data.detach().view(-1).view(torch.uint8).numpy()
            sharded.data = torch.from_numpy(numbers).view(sharded.data.dtype).view(sharded.data.shape)


def _is_part_of_storage(tensor: torch.Tensor) -> bool:
    on_cpu = tensor.device.type == "cpu" and tensor.is_contiguous()
    return on_cpu and tensor.untyped_storage().nbytes() != tensor.nbytes


def _finish(save: _Save) -> None:
    """Give the folder its name, when every rank's writer has ended. Collective.

    Raises:
        CheckpointError: on every rank, where it could not be written on some.
    """
    try:
        tables = _tables(save)
        with _first_rank_failures_kept(save.failures):
            for finalize in save.megatrons:
                finalize()
        on_first_rank(lambda: _complete(save, tables), doing=_DOING)
    except CheckpointException as error:
        _clear(save)
        raise CheckpointError(f"cannot {_DOING} {save.final}: {error}") from error
    except CheckpointError:
        _clear(save)
        raise


def _tables(save: _Save) -> list[Table]:
    """What every rank has written."""
    own = save.outcome.take()
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own.table if isinstance(own, Written) else own)
    reasons = [f"rank {rank}: {each.reason}" for rank, each in enumerate(told) if isinstance(each, Failed)]
    if reasons:
        raise CheckpointError(f"cannot {_DOING} {save.final}: " + "; ".join(reasons))
    save.results.put(own.results)
    return told


def _complete(save: _Save, tables: list[Table]) -> None:
    """Checksum and sync what the first rank wrote beside the shards, and publish."""
    if save.failures:
        raise CheckpointError(f"cannot {_DOING} {save.final}: {save.failures[0]}") from save.failures[0]
    rest = [name for name in files_of_rank(save.aside, 0) if name not in tables[0]]
    for name in rest:
        sync_file(save.aside / name)
    write_manifest(save.aside, save.facts, [*tables, checksum_files(save.aside, rest)])
    sync_folder(save.aside)
    publish(save.aside, save.final)


def _clear(save: _Save) -> None:
    """Give the room back that a failed save took; no writer is left that could use it. Collective."""
    if dist.get_rank() == 0:
        shutil.rmtree(save.aside, ignore_errors=True)  # the next save clears what stays, as after a crash
    dist.barrier()


@contextmanager
def _first_rank_failures_kept(failures: list[Exception]) -> Iterator[None]:
    """Keep what the first rank could not write for :func:`_complete`, which tells every rank.

    The first rank writes torch's ``.metadata``, Megatron's ``metadata.json`` and, in 0.16, the common
    state while the others already wait for it in the next collective: raised there, a full disk would
    leave them waiting until that times out.
    """

    def kept(writes: Callable[..., Any]) -> Callable[..., None]:
        def keeping(*arguments: Any, **options: Any) -> None:
            try:
                writes(*arguments, **options)
            except Exception as error:
                failures.append(error)

        return keeping

    writers = [(FileSystemWriterAsync, "finish"), (serialization, "save_config"), *COMMON_STATE_WRITER]
    originals = [getattr(owner, name) for owner, name in writers]
    for (owner, name), original in zip(writers, originals, strict=True):
        setattr(owner, name, kept(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(writers, originals, strict=True):
            setattr(owner, name, original)


def _make_room(aside: Path, final: Path) -> None:
    """Make an empty folder to write in; only a checkpoint, or nothing, may give way to the new one."""
    recover(final)
    if final.exists() and not is_checkpoint(final) and not _is_empty(final):
        raise FileExistsError(f"{final} is there already, and is no checkpoint that could be replaced")
    aside.mkdir(parents=True)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
