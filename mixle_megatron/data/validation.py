"""A fixed set of held-out batches, dealt to data-parallel ranks so that no plan changes the loss."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mixle_megatron.data.loader import IGNORED, Batch, split_targets
from mixle_megatron.data.source import SampleSource
from mixle_megatron.errors import Fault, refuse_if_any


class ValidationBatches:
    """This rank's part of ``batches`` micro-batches of the validation split.

    The set is min(batches * micro_batch_size, len(source)) samples, spread evenly over the split from
    its first on, the same at every evaluation. They are cut into micro-batches in order and dealt as
    the training loader deals: with D ranks and M microbatches a call, micro-batch (k * D + r) * M + m
    is microbatch m of call k on rank r.

    Every rank iterates the same number of calls, all of one shape, as evaluation is collective. Where
    samples run out, rows of zeros with all targets -100 fill up: they are not supervised, so the mean
    over supervised targets is that of the samples alone.

    Args:
        source: the samples, normally ``TokenStreams.validation_windows()``; it may be empty.
        batches: micro-batches in the set, at least 0.
        micro_batch_size: samples of a micro-batch.
        data_parallel_rank: this rank among D, r.
        data_parallel_size: D.
        microbatches: micro-batches a call, M; 1 wastes the least padding.

    Raises:
        Refused: a number is out of range.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        batches: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        microbatches: int = 1,
    ) -> None:
        least = {
            "evaluation.batches": (batches, 0),
            "batch.micro_batch_size": (micro_batch_size, 1),
            "data_parallel_size": (data_parallel_size, 1),
            "plan.microbatches": (microbatches, 1),
            "data_parallel_rank": (data_parallel_rank, 0),
        }
        faults = [
            Fault(field, value, f"must be at least {least}")
            for field, (value, least) in least.items()
            if value < least
        ]
        if data_parallel_rank >= data_parallel_size >= 1:
            rule = f"must be below data_parallel_size={data_parallel_size}"
            faults.append(Fault("data_parallel_rank", data_parallel_rank, rule))
        refuse_if_any(faults)
        self.source = source
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.microbatches = microbatches
        self.num_samples = min(batches * micro_batch_size, len(source))

    @property
    def num_tokens(self) -> int:
        """Targets of one evaluation, over all ranks, but for what follows the end of a document."""
        return self.num_samples * self.source.sequence_length

    def __len__(self) -> int:
        """Calls of one evaluation, the same on every rank; 0 if there is nothing to evaluate on."""
        a_call = self.micro_batch_size * self.microbatches * self.data_parallel_size
        return -(-self.num_samples // a_call)

    def __iter__(self) -> Iterator[Batch]:
        """Each call's (inputs, targets): int64, shape (microbatches * micro_batch_size, S)."""
        rows = self.microbatches * self.micro_batch_size
        for call in range(len(self)):
            first = (call * self.data_parallel_size + self.data_parallel_rank) * rows
            yield self._padded(range(first, min(first + rows, self.num_samples)), rows)

    def _padded(self, places: range, rows: int) -> Batch:
        """The samples at ``places`` of the set, filled up to ``rows`` rows that are not supervised."""
        length = len(self.source)
        inputs = np.zeros((rows, self.source.sequence_length), dtype=np.int64)
        targets = np.full_like(inputs, IGNORED)
        if places:
            indices = [place * length // self.num_samples for place in places]
            rows_of_samples = split_targets(self.source.batch(indices), self.source.unsupervised_after)
            inputs[: len(places)], targets[: len(places)] = rows_of_samples
        return inputs, targets
