"""A rank of four that is killed for good, and two ranks that go on: what the claim ``elastic_restart`` is."""

from __future__ import annotations

import json
from pathlib import Path
from signal import SIGKILL

import pytest
from tiny_run import overrides
from trainer_jobs import TRACKER, Announced, Job, Resumed


def losses(folder: Path) -> list[float]:
    """The losses of a run's committed updates, each of which must be there once."""
    lines = (folder / "tiny-gpt" / "receipts.jsonl").read_text().splitlines()
    receipts = [json.loads(line) for line in lines]
    assert [receipt["step"] for receipt in receipts] == list(range(1, len(receipts) + 1))
    return [receipt["loss"] for receipt in receipts]


def go_on_with_two_of_four(folder: Path) -> None:
    """The survivors end by themselves, with one cause each; the losses are those of two ranks alone."""
    elastic = (
        *("plan.elastic=true", "plan.dp_shard=4", "checkpoint.every=2"),
        *("evaluation.every=0", "optimizer.decay_steps=1000"),
    )
    run = folder / "elastic" / "tiny-gpt"
    values = overrides(folder / "elastic", *elastic)
    four = Job(4, run, [*values, "run.steps=1000000"], folder)
    assert isinstance(four.listen(), Resumed), four.output()
    assert isinstance(four.listen(), Announced), four.output()
    four.kill(3)
    assert four.join() == [1, 1, 1, -SIGKILL]
    causes = [line for line in four.output(lines=10_000).splitlines() if "another rank died" in line]
    assert len(causes) == 3, four.output(lines=10_000)

    newest = int((run / "checkpoints" / TRACKER).read_text())
    steps = f"run.steps={newest + 3}"
    two = Job(2, run, [*values, steps], folder)
    assert two.join() == [0, 0], two.output()
    assert "planned for 2 ranks: dp_shard=2 (was 4), microbatches=2 (was 1)" in two.output(lines=10_000)
    assert two.heard[0].step >= newest

    reference = Job(2, folder / "alone" / "tiny-gpt", overrides(folder / "alone", *elastic, steps), folder)
    assert reference.join() == [0, 0], reference.output()
    assert losses(folder / "elastic") == pytest.approx(losses(folder / "alone"), rel=1e-5, abs=0)
