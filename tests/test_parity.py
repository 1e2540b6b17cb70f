"""One seed, one curve: a plan changes where the numbers live, not what they are.

Every test compares losses and gradient norms: a missing reduction of sequence parallelism shows in
the first norm, and in the losses only later. Norms are compared in the first two updates, as those
of two correct plans drift apart afterwards.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import reference_gpt
import torch
from small_gpts import OPTIMIZERS, VOCABULARY, global_batch, section, session, train_update, whole_weights

UPDATES = 10
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4

Curve = list[tuple[float, float]]

PLANS: dict[str, dict[str, int]] = {
    "dp_replicate=2": {"dp_replicate": 2},
    "dp_shard=2": {"dp_shard": 2},
    "dp_replicate=2 dp_shard=2": {"dp_replicate": 2, "dp_shard": 2},
    "tp=2": {"tp": 2},
    "pp=2": {"pp": 2},
    "tp=2 pp=2": {"tp": 2, "pp": 2},
    "tp=2 dp_shard=2": {"tp": 2, "dp_shard": 2},
    "pp=2 dp_shard=2": {"pp": 2, "dp_shard": 2},
}

# plan, optimizer, microbatches, accumulation steps, how the batch is cut over data-parallel ranks
CASES = [
    ("dp_replicate=2", "adam", 1, 1, "even"),
    ("dp_replicate=2", "sgd", 4, 3, "uneven"),
    ("dp_replicate=2", "adam", 4, 1, "idle"),
    ("dp_shard=2", "adam", 4, 3, "even"),
    ("dp_shard=2", "sgd", 1, 1, "uneven"),
    ("dp_shard=2", "sgd", 1, 3, "idle"),
    ("dp_replicate=2 dp_shard=2", "adam", 1, 3, "uneven"),
    ("dp_replicate=2 dp_shard=2", "sgd", 4, 1, "even"),
    ("dp_replicate=2 dp_shard=2", "adam", 1, 1, "idle"),
    ("tp=2", "adam", 4, 1, "even"),
    ("tp=2", "sgd", 1, 3, "even"),
    ("pp=2", "adam", 4, 3, "even"),
    ("pp=2", "sgd", 1, 1, "even"),
    ("tp=2 pp=2", "adam", 4, 1, "even"),
    ("tp=2 pp=2", "sgd", 1, 3, "even"),
    ("tp=2 dp_shard=2", "adam", 1, 3, "uneven"),
    ("tp=2 dp_shard=2", "sgd", 4, 1, "even"),
    ("tp=2 dp_shard=2", "adam", 1, 1, "idle"),
    ("pp=2 dp_shard=2", "adam", 4, 1, "uneven"),
    ("pp=2 dp_shard=2", "sgd", 1, 3, "even"),
    ("pp=2 dp_shard=2", "adam", 4, 3, "idle"),
]


def train(variant: str, optimizer: str, shape: str, precision: str, sizes: dict[str, int]) -> Curve:
    """Loss and gradient norm of ten updates."""
    with session(variant, optimizer, precision=precision, **sizes) as opened:
        receipts = [train_update(opened, update, shape) for update in range(UPDATES)]
    assert [receipt.step for receipt in receipts] == list(range(1, UPDATES + 1))
    return [(receipt.loss, receipt.extra["grad_norm"]) for receipt in receipts]


def initial_weights(variant: str) -> dict[str, torch.Tensor]:
    """What the model starts from, on one rank."""
    with session(variant) as opened:
        return whole_weights(opened)


def padding_after_training(variant: str, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """After two updates, this rank's rows of the vocabulary that no token has."""
    with session(variant, "adam_scheduled", **sizes) as opened:
        for update in range(2):
            train_update(opened, update)
        rows = -(-VOCABULARY // opened.plan.tp)
        padding = max(0, rows * (opened.coordinate["tp"] + 1) - VOCABULARY)
        return {
            name: parameter[rows - padding :].detach().clone()
            for name, parameter in opened.module.named_parameters()
            if name.endswith(("word_embeddings.weight", "output_layer.weight"))
        }


def optimizer_dtypes(sizes: dict[str, int]) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """The dtypes of a bf16 session's model and of what its optimizer updates, state included."""
    with session(precision="bf16", **sizes) as opened:
        train_update(opened, 0)
        model = {parameter.dtype for parameter in opened.module.parameters()}
        updated = set()
        for part in opened.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                updated |= {parameter.dtype for parameter in group["params"]}
            for state in part.optimizer.state.values():
                updated |= {tensor.dtype for tensor in state.values()}
        return model, updated


@pytest.fixture(scope="module")
def curve(run_on):
    """``curve(variant, optimizer, ...)``: ten updates under a plan, each asked for once."""
    known: dict[Any, Curve] = {}

    def ask(
        variant: str, optimizer: str, shape: str = "even", precision: str = "fp32", **sizes: int
    ) -> Curve:
        key = (variant, optimizer, shape, precision, *sorted(sizes.items()))
        if key not in known:
            ranks = 1
            for axis in ("dp_replicate", "dp_shard", "tp", "pp"):
                ranks *= sizes.get(axis, 1)
            answers = run_on(ranks, train, variant, optimizer, shape, precision, sizes)
            assert all(answer == answers[0] for answer in answers), "ranks report different curves"
            known[key] = answers[0]
        return known[key]

    return ask


def assert_same_curve(actual: Curve, expected: Curve) -> None:
    """Every loss, and the norms of the first two updates."""
    losses, norms = zip(*actual, strict=True)
    expected_losses, expected_norms = zip(*expected, strict=True)
    assert losses == pytest.approx(expected_losses, rel=LOSS_TOLERANCE, abs=0)
    assert norms[:2] == pytest.approx(expected_norms[:2], rel=NORM_TOLERANCE, abs=0)


def test_cases_cover_every_pair_of_choices() -> None:
    choices = [list(PLANS), ["adam", "sgd"], [1, 4], [1, 3], ["even", "uneven", "idle"]]
    for first, second in ((a, b) for a in range(5) for b in range(a + 1, 5)):
        for pair in product(choices[first], choices[second]):
            one_replica = "dp" not in str(pair[0]) and first == 0 and second == 4
            if not (one_replica and pair[1] != "even"):
                assert pair in {(case[first], case[second]) for case in CASES}, pair


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adam_scheduled", "adam_l2"])
def test_one_rank_is_the_plain_float64_model_under_each_optimizer(run_on, curve, optimizer: str) -> None:
    assert_one_rank_is_the_reference(run_on, curve, "gpt2", optimizer)


@pytest.mark.parametrize("variant", ["gpt2_untied", "llama", "qk_norm"])
def test_one_rank_is_the_plain_float64_model_for_each_kind_of_layer(run_on, curve, variant: str) -> None:
    assert_one_rank_is_the_reference(run_on, curve, variant, "adam")


def assert_one_rank_is_the_reference(run_on, curve, variant: str, optimizer: str) -> None:
    """Against :mod:`reference_gpt` from the same weights."""
    (weights,) = run_on(1, initial_weights, variant)
    batches = [global_batch(update) for update in range(UPDATES)]
    expected = reference_gpt.train(weights, section(variant), OPTIMIZERS[optimizer], batches)
    assert_same_curve(curve(variant, optimizer), expected)


@pytest.mark.parametrize(("plan", "optimizer", "microbatches", "accumulation", "shape"), CASES)
def test_plan_has_the_curve_of_one_rank(
    curve, plan: str, optimizer: str, microbatches: int, accumulation: int, shape: str
) -> None:
    batch = {"microbatches": microbatches, "gradient_accumulation_steps": accumulation}
    actual = curve("gpt2", optimizer, shape, **PLANS[plan], **batch)
    assert_same_curve(actual, curve("gpt2", optimizer))


@pytest.mark.parametrize(
    ("variant", "plan"),
    [
        ("llama", "tp=2"),
        ("llama", "pp=2"),
        ("llama_tied", "tp=2 pp=2"),
        ("gpt2_untied", "tp=2"),
        ("gpt2_untied", "pp=2"),
        ("qk_norm", "tp=2"),
    ],
)
def test_kind_of_layer_has_the_curve_of_one_rank(curve, variant: str, plan: str) -> None:
    actual = curve(variant, "adam", microbatches=2, **PLANS[plan])
    assert_same_curve(actual, curve(variant, "adam"))


@pytest.mark.parametrize("plan", ["dp_shard=2", "tp=2 pp=2"])
def test_decay_clipping_and_schedule_do_not_depend_on_the_plan(curve, plan: str) -> None:
    assert_same_curve(curve("gpt2", "adam_scheduled", **PLANS[plan]), curve("gpt2", "adam_scheduled"))


@pytest.mark.parametrize("variant", ["gpt2_recompute_full", "gpt2_recompute_selective"])
@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_recomputed_activations_give_the_same_curve(curve, variant: str, plan: str) -> None:
    actual = curve(variant, "adam", microbatches=4, **PLANS[plan])
    assert_same_curve(actual, curve("gpt2", "adam"))


@pytest.mark.parametrize("variant", ["gpt2", "llama"])
def test_padded_rows_of_the_vocabulary_stay_exactly_zero(run_on, variant: str) -> None:
    first, last = run_on(2, padding_after_training, variant, {"tp": 2})
    assert all(rows.shape[0] == 0 for rows in first.values())
    assert all(rows.shape[0] == 1 and not rows.any() for rows in last.values())


@pytest.mark.parametrize("plan", ["dp_shard=2", "tp=2 pp=2"])
def test_bf16_stays_within_one_percent_of_fp32(curve, plan: str) -> None:
    losses = [loss for loss, _ in curve("gpt2", "adam", precision="bf16", **PLANS[plan])]
    assert losses == pytest.approx([loss for loss, _ in curve("gpt2", "adam")], rel=0.01)


def test_bf16_updates_fp32_main_parameters(run_on) -> None:
    for model, updated in run_on(2, optimizer_dtypes, {"dp_shard": 2}):
        assert model == {torch.bfloat16}
        assert updated == {torch.float32}
