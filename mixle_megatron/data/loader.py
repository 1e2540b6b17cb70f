"""Dealing the samples of each update to data-parallel ranks.

With global batch G, update u is samples u*G to (u+1)*G - 1 of the source, in order, whatever the plan.
They are cut into micro-batches of ``micro_batch_size`` in that order, and whole micro-batches are
dealt: with D data-parallel ranks and M microbatches a call, micro-batch

    (a * D + r) * M + m

of the update is microbatch m of accumulation step a on rank r. So each accumulation step takes the
next D * M micro-batches, and each rank M neighbouring ones of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixle_megatron.data.source import SampleSource
from mixle_megatron.errors import Fault, Refused, refuse_if_any

Batch = tuple[NDArray[np.int64], NDArray[np.int64]]

_FIELD_OF = {"seed": "run.seed", "sequence_length": "model.seq_length"}
IGNORED = -100  # a target that is not supervised: torch's ignore_index


def split_targets(rows: NDArray[np.int64], unsupervised_after: int | None = None) -> Batch:
    """Inputs and targets of windows (n, S + 1): two contiguous arrays of shape (n, S).

    What follows the token ``unsupervised_after`` is not supervised: its target is -100.
    """
    inputs, targets = np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])
    if unsupervised_after is not None:
        targets = np.where(inputs == unsupervised_after, IGNORED, targets)
    return inputs, targets


class GlobalBatchLoader:
    """One rank's part of each update's global batch, in order and without end.

    Iterating gives what :meth:`update` gives, from ``consumed_samples`` on.

    Args:
        source: the samples.
        global_batch_size: samples of an update, G.
        micro_batch_size: samples of a micro-batch.
        data_parallel_rank: this rank among D, r.
        data_parallel_size: D, dp_replicate * dp_shard of the plan.
        gradient_accumulation_steps: calls an update, A.
        microbatches: micro-batches a call, M.

    Attributes:
        consumed_samples: samples of the run that have been handed out, over all ranks.

    Raises:
        Refused: the source is empty, a number is out of range, or G is not
            micro_batch_size * D * A * M.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        gradient_accumulation_steps: int,
        microbatches: int,
    ) -> None:
        self.source = source
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.microbatches = microbatches
        self.consumed_samples = 0
        refuse_if_any(self._faults())

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0."""
        return self.consumed_samples // len(self.source)

    def update(self, step: int) -> list[Batch]:
        """This rank's part of update ``step`` (from 0), without moving the loader.

        Returns:
            One (inputs, targets) an accumulation step: int64, shape
            (microbatches * micro_batch_size, S), contiguous; cut along the first dimension into
            ``microbatches`` equal parts they are its micro-batches in order.
        """
        return self.read(step * self.global_batch_size)

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """The next update's part of this rank, counted as consumed."""
        batches = self.read(self.consumed_samples)
        self.consumed_samples += self.global_batch_size
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands in its data, as plain JSON values; the same on every rank."""
        return {
            "consumed_samples": self.consumed_samples,
            "epoch": self.epoch,
            "seed": self.source.seed,
            "sequence_length": self.source.sequence_length,
            "fingerprint": self.source.fingerprint,
            "drawn": self.source.drawn(self.consumed_samples),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` stands; rank, plan and batch sizes may differ from those that made it.

        Raises:
            Refused: the state is of other data, another sequence length or another seed, or it is
                not whole; this loader is then unchanged.
        """
        consumed = state.get("consumed_samples")
        if not isinstance(consumed, int) or consumed < 0:
            rule = "must be a number of samples in the state of a data loader"
            raise Refused([Fault("consumed_samples", consumed, rule, "use another checkpoint")])
        refuse_if_any(self.differences(state))
        self.consumed_samples = consumed

    def differences(self, state: Mapping[str, Any]) -> list[Fault]:
        """Where ``state`` stands in other data, another sequence length, or another order of them."""
        return [
            Fault(
                field,
                getattr(self.source, key),
                f"differs from that of the checkpoint's data, {state.get(key)}",
                "restore it to go on with this run, or start another one",
            )
            for key, field in (*_FIELD_OF.items(), ("fingerprint", self.source.field))
            if state.get(key) != getattr(self.source, key)
        ]

    def read(self, first: int) -> list[Batch]:
        """This rank's part of the update that begins with sample ``first``, without moving the loader."""
        rows = self.microbatches * self.micro_batch_size
        batches = []
        for step in range(self.gradient_accumulation_steps):
            start = first + (step * self.data_parallel_size + self.data_parallel_rank) * rows
            samples = self.source.batch(range(start, start + rows))
            batches.append(split_targets(samples, self.source.unsupervised_after))
        return batches

    def _faults(self) -> Iterator[Fault]:
        """What is wrong with the source and the sizes."""
        sizes = {
            "batch.global_batch_size": self.global_batch_size,
            "batch.micro_batch_size": self.micro_batch_size,
            "plan.gradient_accumulation_steps": self.gradient_accumulation_steps,
            "plan.microbatches": self.microbatches,
            "data_parallel_size": self.data_parallel_size,
        }
        small = [Fault(field, size, "must be at least 1") for field, size in sizes.items() if size < 1]
        yield from small
        if not 0 <= self.data_parallel_rank < self.data_parallel_size:
            rule = f"must be from 0 to data_parallel_size={self.data_parallel_size} less one"
            yield Fault("data_parallel_rank", self.data_parallel_rank, rule)
        if not len(self.source):
            rule = "has less than one window of training text"
            yield Fault(self.source.field, None, rule, "give more text")
        dealt = (
            self.micro_batch_size
            * self.data_parallel_size
            * self.gradient_accumulation_steps
            * self.microbatches
        )
        if not small and dealt != self.global_batch_size:
            rule = (
                f"must be micro_batch_size={self.micro_batch_size} x dp={self.data_parallel_size}"
                f" x gradient_accumulation_steps={self.gradient_accumulation_steps}"
                f" x microbatches={self.microbatches} = {dealt}"
            )
            yield Fault("batch.global_batch_size", self.global_batch_size, rule, f"use {dealt}")
