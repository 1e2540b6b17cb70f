"""Every plan of two and four ranks over the seven axes computes what one rank does."""

from __future__ import annotations

from typing import Any

import pytest
from plan_matrix import MODELS, every_plan, plan_name, train, world_size

LOSS_TOLERANCE = {"dense": 1e-5, "mixture": 1e-4}
NORM_TOLERANCE = 1e-4

CASES = [
    pytest.param(model, plan, id=f"{model}: {plan_name(plan)}")
    for model, experts in (("dense", False), ("mixture", True))
    for ranks in (2, 4)
    for plan in every_plan(ranks, experts=experts)
]


@pytest.fixture(scope="module")
def one_rank(run_on: Any) -> dict[str, list[dict[str, Any]]]:
    """What each model does on one rank."""
    return {name: run_on(1, train, model, {})[0] for name, model in MODELS.items()}


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_plan_trains_as_one_rank_does(
    run_on: Any, one_rank: dict[str, Any], model: str, plan: dict[str, int]
) -> None:
    results = run_on(world_size(plan), train, MODELS[model], plan)
    assert all(result == results[0] for result in results), "ranks report different updates"
    assert_same(results[0], one_rank[model], LOSS_TOLERANCE[model])


def assert_same(actual: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float) -> None:
    """Losses, the first two gradient norms, tokens, and to the last one where every token went."""
    for key in ("tokens", "routing"):
        assert [update[key] for update in actual] == [update[key] for update in expected], key
    assert [update["loss"] for update in actual] == pytest.approx(
        [update["loss"] for update in expected], rel=tolerance, abs=0
    )
    norms = [update["grad_norm"] for update in actual[:2]]
    assert norms == pytest.approx([u["grad_norm"] for u in expected[:2]], rel=NORM_TOLERANCE, abs=0)
    for update, reference in zip(actual, expected, strict=True):
        assert (update["experts"] or {}) == pytest.approx(reference["experts"] or {}, rel=1e-4)


def test_the_plans_are_all_there_are() -> None:
    assert [len(list(every_plan(ranks, experts=False))) for ranks in (1, 2, 4)] == [1, 5, 15]
    assert [len(list(every_plan(ranks, experts=True))) for ranks in (1, 2, 4)] == [1, 11, 58]
