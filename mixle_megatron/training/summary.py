"""The table that ends a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mixle_megatron.rules.data import HELD_OUT

_LAST = 10


@dataclass(frozen=True)
class Summary:
    """What a run came to.

    Losses are in nats a token; entropies in nats a byte, of the text that was trained on: what the
    best model of single bytes, and of pairs of bytes, would reach; None where the tokens are no bytes.
    """

    steps: int
    first_loss: float | None
    last_loss: float | None
    mean_of_last: float | None
    validation_loss: float | None
    unigram_entropy: float | None
    bigram_entropy: float | None
    tokens: int
    seconds: float
    checkpoint: Path | None


def losses_of(receipts: Path) -> list[tuple[float, int]]:
    """Loss and tokens of each committed step of a run, from its receipts."""
    if not receipts.exists():
        return []
    lines = map(json.loads, receipts.read_text(encoding="utf-8").splitlines())
    return [(line["loss"], line["global_tokens"]) for line in lines]


def last_evaluation(evaluations: Path) -> float | None:
    """The newest loss of what the data section holds out; None if there is none."""
    lines = evaluations.read_text(encoding="utf-8").splitlines() if evaluations.exists() else []
    found = [json.loads(line) for line in lines]
    return next((each["loss"] for each in reversed(found) if each.get("set", HELD_OUT) == HELD_OUT), None)


def mean_of_last(losses: list[tuple[float, int]]) -> float | None:
    """Mean loss of the last ten steps."""
    last = [loss for loss, _ in losses[-_LAST:]]
    return sum(last) / len(last) if last else None


def print_summary(title: str, summary: Summary) -> None:
    """Print the table on stdout."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in _rows(summary):
        table.add_row(name, value)
    Console().print(table)


def _rows(summary: Summary) -> list[tuple[str, str]]:
    def nats(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f} nats"

    rows = [
        ("steps", str(summary.steps)),
        ("first loss", nats(summary.first_loss)),
        ("last loss", nats(summary.last_loss)),
        (f"mean of the last {_LAST}", nats(summary.mean_of_last)),
        ("validation loss", nats(summary.validation_loss)),
        ("tokens", f"{summary.tokens:,}"),
        ("time", f"{summary.seconds:.1f} s"),
        ("checkpoint", str(summary.checkpoint) if summary.checkpoint else "none"),
    ]
    if summary.unigram_entropy is not None:
        entropies = [("unigram", summary.unigram_entropy), ("bigram", summary.bigram_entropy)]
        rows[5:5] = [(f"the text's byte {kind} entropy", nats(entropy)) for kind, entropy in entropies]
    return rows
