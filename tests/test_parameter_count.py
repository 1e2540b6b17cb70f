"""The closed form of a stage's parameters against what each rank of real stages holds."""

from __future__ import annotations

from math import prod

import pytest
import torch
from small_gpts import VARIANTS, parallel_plan, section, session

from mixle_megatron.config.schema import dimensions_of
from mixle_megatron.memory import parameter_count, total_parameters

MODELS = ["gpt2", "gpt2_untied", "llama", "llama_tied", "qk_norm"]
PLANS = [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}]


def held(variants: list[str], sizes: dict[str, int]) -> tuple[int, dict[str, int]]:
    """This rank's stage, and how many numbers it holds of each model."""
    count = {}
    for variant in variants:
        with session(variant, **sizes) as opened:
            count[variant] = sum(parameter.numel() for parameter in opened.module.parameters())
    return opened.coordinate["pp"], count


@pytest.mark.parametrize("sizes", [{}, *PLANS], ids=str)
def test_every_rank_holds_the_parameters_that_the_formula_says(run_on, sizes: dict[str, int]) -> None:
    plan = parallel_plan(**sizes)
    for stage, count in run_on(prod(sizes.values()), held, MODELS, sizes):
        for variant, parameters in count.items():
            dimensions = dimensions_of(section(variant), plan.tp)
            assert parameters == parameter_count(dimensions, plan, stage), variant


def test_total_counts_each_parameter_once(run_on) -> None:
    ((_, count),) = run_on(1, held, MODELS, {})
    assert count == {variant: total_parameters(dimensions_of(section(variant))) for variant in MODELS}
    assert set(MODELS) <= set(VARIANTS)
    assert torch.tensor(list(count.values())).unique().numel() == len(MODELS), "the models differ"
