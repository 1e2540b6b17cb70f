"""What the replicas of a model tell each other at each call: sums, and what each is doing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from mixle_megatron.microbatches import Batch
from mixle_megatron.process_groups import MegatronGroups
from mixle_megatron.receipts import Sums

TRAINING, EVALUATING, WAITING = range(3)


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
            loss: summed loss of the batch, where this rank speaks for its replica.
        """
        kinds = [0.0, 0.0, 0.0]
        seen = [0.0, 0.0, 0.0]
        if self._groups.speaks_for_replica:
            kinds[doing] = 1.0
            if batch is not None:
                seen = [loss, float(batch.tokens), float(batch.examples)]
        total_loss, tokens, examples, *counts = self.sum(*seen, *kinds)
        local = (batch.examples, batch.tokens) if batch is not None else (0, 0)
        sums = Sums(*local, int(examples), int(tokens), total_loss)
        return Exchanged(sums, (int(counts[0]), int(counts[1]), int(counts[2])))

    def sum(self, *values: float) -> tuple[float, ...]:
        """Sum numbers over every rank, in float64."""
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return tuple(total.tolist())
