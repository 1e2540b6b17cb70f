"""What the replicas of a model tell each other at each call: sums, and what each is doing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from mixle_megatron.errors import SessionError
from mixle_megatron.microbatches import Batch
from mixle_megatron.process_groups import MegatronGroups
from mixle_megatron.receipts import Sums

TRAINING, EVALUATING, WAITING = range(3)

PADDED = (
    "a batch of a replica has no rows, or not equally many in each microbatch: padding it would count in "
    "the experts' auxiliary losses and capacities; give every replica a multiple of plan.microbatches rows"
)


@dataclass(frozen=True)
class Exchanged:
    """What one exchange came to, the same on every rank but for the local sums.

    Attributes:
        sums: what was seen, on this replica and on all of them.
        doing: how many replicas were training, evaluating and waiting.
    """

    sums: Sums
    doing: tuple[int, int, int]

    def all_are(self, doing: int) -> bool:
        """Whether no replica does anything else."""
        return sum(self.doing) == self.doing[doing]


class Replicas:
    """All the ranks of a session, as the replicas of a model that they make up."""

    def __init__(self, groups: MegatronGroups, device: torch.device) -> None:
        self._groups = groups
        self._device = device

    def exchange(self, doing: int, batch: Batch | None = None, loss: float = 0.0) -> Exchanged:
        """Sum a call over the world in one all-reduce; each replica speaks through one of its ranks.

        Args:
            doing: what this replica does.
            batch: what it does it on, if anything.
            loss: summed loss of what this rank saw of the batch; only where it adds to the replica's.
        """
        kinds = [0.0, 0.0, 0.0]
        seen = [loss if self._groups.adds_loss else 0.0, 0.0, 0.0]
        if self._groups.speaks_for_replica:
            kinds[doing] = 1.0
            if batch is not None:
                seen[1:] = [float(batch.tokens), float(batch.examples)]
        total_loss, tokens, examples, *counts = self.sum(*seen, *kinds)
        local = (batch.examples, batch.tokens) if batch is not None else (0, 0)
        sums = Sums(*local, int(examples), int(tokens), total_loss)
        return Exchanged(sums, (int(counts[0]), int(counts[1]), int(counts[2])))

    def agree(self, doing: int, batch: Batch | None, *, alike: bool) -> None:
        """Make sure, before any of them computes, that what the replicas are about to do can be done.

        Args:
            doing: what this replica does.
            batch: what it does it on, if anything.
            alike: whether all of them have to do it on batches of one shape, as they exchange tokens.

        Raises:
            SessionError: on every rank, where it cannot.
        """
        shape = [0, 0, 0] if batch is None else [len(batch.microbatches), batch.rows, batch.sequence]
        own = [doing, *shape, int(batch is not None and batch.is_padded)]
        ends = torch.tensor([*own, *(-value for value in own)], dtype=torch.int64, device=self._device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        most, least = ends.tolist()[: len(own)], [-value for value in ends.tolist()[len(own) :]]
        if most[-1]:
            raise SessionError(PADDED)
        if alike and most != least:
            raise SessionError(
                f"replicas exchange tokens under plan.ep, but their batches differ: between {least[1:4]} "
                f"and {most[1:4]} (microbatches, rows, sequence), or some have none left; give every "
                "replica as many batches of the same shape"
            )

    def sum(self, *values: float) -> tuple[float, ...]:
        """Sum numbers over every rank, in float64."""
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return tuple(total.tolist())
