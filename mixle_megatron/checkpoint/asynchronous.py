"""Saves that training does not wait for, by Megatron's own queue and its own forked writer.

The writer is a process of one save's length, forked by Megatron's ``TemporalAsyncCaller``: the kernel
keeps the tensors as they were at the call, whatever training does to them meanwhile, and nothing is
held between two saves. Its ``PersistentAsyncCaller`` would start the program again on every rank (seconds
and half a gigabyte), shares tensors on the CPU with training while it writes them, and waits for
ever for a writer that was killed. A thread would hold Python's lock against the thread that launches
kernels for as long as torch computes the checksums of its files.

Ranks finish a save together, at a point that all of them reach: each poll is one small all-reduce.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from os import getpid
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncCaller,
    AsyncCallsQueue,
    AsyncRequest,
    TemporalAsyncCaller,
)

from mixle_megatron.checkpoint.durable import WRITING
from mixle_megatron.checkpoint.first_rank import on_first_rank
from mixle_megatron.checkpoint.manifest import Facts
from mixle_megatron.checkpoint.saving import Save, SharedOutSave, complete, request_save
from mixle_megatron.checkpoint.shard_writing import Failed, ForkedOutcome, LocalOutcome, write_as_child
from mixle_megatron.errors import CheckpointError, MixleMegatronError
from mixle_megatron.stage import Stage

_SECONDS_BETWEEN_POLLS = 0.05


class Saves:
    """The saves of one session, one after the other."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._last: SaveInProgress | None = None
        self._strategies: dict[str | None, SharedOutSave] = {}

    def save(
        self,
        path: str,
        payload: dict[str, Any],
        facts: Facts,
        *,
        asynchronous: bool,
        afterwards: Callable[[], None],
    ) -> SaveInProgress | None:
        """Write the stage and ``payload`` into the folder ``path``, when the last save has ended. Collective.

        Args:
            path: the folder.
            payload: plain values, equal on all ranks.
            facts: what the manifest says of it.
            asynchronous: whether to return as soon as training may change what is saved.
            afterwards: what the first rank does when the folder has its name, before the save is done.

        Returns:
            The save that goes on; None where it is done.

        Raises:
            CheckpointError: on every rank alike; it may be the last save's.
        """
        self.finish()
        final = Path(path)
        aside = final.with_name(final.name + WRITING)
        outcome = ForkedOutcome() if asynchronous else LocalOutcome()
        save = Save(final, aside, facts, outcome, afterwards)
        request = request_save(self._stage, payload, save, self._strategy(facts.optimizer_format))
        if not asynchronous:
            request.execute_sync()
            on_first_rank(partial(complete, save), doing=f"write the checkpoint {final}")
            return None
        self._last = SaveInProgress(final, outcome, request, partial(complete, save))
        return self._last

    def _strategy(self, optimizer_format: str | None) -> SharedOutSave:
        """Megatron's, which plans again only where other tensors are saved."""
        if optimizer_format not in self._strategies:
            self._strategies[optimizer_format] = SharedOutSave(self._stage.groups.collection.dp_cp)
        return self._strategies[optimizer_format]

    def poll(self) -> None:
        """Finish the save that goes on, if all ranks have written, and keep its failure. Collective then."""
        if self._last is not None:
            self._last.poll()

    def finish(self) -> None:
        """Wait for the save that goes on. Collective if there is one.

        Raises:
            CheckpointError: it failed, and nobody has been told; on every rank alike.
        """
        if self._last is not None:
            self._last.settle()
            self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the last save's failure, if nobody has been told; on every rank alike, without asking."""
        if self._last is not None and self._last.has_untold_failure:
            self._last.raise_failure()

    def abandon(self) -> None:
        """Give up the save that goes on, on this rank alone."""
        if self._last is not None:
            self._last.abandon()


class SaveInProgress:
    """A checkpoint that is being written while training goes on (mixle's ``AsyncTrainingCheckpoint``).

    Attributes:
        path: the folder that it will be.
    """

    def __init__(
        self, path: Path, outcome: ForkedOutcome, request: AsyncRequest, completing: Callable[[], None]
    ) -> None:
        self.path = path
        self._outcome = outcome
        self._first_rank = _FirstRankCaller(completing)
        self._failure: MixleMegatronError | None = None
        self._failure_is_told = False
        request.add_finalize_fn(self._complete)
        self._calls = self._started(request)

    @property
    def done(self) -> bool:
        """Whether the checkpoint is whole and has its name; the same on every rank, without asking them."""
        return self._has_ended and self._failure is None

    def wait(self) -> None:
        """Return when the checkpoint is whole and has its name. Every rank calls it.

        Raises:
            CheckpointError: it could not be written, on every rank alike, or an exception has closed its
                session.
        """
        self.settle()
        self.raise_failure()

    def settle(self) -> None:
        """Wait for its end, whatever that is. Collective until it has ended.

        Megatron's own waiting is not used: a rank that has written its files would sit in a collective
        until that times out, however long the others go on writing.
        """
        while not self._has_ended:
            self._outcome.wait_for_writer(_SECONDS_BETWEEN_POLLS)
            self._first_rank.wait(_SECONDS_BETWEEN_POLLS)
            self.poll()

    def poll(self) -> None:
        """Go on where every rank has written, or keep its failure. Collective until it has ended."""
        try:
            self._calls.maybe_finalize_async_calls(blocking=False)
        except MixleMegatronError as error:
            self._failure = error

    def raise_failure(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._failure is not None:
            self._failure_is_told = True
            raise self._failure

    @property
    def has_untold_failure(self) -> bool:
        """Whether it failed and nobody has been told."""
        return self._failure is not None and not self._failure_is_told

    def abandon(self) -> None:
        """End this rank's writer, without a word to other ranks; a later save clears what it wrote."""
        while not self._has_ended:
            self._calls.async_calls.popleft().async_caller.close(abort=True)
            self._outcome.abandon()
            self._failure = CheckpointError(f"{self.path} was given up: an exception closed its session")

    @property
    def _has_ended(self) -> bool:
        return not self._calls.async_calls

    def _started(self, request: AsyncRequest) -> _Calls:
        """Fork the writer; where that fails on this rank, the save fails on all of them when it ends."""
        if request.async_fn is not None:
            request = request._replace(async_fn=partial(write_as_child, getpid(), request.async_fn))
        try:
            calls = _Calls(self._first_rank)
            calls.schedule_async_request(request)
        except Exception as error:
            self._outcome.put(Failed(f"the process that writes its files could not be started: {error}"))
            calls = _Calls(self._first_rank)
            calls.schedule_async_request(request._replace(async_fn=None, preload_fn=None))
        self._outcome.process = calls.async_calls[0].async_caller.process
        return calls

    def _complete(self) -> None:
        """Let the first rank go on alone, when all have told it what they have written."""
        doing = f"write the checkpoint {self.path}"
        raise_on_all = partial(on_first_rank, self._first_rank.raise_failure, doing=doing)
        self._calls.schedule_async_request(AsyncRequest(None, (), [raise_on_all]))


class _Calls(AsyncCallsQueue):
    """Megatron's queue with the two calls of a save: each rank writes, then the first completes."""

    def __init__(self, first_rank: _FirstRankCaller) -> None:
        super().__init__()
        self._first_rank = first_rank

    def _get_async_caller(self) -> AsyncCaller:
        return _Forking() if self.call_idx == 0 else self._first_rank


class _Forking(TemporalAsyncCaller):
    """Megatron's caller that forks a process."""

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Fork."""
        with warnings.catch_warnings():
            # Python warns of every fork beside other threads. The locks that this child takes are those
            # that Python and the C library hand over in order, and it computes on one thread.
            warnings.simplefilter("ignore", DeprecationWarning)
            super().schedule_async_call(async_req)


class _FirstRankCaller(AsyncCaller):
    """Runs one action in a thread of the first rank: it waits for the disk, and computes little."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._failure: Exception | None = None
        self._thread: Thread | None = None

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Begin, on the first rank."""
        if dist.get_rank() == 0:
            self._thread = Thread(target=self._act, daemon=True)
            self._thread.start()

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether it has ended, on every rank alike. Collective unless ``no_dist``."""
        if blocking:
            self.close()
        goes_on = self._thread is not None and self._thread.is_alive()
        return not goes_on if no_dist else bool(self.sync_all_async_calls(int(goes_on)))

    def wait(self, seconds: float) -> None:
        """Wait for its end, but no longer than so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)

    def close(self, abort: bool = False) -> None:
        """Wait for its end, also to abort: what it does leaves a whole checkpoint or none."""
        if self._thread is not None:
            self._thread.join()

    def raise_failure(self) -> None:
        """Raise what went wrong, on the first rank."""
        if self._failure is not None:
            raise self._failure

    def _act(self) -> None:
        try:
            self._action()
        except MixleMegatronError as error:
            self._failure = error
        except Exception as error:
            self._failure = CheckpointError(f"cannot write the checkpoint: {error!r}")

    def __del__(self) -> None:
        """Megatron's base class asks for it; there is nothing to end."""
