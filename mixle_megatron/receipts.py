"""The sums of an update while it accumulates, and the receipts made of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from mixle.utils.parallel.training_contracts import ParallelPlan, StepReceipt


@dataclass(frozen=True)
class Sums:
    """What was seen, on one replica (``local_*``) and on all of them.

    ``global_loss`` is the summed language-model loss in nats over ``global_tokens`` supervised
    targets.
    """

    local_examples: int = 0
    local_tokens: int = 0
    global_examples: int = 0
    global_tokens: int = 0
    global_loss: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.local_examples + other.local_examples,
            self.local_tokens + other.local_tokens,
            self.global_examples + other.global_examples,
            self.global_tokens + other.global_tokens,
            self.global_loss + other.global_loss,
        )

    @property
    def mean_loss(self) -> float:
        """Mean over the supervised tokens of all replicas; 0.0 where there are none."""
        return self.global_loss / max(self.global_tokens, 1)


@dataclass(frozen=True)
class PendingUpdate:
    """An update that some ``train_batch`` calls have added to and none has committed.

    Attributes:
        calls: how many did.
        sums: what they saw.
        forward_backward_seconds: how long they computed on this rank.
    """

    calls: int = 0
    sums: Sums = field(default_factory=Sums)
    forward_backward_seconds: float = 0.0

    def add(self, sums: Sums, seconds: float) -> PendingUpdate:
        """The same with one call more."""
        return replace(
            self,
            calls=self.calls + 1,
            sums=self.sums + sums,
            forward_backward_seconds=self.forward_backward_seconds + seconds,
        )


@dataclass(frozen=True)
class ReceiptMaker:
    """The fields that every receipt of a session shares."""

    plan: ParallelPlan
    precision: str
    optimizer: str

    def receipt(
        self,
        step: int,
        sums: Sums,
        *,
        calls: int,
        loss: float,
        skipped: bool,
        collective_bytes: int,
        extra: dict[str, Any],
    ) -> StepReceipt:
        """A receipt with the plan named in its ``extra``.

        ``step``, ``loss`` and the global counts are the same on every rank; the local counts are
        those of the rank's replica, bytes and seconds the rank's own.
        """
        return StepReceipt(
            step=step,
            loss=loss,
            local_examples=sums.local_examples,
            local_tokens=sums.local_tokens,
            microbatches=self.plan.microbatches,
            accumulation_steps=max(calls, 1),
            data_parallel_size=self.plan.data_parallel_size,
            optimizer=self.optimizer,
            precision=self.precision,
            collective_bytes=collective_bytes,
            skipped=skipped,
            extra={**extra, "plan": plan_name(self.plan)},
            global_examples_observed=sums.global_examples,
            global_tokens_observed=sums.global_tokens,
        )


def plan_name(plan: Any) -> str:
    """The axes larger than one, such as ``dp_shard=2 tp=2``, or ``one rank``."""
    sizes = {str(getattr(axis, "value", axis)): size for axis, size in plan.axis_sizes.items()}
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one rank"
