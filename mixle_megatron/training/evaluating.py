"""Evaluating a run's validation sets: loss, perplexity and bits a byte of each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mixle_megatron.config.schema import Config
from mixle_megatron.data import ValidationBatches, ValidationSet
from mixle_megatron.session import MegatronSession

_LARGEST_EXPONENT = 700.0  # of e, among the numbers that JSON and floats can hold


@dataclass(frozen=True)
class SetEvaluation:
    """How a model does on one set.

    Attributes:
        name: of the set.
        loss: mean over the supervised tokens, in nats.
        tokens: how many.
        bytes_per_token: of the set's text, on average; None where not known.
    """

    name: str
    loss: float
    tokens: int
    bytes_per_token: float | None

    @property
    def perplexity(self) -> float | None:
        """e to the loss; None where that is no number."""
        return math.exp(self.loss) if self.loss < _LARGEST_EXPONENT else None

    @property
    def bits_per_byte(self) -> float | None:
        """Bits that a byte of the text takes; None where the text's length is not known."""
        return None if self.bytes_per_token is None else self.loss / math.log(2) / self.bytes_per_token

    def as_dict(self) -> dict[str, Any]:
        """The line that ``evaluations.jsonl`` has, but for the step."""
        return {
            "set": self.name,
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
        }

    def __str__(self) -> str:
        words = [f"{self.name} loss {self.loss:.4f}"]
        if self.perplexity is not None:
            words.append(f"perplexity {self.perplexity:.2f}")
        if self.bits_per_byte is not None:
            words.append(f"{self.bits_per_byte:.4f} bits/byte")
        return "  ".join(words)


class Evaluations:
    """The validation sets of a run, each a fixed number of samples that no plan changes.

    Args:
        config: of the run.
        sets: what to evaluate on.
        session: what to evaluate with.
    """

    def __init__(self, config: Config, sets: Iterable[ValidationSet], session: MegatronSession) -> None:
        self._session = session
        self._sets = [(each, _batches(config, each, session)) for each in sets]

    def __len__(self) -> int:
        """How many sets have something to evaluate on."""
        return sum(1 for _, batches in self._sets if len(batches))

    def run(self) -> list[SetEvaluation]:
        """Evaluate every set. Collective."""
        return [self._one(each, batches) for each, batches in self._sets if len(batches)]

    def _one(self, each: ValidationSet, batches: ValidationBatches) -> SetEvaluation:
        found = [self._session.evaluate(inputs, targets) for inputs, targets in batches]
        tokens = sum(evaluation.tokens for evaluation in found)
        loss = sum(evaluation.loss_sum for evaluation in found) / max(tokens, 1)
        return SetEvaluation(each.name, loss, tokens, each.bytes_per_token)


def _batches(config: Config, each: ValidationSet, session: MegatronSession) -> ValidationBatches:
    batch = config.batch
    return ValidationBatches(
        each.source,
        batches=config.evaluation.batches * batch.global_batch_size // batch.micro_batch_size,
        micro_batch_size=batch.micro_batch_size,
        data_parallel_rank=session.data_parallel_rank,
        data_parallel_size=session.data_parallel_size,
        microbatches=session.plan.microbatches,
    )
