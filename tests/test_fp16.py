"""fp16 and its loss scale: an overflow changes nothing else, on all ranks alike, and runs go on with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_gpts import OPTIMIZERS, SIZES, parallel_plan, section, train_update
from snapshots import differences, snapshot
from tiny_run import CONFIG, overrides
from typer.testing import CliRunner

from mixle_megatron.cli.main import app
from mixle_megatron.config.check import rule_faults
from mixle_megatron.config.load import load_config, warnings_of
from mixle_megatron.errors import Unsupported
from mixle_megatron.rules import schedule_faults

PLANS = [
    {},
    {"dp_shard": 2},
    {"dp_replicate": 2},
    {"tp": 2},
    {"pp": 2},
    {"cp": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "pp": 2},
]
ONE_HALVES = {"hysteresis": 1}
"""One overflow halves the scale at once."""

START = 1024.0
CLIMBING = ONE_HALVES | {"loss_scale_window": 1, "initial_loss_scale": START}
"""The scale doubles with every update, until gradients overflow by themselves."""


def session(plan: dict[str, int], precision: str = "fp16", **scale: float) -> Any:
    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.models.gpt import GPT

    return MegatronBackend().prepare(
        GPT(section("gpt2"), seed=1234),
        plan=parallel_plan(**plan),
        precision=precision,
        optimizer=replace(OPTIMIZERS["adam_scheduled"], **scale),
        device="cpu",
    )


def updates(
    plan: dict[str, int], number: int, precision: str = "fp16", **scale: float
) -> list[dict[str, Any]]:
    """What the receipts say; and of each skipped update, what of the session it changed."""
    seen = []
    with session(plan, precision, **scale) as opened:
        for update in range(number):
            before = snapshot(opened)
            receipt = train_update(opened, update)
            changed = differences(before, snapshot(opened)) if receipt.skipped else None
            seen.append(
                {
                    "step": receipt.step,
                    "skipped": receipt.skipped,
                    "reason": receipt.extra.get("reason"),
                    "loss": receipt.loss,
                    "loss_scale": receipt.extra["loss_scale"],
                    "grad_norm": receipt.extra["grad_norm"],
                    "changed": changed,
                }
            )
    return seen


def steps_of(skipped: list[bool]) -> list[int]:
    """The step clock after each update: it counts those that were not skipped."""
    return [sum(not each for each in skipped[: number + 1]) for number in range(len(skipped))]


def scales_of(skipped: list[bool], start: float) -> list[float]:
    """The scale of each update, by hand: doubled after one that was committed, else halved."""
    scales = [start]
    for each in skipped[:-1]:
        scales.append(scales[-1] / 2 if each else scales[-1] * 2)
    return scales


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_an_overflow_skips_the_update_halves_the_scale_and_changes_nothing_else(
    run_on: Any, plan: dict[str, int]
) -> None:
    results = run_on(parallel_plan(**plan).world_size, climb, plan)
    for result in results:
        skipped = [update["skipped"] for update in result]
        assert True in skipped[1:]
        assert False in skipped[skipped.index(True) :], "it goes on after the overflow"
        assert [update["loss_scale"] for update in result] == scales_of(skipped, START)
        assert [update["step"] for update in result] == steps_of(skipped)
        assert skipped == [update["skipped"] for update in results[0]], "ranks disagree"
        for update in result:
            assert update["reason"] == ("gradient_overflow" if update["skipped"] else None)
            assert update["changed"] == ([] if update["skipped"] else None)
            assert (update["grad_norm"] is None) == update["skipped"]


def climb(plan: dict[str, int]) -> list[dict[str, Any]]:
    """Updates under a scale that grows until it overflows."""
    return updates(plan, 10, **CLIMBING)


def first_updates(plan: dict[str, int], precision: str, scale: float) -> list[tuple[float, float]]:
    """Losses and gradient norms of three updates."""
    done = updates(plan, 3, precision, initial_loss_scale=scale)
    return [(update["loss"], update["grad_norm"]) for update in done]


@pytest.mark.parametrize("plan", [{}, {"tp": 2}, {"pp": 2}, {"dp_shard": 2, "cp": 2}], ids=str)
def test_losses_and_gradients_are_those_of_fp32_whatever_the_scale(run_on: Any, plan: dict[str, int]) -> None:
    reference = run_on(1, first_updates, {}, "fp32", 1024.0)[0]
    for scale in (1024.0, 16.0):
        for got, expected in zip(
            run_on(parallel_plan(**plan).world_size, first_updates, plan, "fp16", scale)[0],
            reference,
            strict=True,
        ):
            assert got == pytest.approx(expected, rel=2e-3)


def one_rank_overflows(plan: dict[str, int], rank: int) -> dict[str, Any]:
    """An update in whose gradients this one rank alone has an infinity, after an update of its own."""
    with session(plan | {"gradient_accumulation_steps": 2}, **ONE_HALVES, initial_loss_scale=START) as opened:
        train_update(opened, 0)
        before = snapshot(opened)
        rows, targets = torch.arange(16).repeat(8, 1), torch.arange(1, 17).repeat(8, 1)
        own = slice(opened.data_parallel_rank, None, opened.data_parallel_size)
        opened.train_batch(rows[own], targets[own])
        if dist.get_rank() == rank:
            named = opened.module.named_parameters()
            cut = next(parameter for name, parameter in named if name.endswith("linear_fc1.weight"))
            cut.main_grad.view(-1)[3] = torch.inf
        receipt = opened.train_batch(rows[own], targets[own])
        changed = differences(before, snapshot(opened))
        after = train_update(opened, 1)
        return {
            "skipped": receipt.skipped,
            "changed": changed,
            "scales": (receipt.extra["loss_scale"], after.extra["loss_scale"]),
            "step": after.step,
        }


@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan], ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_agree_where_only_one_of_them_overflows(run_on: Any, plan: dict[str, int], rank: int) -> None:
    for result in run_on(parallel_plan(**plan).world_size, one_rank_overflows, plan, rank):
        assert result == {"skipped": True, "changed": [], "scales": (START, START / 2), "step": 2}


def scales_after_overflows(hysteresis: int) -> list[float]:
    """The scales of updates that all overflow."""
    done = updates({}, 4, initial_loss_scale=2.0**24, hysteresis=hysteresis)
    assert all(update["skipped"] for update in done)
    return [update["loss_scale"] for update in done]


def test_hysteresis_forgives_the_first_overflows(run_on: Any) -> None:
    """Megatron's: the scale goes down with the hysteresis-th overflow, and with each one after it."""
    assert run_on(1, scales_after_overflows, 1)[0] == [2.0**24, 2.0**23, 2.0**22, 2.0**21]
    assert run_on(1, scales_after_overflows, 2)[0] == [2.0**24, 2.0**24, 2.0**23, 2.0**22]


def lowest_scale() -> list[float]:
    done = updates({}, 4, initial_loss_scale=2.0**24, min_loss_scale=2.0**23, **ONE_HALVES)
    return [update["loss_scale"] for update in done]


def test_the_scale_stays_above_its_minimum(run_on: Any) -> None:
    assert run_on(1, lowest_scale)[0] == [2.0**24, 2.0**23, 2.0**23, 2.0**23]


def uninterrupted(path: str, plan: dict[str, int], saved_after: int, number: int) -> list[Any]:
    """Updates with overflows, a checkpoint among them; what came after it."""
    with session(plan, **CLIMBING) as opened:
        for update in range(saved_after):
            train_update(opened, update)
        opened.save_checkpoint(path)
        return further(opened, saved_after, number)


def resumed(path: str, plan: dict[str, int], saved_after: int, number: int) -> list[Any]:
    """The same from the checkpoint, in a session that begins with another scale."""
    with session(plan, **(CLIMBING | {"initial_loss_scale": 1.0})) as opened:
        opened.load_checkpoint(path)
        return further(opened, saved_after, number)


def further(opened: Any, first: int, number: int) -> list[Any]:
    receipts = [train_update(opened, update) for update in range(first, first + number)]
    return [(each.step, each.skipped, each.loss, each.extra["loss_scale"]) for each in receipts]


@pytest.mark.parametrize("saved_after", [2, 6, 7])
@pytest.mark.parametrize("plan", [{}, {"dp_shard": 2}], ids=str)
def test_a_run_with_overflows_goes_on_with_its_scale(
    run_on: Any, tmp_path: Path, plan: dict[str, int], saved_after: int
) -> None:
    path, ranks = str(tmp_path / "checkpoint"), parallel_plan(**plan).world_size
    expected = run_on(ranks, uninterrupted, path, plan, saved_after, 6)
    assert any(skipped for _, skipped, _, _ in expected[0])
    assert run_on(ranks, resumed, path, plan, saved_after, 6) == expected


# What a config and prepare say of it


def test_the_scale_is_stated_by_megatrons_names_and_shown(tmp_path: Path) -> None:
    stated = ("precision=fp16", "optimizer.initial_loss_scale=256", "optimizer.hysteresis=1")
    result = CliRunner().invoke(app, ["plan", str(CONFIG), *overrides(tmp_path, *stated), "--json"])
    assert result.exit_code == 0, result.output
    optimizer = json.loads(result.stdout)["megatron"]["OptimizerConfig"]
    assert optimizer["fp16"]
    assert (optimizer["initial_loss_scale"], optimizer["hysteresis"]) == (256.0, 1)
    assert (optimizer["min_loss_scale"], optimizer["loss_scale_window"]) == (2.0**-16, 1000)


def test_a_scale_without_fp16_is_warned_of(tmp_path: Path) -> None:
    given = overrides(tmp_path, "precision=bf16", "optimizer.initial_loss_scale=256")
    [warning] = warnings_of(load_config(CONFIG, given))
    assert (
        str(warning) == "command line: optimizer.initial_loss_scale=256.0 has no effect with precision=bf16"
    )
    assert warnings_of(load_config(CONFIG, [*given, "precision=fp16"])) == []


def test_a_scale_that_megatron_would_assert_on_is_refused() -> None:
    settings = replace(OPTIMIZERS["adam"], initial_loss_scale=1.0, min_loss_scale=2.0)
    assert [(fault.field, fault.remedy) for fault in schedule_faults(settings)] == [
        ("optimizer.min_loss_scale", "use at most 1")
    ]
    none = replace(OPTIMIZERS["adam"], hysteresis=0, min_loss_scale=0.0)
    assert {fault.field for fault in schedule_faults(none)} == {
        "optimizer.hysteresis",
        "optimizer.min_loss_scale",
    }


def test_experts_are_refused_with_fp16_by_the_file_and_by_prepare(tmp_path: Path) -> None:
    """Megatron's optimizers of a mixture each have a scale of their own."""
    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.models.gpt import GPT

    loaded = load_config(CONFIG, overrides(tmp_path, "precision=fp16", "model.num_moe_experts=4"))
    sections = {name: getattr(loaded.config, name) for name in ("precision", "model")}
    [stated] = [fault for fault in rule_faults(sections) if fault.field == "precision"]
    sizes = SIZES | {"num_moe_experts": 4, "add_bias_linear": False}
    with pytest.raises(Unsupported, match="two loss scales") as caught:
        MegatronBackend().prepare(GPT.of(**sizes), plan=parallel_plan(), precision="fp16", device="cpu")
    assert caught.value.faults == (stated,)
    assert not dist.is_initialized()
