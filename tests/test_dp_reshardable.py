"""Checkpoints for which nothing is gathered: exact on their plan, right where data parallelism changes."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_matrix import GLOBAL_MICROBATCHES, plan_name, world_size
from small_gpts import OPTIMIZERS
from snapshots import differences, message_of, snapshot
from test_resharding import MODELS, SAVED_AT, UPDATES, VIRTUAL, losses

from mixle_megatron.checkpoint.safe_metadata import METADATA, read_metadata
from mixle_megatron.checkpoint.stored_state import PIECES
from mixle_megatron.config.model import ModelSection

FORMAT = "dp_reshardable"

Plan = dict[str, int]

CASES: dict[str, tuple[str, str, str, dict[str, Any], list[Plan]]] = {
    "dense": (
        *("dense", "adam_scheduled", "fp32", {}),
        [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}, {}, {"cp": 2}, {"dp_shard": 4}],
    ),
    "tensor-parallel": (
        *("dense", "adam_scheduled", "fp32", {}),
        [{"tp": 2, "dp_shard": 2}, {"tp": 2}, {"tp": 2, "dp_replicate": 2}],
    ),
    "interleaved": (
        *("dense", "sgd", "fp32", VIRTUAL),
        [{"pp": 2}, {"pp": 2, "dp_shard": 2}],
    ),
    "mixture": (
        *("mixture", "adam_scheduled", "fp32", {}),
        [{"dp_shard": 2, "ep": 2}, {"dp_shard": 4, "ep": 2}, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}],
    ),
    "mixture, cut": (
        *("mixture", "adam_scheduled", "fp32", {}),
        [{"tp": 2, "etp": 2, "dp_shard": 2}, {"tp": 2, "etp": 2}],
    ),
    "bf16": (
        *("biased, shared and gated", "adam_scheduled", "bf16", {}),
        [{"dp_shard": 2, "ep": 2}, {"dp_shard": 4, "ep": 2}],
    ),
}
"""A model, an optimizer, a precision and a split: saved under the first plan, loaded under each."""


def opened(case: str, plan: Plan, optimizer_format: str = FORMAT) -> Any:
    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.models.gpt import GPT
    from mixle_megatron.pipeline_split import PipelineSplit
    from mixle_megatron.plan_record import PlanRecord

    model, optimizer, precision, split, _ = CASES[case]
    replicas = plan.get("dp_replicate", 1) * plan.get("dp_shard", 1)
    return MegatronBackend().prepare(
        GPT(ModelSection(**MODELS[model]), seed=7),
        plan=PlanRecord(**plan, microbatches=GLOBAL_MICROBATCHES // replicas).to_parallel_plan(),
        optimizer=OPTIMIZERS[optimizer],
        precision=precision,
        device="cpu",
        pipeline=PipelineSplit(**split),
        optimizer_format=optimizer_format,
    )


def after(session: Any, case: str) -> list[float]:
    return losses(session, CASES[case][0], range(SAVED_AT, SAVED_AT + UPDATES))


def train_and_save(case: str, plan: Plan, path: str) -> tuple[list[float], Any]:
    """Losses after the checkpoint that is written on the way, and what they leave."""
    with opened(case, plan) as session:
        losses(session, CASES[case][0], range(SAVED_AT))
        session.save_checkpoint(path)
        return after(session, case), snapshot(session)


def load_and_train(case: str, plan: Plan, path: str) -> tuple[list[float], Any]:
    with opened(case, plan, "fully_reshardable") as session:
        losses(session, CASES[case][0], range(90, 91))  # somewhere else than where the checkpoint is
        session.load_checkpoint(path)
        assert session.step == SAVED_AT
        return after(session, case), snapshot(session)


@pytest.mark.parametrize("case", CASES)
def test_goes_on_where_data_parallelism_changes(run_on: Any, tmp_path: Path, case: str) -> None:
    path, plans = str(tmp_path / "checkpoint"), CASES[case][-1]
    went_on = run_on(world_size(plans[0]), train_and_save, case, plans[0], path)
    resumed = run_on(world_size(plans[0]), load_and_train, case, plans[0], path)
    for (expected, left), (found, now) in zip(went_on, resumed, strict=True):
        assert found == expected
        assert differences(left, now) == []
    tolerance = 5e-3 if CASES[case][2] == "bf16" else 1e-5
    for other in plans[1:]:
        found, _ = run_on(world_size(other), load_and_train, case, other, path)[0]
        assert found == pytest.approx(went_on[0][0], rel=tolerance, abs=0), plan_name(other)


def save_without_gathering(path: str) -> None:
    """Save where gathering a parameter would fail."""
    from mixle_megatron.checkpoint import optimizer_state

    def gather(*_arguments: Any) -> None:
        raise AssertionError("gathered")

    original, optimizer_state.gather = optimizer_state.gather, gather
    try:
        with opened("dense", {"dp_shard": 2}) as session:
            losses(session, "dense", range(SAVED_AT))
            session.save_checkpoint(path)
    finally:
        optimizer_state.gather = original


@pytest.fixture(scope="module")
def saved(run_on: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two data-parallel ranks."""
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    run_on(2, save_without_gathering, str(path))
    return path


def test_each_rank_writes_its_own_parts(saved: Path) -> None:
    metadata = read_metadata(saved / METADATA)
    elements: Counter[str] = Counter()
    for index, place in metadata.storage_data.items():
        if index.fqn.startswith(PIECES):
            chunks = metadata.state_dict_metadata[index.fqn].chunks
            (own,) = [chunk for chunk in chunks if chunk.offsets == index.offset]
            rank = place.relative_path.split("_")[2]
            elements[rank] += prod(own.sizes)
    assert elements.keys() == {"0", "1"}
    assert elements["0"] == pytest.approx(elements["1"], rel=0.05)


def test_inspection_and_verification_know_it(saved: Path) -> None:
    from mixle_megatron.checkpoint.completeness import damage
    from mixle_megatron.checkpoint.inspection import inspect

    inspection = inspect(saved)
    assert inspection.optimizer_format == FORMAT
    assert {tensor.name.startswith(PIECES) for tensor in inspection.optimizer} == {True}
    sizes = {tensor.name: prod(tensor.shape) for tensor in inspection.optimizer}
    moments = 2  # in fp32 the optimizer's values are the model's
    assert sum(sizes.values()) == moments * inspection.totals["parameters"]
    assert damage(saved, checksums=True, needs_manifest=True) == []


def refused(path: str, plan: Plan) -> tuple[str, list[str]]:
    """What is said, and what of the session has changed."""
    from mixle_megatron.errors import DoesNotFit

    with opened("dense", plan) as session:
        before = snapshot(session)
        said = message_of(lambda: session.load_checkpoint(path), DoesNotFit)
        return said, differences(before, snapshot(session))


@pytest.mark.parametrize(
    ("plan", "axes"), [({"tp": 2}, ["tp"]), ({"pp": 2}, ["pp"]), ({"tp": 2, "pp": 2}, ["tp", "pp"])]
)
def test_other_changes_are_refused_by_axis(run_on: Any, saved: Path, plan: Plan, axes: list[str]) -> None:
    for said, changed in run_on(world_size(plan), refused, str(saved), plan):
        lines = said.splitlines()
        assert [line.split("=")[0] for line in lines] == [f"plan.{axis}" for axis in axes]
        for line in lines:
            assert "was 1 when" in line
            assert "only dp_replicate, dp_shard and cp may change" in line
            assert "what='model'" in line
            assert "fully_reshardable" in line
        assert changed == []


def refused_format() -> str:
    from mixle_megatron.errors import Refused

    return message_of(lambda: opened("dense", {}, "dp_zero"), Refused)


def test_unknown_formats_are_refused(run_on: Any) -> None:
    (said,) = run_on(1, refused_format)
    assert said == "optimizer_format=dp_zero is not one of fully_reshardable, dp_reshardable"


# Between precisions


def main_values(session: Any) -> dict[str, torch.Tensor]:
    """The optimizer's fp32 value of each parameter of this rank's stage, whole over data parallelism."""
    from mixle_megatron.optimizer_shards import gathered_value

    parameters = session.stage.named_parameters()
    return {name: gathered_value(session.optimizer, each).detach().clone() for name, each in parameters}


def session_in(precision: str, optimizer_format: str) -> Any:
    from mixle.utils.parallel.training_contracts import ParallelPlan

    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.models.gpt import GPT

    return MegatronBackend().prepare(
        GPT(ModelSection(**MODELS["biased, shared and gated"]), seed=7),
        plan=ParallelPlan(dp_shard=2, ep=2),
        optimizer=OPTIMIZERS["adam_scheduled"],
        precision=precision,
        device="cpu",
        optimizer_format=optimizer_format,
    )


def carry_over(saved: str, loaded: str, optimizer_format: str, path: str) -> list[str]:
    """Save in one precision and load in another; the parameters whose fp32 value that changed."""
    with session_in(saved, optimizer_format) as session:
        losses(session, "biased, shared and gated", range(2))
        session.save_checkpoint(path)
        expected = main_values(session)
    with session_in(loaded, optimizer_format) as session:
        session.load_checkpoint(path)
        found = main_values(session)
        rounded = {name: each.to(torch.float32) for name, each in session.stage.named_parameters()}
    dtype = torch.bfloat16 if loaded == "bf16" else torch.float32
    assert found.keys() == expected.keys()
    return [
        name
        for name, value in expected.items()
        if not torch.equal(found[name], value) or not torch.equal(rounded[name], value.to(dtype).float())
    ]


@pytest.mark.parametrize("optimizer_format", [FORMAT, "fully_reshardable"])
@pytest.mark.parametrize(("saved", "loaded"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_fp32_values_come_along_whatever_the_precision(
    run_on: Any, tmp_path: Path, saved: str, loaded: str, optimizer_format: str
) -> None:
    """In fp32 a checkpoint has them once, as the model's."""
    path = str(tmp_path / "checkpoint")
    assert run_on(2, carry_over, saved, loaded, optimizer_format, path) == [[], []]
