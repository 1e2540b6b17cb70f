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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, _disable_gc
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from mixle_megatron.checkpoint.common_state import SESSION
from mixle_megatron.checkpoint.completeness import BACKEND
from mixle_megatron.checkpoint.durable import publish, recover, sync_file, sync_folder
from mixle_megatron.checkpoint.first_rank import on_first_rank
from mixle_megatron.checkpoint.manifest import Facts, Table, checksum_files, files_of_rank, write_manifest
from mixle_megatron.checkpoint.opening import is_checkpoint
from mixle_megatron.checkpoint.session_state import random_of_rank, saved_state
from mixle_megatron.checkpoint.shard_writing import Failed, Outcome, Written, write_shards
from mixle_megatron.checkpoint.write_results import kept_in_process
from mixle_megatron.errors import CheckpointError
from mixle_megatron.megatron_versions import ASYNCHRONOUS_SAVE, COMMON_STATE_WRITER
from mixle_megatron.random_state import random_state
from mixle_megatron.stage import Stage

_DOING = "write the checkpoint"

_VERSION = 1
"""Of Megatron's format :data:`BACKEND`."""


@dataclass
class Save:
    """One save under way, on one rank.

    Attributes:
        final: the folder that it will be.
        aside: the folder that is written.
        facts: what the manifest says of it.
        outcome: where this rank's writer leaves what came of it.
        afterwards: what the first rank does when the folder has its name, before the save is done.
        results: where Megatron looks for the writer's results.
        megatrons: what Megatron does when every rank has written.
        first_ranks: what is left of that for the first rank to write.
        tables: what every rank has written, once that is known.
    """

    final: Path
    aside: Path
    facts: Facts
    outcome: Outcome
    afterwards: Callable[[], None]
    results: queue.Queue[Any] = field(default_factory=queue.Queue)
    megatrons: Sequence[Callable[[], None]] = ()
    first_ranks: list[Callable[[], None]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


class SharedOutSave(FullyParallelSaveStrategyWrapper):
    """Megatron's way of saving one kind of state: what several ranks have alike, they share out to write."""

    def __init__(self, replicas: dist.ProcessGroup) -> None:
        """Begin with no plan.

        Args:
            replicas: the ranks among which tensors may be replicated.
        """
        made = TorchDistSaveShardedStrategy(BACKEND, _VERSION, cached_metadata=True)
        super().__init__(made, replicas, do_cache_distribution=True)
        self._alone = replicas.size() == 1

    @property
    def has_planned(self) -> bool:
        """Whether it has saved before: it then knows that the tensors make up the whole."""
        return self.base_strategy.cached_central_plan is not None

    def apply_saving_parallelization(self, sharded_state_dict: Any) -> None:
        """Decide who writes what; Megatron would check all tensors each time where one rank is alone."""
        if not self._alone:
            super().apply_saving_parallelization(sharded_state_dict)


@_disable_gc()
def request_save(stage: Stage, payload: dict[str, Any], save: Save, strategy: SharedOutSave) -> AsyncRequest:
    """Make room for a checkpoint and collect what goes into it, in Megatron's terms. Collective.

    A checkpoint that is there already is replaced once the new one is whole. Each rank checksums and
    syncs the files that it wrote.

    Args:
        stage: what to save.
        payload: plain values, equal on all ranks.
        save: where to.
        strategy: Megatron's; one that has saved the same tensors before knows how they are shared out
            over the files, and that they make up the whole.

    Returns:
        What to execute. Its function writes this rank's files; its finalize function is :func:`collect`, for
        when that has ended on every rank. Then the first rank has to :func:`complete` the save.
    """
    on_first_rank(lambda: _make_room(save.aside, save.final), doing=f"{_DOING} {save.final}")
    state = saved_state(stage, save.facts.optimizer_format)
    state[SESSION] = payload
    state["random"] = random_of_rank(random_state())
    _spare_copies(state)
    with kept_in_process() as save.results, _failures_deferred(save.first_ranks):
        request = dist_checkpointing.save(
            state,
            str(save.aside),
            strategy,
            validate_access_integrity=not strategy.has_planned,
            async_sharded_save=True,
            **ASYNCHRONOUS_SAVE,
        )
    save.megatrons = list(request.finalize_fns)
    if request.async_fn is None:
        save.outcome.put(Written({}, {}))
        return request._replace(finalize_fns=[partial(collect, save)])
    transforms = request.async_fn.args[0]  # of Megatron's own function, in both versions
    write = partial(write_shards, save.outcome, transforms)
    return request._replace(async_fn=write, finalize_fns=[partial(collect, save)])


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


@_disable_gc()
def collect(save: Save) -> None:
    """Tell the first rank what every rank's writer has written, when all have ended. Collective.

    Raises:
        CheckpointError: on every rank, where some could not write; nothing is left of the checkpoint then.
    """
    own = save.outcome.take()
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own.table if isinstance(own, Written) else own)
    reasons = [f"rank {rank}: {each.reason}" for rank, each in enumerate(told) if isinstance(each, Failed)]
    if reasons:
        if dist.get_rank() == 0:
            _clear(save)
        dist.barrier()
        raise CheckpointError(f"cannot {_DOING} {save.final}: " + "; ".join(reasons))
    save.results.put(own.results)
    save.tables = told
    try:
        with _writes_deferred(save.first_ranks):
            for finalize in save.megatrons:
                finalize()
    except CheckpointException as error:  # no Exception of Python's
        raise CheckpointError(f"cannot {_DOING} {save.final}: {error}") from error


def complete(save: Save) -> None:
    """Write what the first rank writes alone, and give the folder its name; only that rank calls it.

    It is the only one to read or write files when the shards are there, and needs no other rank: a disk
    that is slow or full keeps nobody waiting.

    Raises:
        CheckpointError: it could not be written, and nothing is left of it; or what ``afterwards`` raises.
    """
    try:
        for write in save.first_ranks:
            write()
        rest = [name for name in files_of_rank(save.aside, 0) if name not in save.tables[0]]
        for name in rest:
            sync_file(save.aside / name)
        write_manifest(save.aside, save.facts, [*save.tables, checksum_files(save.aside, rest)])
        sync_folder(save.aside)
        publish(save.aside, save.final)
    except Exception as error:
        _clear(save)
        raise CheckpointError(f"cannot {_DOING} {save.final}: {error}") from error
    save.afterwards()


def _clear(save: Save) -> None:
    """Give the room back that a failed save took; no writer is left that could use it."""
    shutil.rmtree(save.aside, ignore_errors=True)  # the next save clears what stays, as after a crash


def _writes_deferred(later: list[Callable[[], None]]) -> AbstractContextManager[None]:
    """Let the first rank leave writing torch's ``.metadata`` and Megatron's ``metadata.json`` for later.

    Megatron writes them between collectives in which the other ranks wait: raised there, a full disk
    would leave them waiting until those time out.
    """

    def deferred(writes: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments, **options: later.append(partial(writes, *arguments, **options))

    return _replaced([(FileSystemWriterAsync, "finish"), (serialization, "save_config")], deferred)


def _failures_deferred(later: list[Callable[[], None]]) -> AbstractContextManager[None]:
    """Let the first rank fail to write the common state later: 0.16 writes it between collectives, too."""

    def kept(writes: Callable[..., None]) -> Callable[..., None]:
        def keeping(*arguments: Any, **options: Any) -> None:
            try:
                writes(*arguments, **options)
            except Exception as error:
                later.append(partial(_raise, error))

        return keeping

    return _replaced(COMMON_STATE_WRITER, kept)


@contextmanager
def _replaced(
    functions: Sequence[tuple[Any, str]], replacement: Callable[[Callable[..., None]], Callable[..., None]]
) -> Iterator[None]:
    originals = [getattr(owner, name) for owner, name in functions]
    for (owner, name), original in zip(functions, originals, strict=True):
        setattr(owner, name, replacement(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(functions, originals, strict=True):
            setattr(owner, name, original)


def _raise(error: Exception) -> None:
    raise error


def _make_room(aside: Path, final: Path) -> None:
    """Make an empty folder to write in; only a checkpoint, or nothing, may give way to the new one."""
    recover(final)
    if final.exists() and not is_checkpoint(final) and not _is_empty(final):
        raise FileExistsError(f"{final} is there already, and is no checkpoint that could be replaced")
    aside.mkdir(parents=True)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
