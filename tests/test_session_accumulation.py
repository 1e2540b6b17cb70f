"""What a call adds to an update and what it leaves alone: accumulation, evaluation, empty batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_gpts import ROWS, global_batch, session, train_update
from snapshots import differences, snapshot


def accumulate_three() -> tuple[list[Any], list[list[str]]]:
    """Receipts of an update of three calls, and what each of the calls changed."""
    inputs, targets = global_batch(0)
    receipts, changes = [], []
    with session(gradient_accumulation_steps=3) as opened:
        for part in zip(inputs.chunk(3), targets.chunk(3), strict=True):
            before = snapshot(opened)
            receipts.append(opened.train_batch(*part))
            changes.append(differences(before, snapshot(opened)))
    return receipts, changes


def test_accumulating_calls_are_skipped_with_a_reason_and_change_nothing(run_on) -> None:
    ((receipts, changes),) = run_on(1, accumulate_three)
    assert [receipt.skipped for receipt in receipts] == [True, True, False]
    assert [receipt.step for receipt in receipts] == [0, 0, 1]
    assert [receipt.extra.get("reason") for receipt in receipts] == [*["gradient_accumulation"] * 2, None]
    assert [receipt.accumulation_steps for receipt in receipts] == [1, 2, 3]
    assert [receipt.local_examples for receipt in receipts] == [ROWS // 3, ROWS // 3, ROWS]
    assert receipts[2].extra["partial_accumulation"] is False
    assert changes[:2] == [[], []]
    assert changes[2]


def finish_early() -> tuple[Any, Any, Any, list[str]]:
    """Commit one call of three, and the same batch where an update is one call."""
    inputs, targets = global_batch(0)
    with session() as opened:
        opened.train_batch(inputs, targets)
        expected = snapshot(opened)
    with session(gradient_accumulation_steps=3) as opened:
        nothing = opened.finish_accumulation()
        opened.train_batch(inputs, targets)
        receipt = opened.finish_accumulation()
        return nothing, receipt, opened.finish_accumulation(), differences(expected, snapshot(opened))


def test_finish_accumulation_commits_what_is_there(run_on) -> None:
    ((before, receipt, after, changed),) = run_on(1, finish_early)
    assert before is None
    assert after is None
    assert not receipt.skipped
    assert (receipt.step, receipt.accumulation_steps) == (1, 1)
    assert receipt.extra["partial_accumulation"] is True
    assert changed == []


def discard_and_train(sizes: dict[str, int]) -> tuple[Any, Any, list[str], list[str]]:
    """Discard a pending batch, then train another; a session that never saw the first does as well."""
    with session(gradient_accumulation_steps=2, **sizes) as opened:
        nothing = opened.discard_accumulation()
        before = snapshot(opened)
        opened.train_batch(*global_batch(7))
        receipt = opened.discard_accumulation()
        changed = differences(before, snapshot(opened))
        train_update(opened, 0)
        actual = snapshot(opened)
    with session(gradient_accumulation_steps=2, **sizes) as opened:
        train_update(opened, 0)
        return nothing, receipt, changed, differences(snapshot(opened), actual)


def test_discard_accumulation_leaves_no_trace(run_on) -> None:
    for nothing, receipt, changed, later in run_on(2, discard_and_train, {"tp": 2}):
        assert nothing is None
        assert receipt.skipped
        assert receipt.extra["reason"] == "explicit_accumulation_discard"
        assert (receipt.step, receipt.accumulation_steps) == (0, 1)
        assert receipt.loss > 0
        assert changed == []
        assert later == []


def evaluate_between(sizes: dict[str, int]) -> dict[str, Any]:
    """Evaluate before an update and while one is pending; train the same without."""
    inputs, targets = global_batch(0)
    with session("gpt2", gradient_accumulation_steps=2, microbatches=2, **sizes) as opened:
        train_update(opened, 0)
        expected = snapshot(opened)
    with session("gpt2", gradient_accumulation_steps=2, microbatches=2, **sizes) as opened:
        before = snapshot(opened)
        evaluation = opened.evaluate(inputs, targets)
        changed = differences(before, snapshot(opened))
        opened.train_batch(inputs[:6], targets[:6])
        opened.evaluate(*global_batch(3))
        receipt = opened.train_batch(inputs[6:], targets[6:])
        later = differences(expected, snapshot(opened))
    replicas = opened.data_parallel_size
    return {
        "changed": changed,
        "later": later,
        "losses": (evaluation.loss, receipt.loss),
        "counts": (evaluation.tokens // replicas, evaluation.examples // replicas),
    }


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}], ids=str)
def test_evaluate_gives_the_training_loss_and_changes_nothing(run_on, sizes: dict[str, int]) -> None:
    supervised = int((global_batch(0)[1] != -100).sum())
    for answer in run_on(2, evaluate_between, sizes):
        evaluated, trained = answer["losses"]
        assert evaluated == pytest.approx(trained, rel=1e-6)
        assert answer["counts"] == (supervised, ROWS)
        assert answer["changed"] == []
        assert answer["later"] == []


def dropout_off_in_evaluation() -> tuple[float, float, bool, list[str]]:
    """Evaluate twice with dropout: the same number, and no number drawn."""
    with session("gpt2_dropout") as opened:
        before = snapshot(opened)
        first, second = (opened.evaluate(*global_batch(0)).loss for _ in range(2))
        return first, second, opened.module.training, differences(before, snapshot(opened))


def test_evaluation_has_no_dropout(run_on) -> None:
    ((first, second, training, changed),) = run_on(1, dropout_off_in_evaluation)
    assert first == second
    assert training
    assert changed == []


def train_on_nothing(sizes: dict[str, int], what: str) -> tuple[Any, list[str], Any]:
    """A batch without a supervised target, or without a row, then a good one."""
    inputs, targets = global_batch(0)
    with session(**sizes) as opened:
        train_update(opened, 0)
        before = snapshot(opened)
        empty = (inputs, torch.full_like(targets, -100)) if what == "targets" else (inputs[:0], targets[:0])
        receipt = opened.train_batch(*empty)
        changed = differences(before, snapshot(opened))
        return receipt, changed, train_update(opened, 1)


@pytest.mark.parametrize("what", ["targets", "rows"])
def test_batch_that_supervises_nothing_is_skipped_without_a_change(run_on, what: str) -> None:
    for receipt, changed, later in run_on(2, train_on_nothing, {"pp": 2}, what):
        assert receipt.skipped
        assert receipt.extra["reason"] == "no_supervised_tokens"
        assert (receipt.step, receipt.global_tokens, receipt.loss) == (1, 0, 0.0)
        assert changed == []
        assert (later.step, later.skipped) == (2, False)


def train_on_a_broken_model() -> tuple[Any, Any, list[str]]:
    """A model that computes no number, after one update that did."""
    with session(dp_shard=2) as opened:
        good = train_update(opened, 0)
        with torch.no_grad():
            opened.module.decoder.final_layernorm.weight.fill_(float("inf"))
        before = snapshot(opened)
        receipt = train_update(opened, 1)
        return good, receipt, differences(before, snapshot(opened))


def test_loss_that_is_no_number_is_skipped_on_every_rank(run_on) -> None:
    for good, receipt, changed in run_on(2, train_on_a_broken_model):
        assert receipt.skipped
        assert receipt.extra["reason"] == "non_finite_loss"
        assert receipt.extra["loss_is_last_finite"]
        assert receipt.loss == good.loss
        assert receipt.step == 1
        assert changed == []
