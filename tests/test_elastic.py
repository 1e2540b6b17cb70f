"""Elastic runs: planned for the ranks that are there with the same global batch; and what a lost rank leaves.

That two of four ranks go on is a claim, and runs with the others in ``test_claims``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_run import CONFIG

from mixle_megatron.config.elastic import replanned
from mixle_megatron.config.load import check_config, load_config
from mixle_megatron.config.schema import effective_plan
from mixle_megatron.errors import RanksLost, Refused
from mixle_megatron.training.lost_ranks import naming_lost_ranks

MOE = CONFIG.parent / "tiny_moe_cpu.yaml"
DIVISORS = st.sampled_from([1, 2, 3, 4, 6, 8, 12])


@settings(deadline=None, max_examples=60)
@given(
    world=st.integers(1, 64),
    plan=st.fixed_dictionaries(
        {
            "dp_replicate": st.sampled_from([1, 2, 4]),
            "dp_shard": DIVISORS,
            "tp": st.sampled_from([1, 2]),
            "pp": st.sampled_from([1, 2]),
            "ep": st.sampled_from([1, 2, 4]),
            "gradient_accumulation_steps": st.sampled_from([1, 2, 3]),
        }
    ),
    batch=st.sampled_from([24, 48, 96]),
)
def test_a_plan_for_the_ranks_that_are_there_keeps_the_batch_or_names_worlds_that_do(
    world: int, plan: dict[str, int], batch: int
) -> None:
    values = [f"plan.{name}={value}" for name, value in plan.items()]
    sizes = [f"batch.global_batch_size={batch}", "batch.micro_batch_size=2"]
    loaded = load_config(MOE, ["plan.elastic=true", *values, *sizes])
    try:
        planned = replanned(loaded, world)
    except Refused as refused:
        (fault,) = refused.faults
        named = [int(word) for word in fault.remedy.replace(",", "").split() if word.isdigit()]
        assert named
        for other in named:
            assert not check_config(replanned(loaded, other), world_size=other)
        return
    if planned is loaded:
        return
    found = effective_plan(planned.config)
    assert not check_config(planned, world_size=world)
    assert found.world_size == world
    assert (found.tp, found.pp, found.ep) == (plan["tp"], plan["pp"], plan["ep"])
    calls = found.gradient_accumulation_steps * found.microbatches
    assert 2 * found.data_parallel_size * calls == batch


def test_a_plan_that_is_not_elastic_stays_as_it_is() -> None:
    loaded = load_config(CONFIG, ["plan.dp_shard=4"])
    assert replanned(loaded, 2) is loaded


def test_a_world_that_cannot_share_the_batch_is_refused_with_the_nearest_that_can() -> None:
    loaded = load_config(CONFIG, ["plan.elastic=true", "plan.dp_shard=4"])
    with pytest.raises(Refused) as caught:
        replanned(loaded, 3)
    assert "batch.global_batch_size=16 in microbatches of 4" in str(caught.value)
    assert "start 1, 2 or 4 ranks" in str(caught.value)


def without_the_other(timeout: float) -> str:
    """What the first rank says of an exchange that the second, which lives, never joins."""
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    said = ""
    if dist.get_rank() == 0:
        with pytest.raises(RanksLost) as caught, naming_lost_ranks():
            dist.all_reduce(torch.zeros(1), group=group)
        said = str(caught.value)
    dist.barrier()
    return said


def test_a_rank_that_hangs_is_named_as_one_that_died_is_within_the_timeout(run_on: Any) -> None:
    said = run_on(2, without_the_other, 1.0)[0]
    assert "rank 0 of 2 stops: another rank died, or did not answer within host.timeout_minutes" in said


def test_what_is_no_loss_of_a_rank_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="shape") as caught, naming_lost_ranks():
        torch.zeros(2).view(3)
    assert not isinstance(caught.value, RanksLost)
