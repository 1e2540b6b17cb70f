"""Whatever is claimed of the weakest host is executed here: a claim without an execution fails.

The claims are read from the backend. Each runs real updates on real ranks, makes sure that what it claims
was really in force, and compares the losses with those of one rank in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_restart import go_on_with_two_of_four
from plan_matrix import DENSE, MICRO_BATCH, MIXTURE, batch, world_size
from small_gpts import OPTIMIZERS

from mixle_megatron.capabilities import CAPABILITIES, WEAKEST_HOST
from mixle_megatron.capability.decide import decide
from mixle_megatron.config.model import ModelSection

UPDATES = 2
FEATURES = ("distributed_optimizer", "reshardable_checkpoint", "elastic_restart")


def claims() -> set[str]:
    """Everything that mixle reads as executed before any host is known."""
    features = {name for name in FEATURES if getattr(CAPABILITIES, name)}
    return {axis.value for axis in CAPABILITIES.axes} | CAPABILITIES.precisions | features


def session(model: dict[str, Any], plan: dict[str, int], precision: str = "fp32") -> Any:
    from mixle.utils.parallel.training_contracts import ParallelPlan

    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.models.gpt import GPT

    replicas = plan.get("dp_replicate", 1) * plan.get("dp_shard", 1)
    return MegatronBackend().prepare(
        GPT(ModelSection(**model), seed=7),
        plan=ParallelPlan(**(plan | {"microbatches": 4 // replicas})),
        precision=precision,
        optimizer=OPTIMIZERS["adam"],
        device="cpu",
    )


def losses(opened: Any, model: dict[str, Any], updates: range) -> list[float]:
    """The losses of committed updates on the same microbatches under any plan."""
    receipts = []
    for update in updates:
        own = slice(opened.data_parallel_rank, None, opened.data_parallel_size)
        inputs, targets = (
            torch.cat(part.split(MICRO_BATCH)[own]) for part in batch(model["seq_length"], update)
        )
        receipts.append(opened.train_batch(inputs, targets))
    assert not any(receipt.skipped for receipt in receipts)
    return [receipt.loss for receipt in receipts]


def group_sizes(opened: Any) -> dict[str, int]:
    """How many ranks Megatron's own groups of each axis have."""
    groups = opened.stage.groups.collection
    replicas = groups.inter_dist_opt.size() if groups.inter_dist_opt else 1
    return {
        "dp_replicate": replicas,
        "dp_shard": groups.dp.size() // replicas,
        "tp": groups.tp.size(),
        "pp": groups.pp.size(),
        "cp": groups.cp.size(),
        "ep": groups.ep.size(),
        "etp": groups.expt_tp.size(),
    }


def train(model: dict[str, Any], plan: dict[str, int], precision: str = "fp32") -> dict[str, Any]:
    """Two updates, and what was in force while they were made."""
    with session(model, plan, precision) as opened:
        seen = losses(opened, model, range(UPDATES))
        parts = [part.optimizer for part in opened.optimizer.chained_optimizers]
        moments = [state["exp_avg"].numel() for part in parts for state in part.state.values()]
        return {
            "losses": seen,
            "groups": group_sizes(opened),
            "dtypes": {str(parameter.dtype) for parameter in opened.module.parameters()},
            "parameters": sum(parameter.numel() for parameter in opened.module.parameters()),
            "optimizer_elements": sum(moments),
        }


def as_one_rank(
    run_on: Any, model: dict[str, Any], plan: dict[str, int], **more: Any
) -> list[dict[str, Any]]:
    """Train under the plan, and hold its losses against those of one rank in fp32."""
    reference = run_on(1, train, model, {})[0]["losses"]
    results = run_on(world_size(plan), train, model, plan, more.get("precision", "fp32"))
    for result in results:
        assert result["losses"] == pytest.approx(reference, rel=more.get("tolerance", 1e-5), abs=0)
    return results


def axis(name: str, model: dict[str, Any], **plan: int) -> Callable[[Any, Path], None]:
    """An axis is executed where Megatron's groups of it have two ranks, and the losses are those of one."""

    def execute(run_on: Any, _folder: Path) -> None:
        for result in as_one_rank(
            run_on, model, {name: 2} | plan, tolerance=1e-4 if model is MIXTURE else 1e-5
        ):
            assert result["groups"][name] == 2

    return execute


def precision(name: str, dtype: str, tolerance: float) -> Callable[[Any, Path], None]:
    """A precision is executed where parameters have its dtype, and losses are those of fp32 to rounding."""

    def execute(run_on: Any, _folder: Path) -> None:
        results = as_one_rank(run_on, DENSE, {"dp_shard": 2}, precision=name, tolerance=tolerance)
        assert results[0]["dtypes"] == {f"torch.{dtype}"}

    return execute


def distributed_optimizer(run_on: Any, _folder: Path) -> None:
    """Two ranks keep the optimizer's state of each parameter once between them, and about half each."""
    first, second = as_one_rank(run_on, DENSE, {"dp_shard": 2})
    assert first["optimizer_elements"] + second["optimizer_elements"] == first["parameters"]
    assert first["optimizer_elements"] == pytest.approx(second["optimizer_elements"], rel=0.05)


def save(path: str, plan: dict[str, int]) -> list[float]:
    """Save after one update; the losses of the next two."""
    with session(DENSE, plan) as opened:
        losses(opened, DENSE, range(1))
        opened.save_checkpoint(path)
        return losses(opened, DENSE, range(1, 3))


def load(path: str, plan: dict[str, int]) -> list[float]:
    """Go on from the checkpoint for two updates; their losses."""
    with session(DENSE, plan) as opened:
        opened.load_checkpoint(path)
        return losses(opened, DENSE, range(1, 3))


def reshardable_checkpoint(run_on: Any, folder: Path) -> None:
    """A checkpoint of two optimizer shards goes on under tensor parallelism, and on one rank."""
    path = str(folder / "checkpoint")
    expected = run_on(2, save, path, {"dp_shard": 2})[0]
    for plan in ({"tp": 2}, {}):
        assert run_on(world_size(plan), load, path, plan)[0] == pytest.approx(expected, rel=1e-5)


EXECUTIONS: dict[str, Callable[[Any, Path], None]] = {
    "dp_replicate": axis("dp_replicate", DENSE),
    "dp_shard": axis("dp_shard", DENSE),
    "tp": axis("tp", DENSE),
    "pp": axis("pp", DENSE),
    "cp": axis("cp", DENSE),
    "ep": axis("ep", MIXTURE, dp_shard=2),
    "etp": axis("etp", MIXTURE, tp=2),
    "fp32": precision("fp32", "float32", 1e-5),
    "bf16": precision("bf16", "bfloat16", 1e-2),
    "fp16": precision("fp16", "float16", 1e-3),
    "distributed_optimizer": distributed_optimizer,
    "reshardable_checkpoint": reshardable_checkpoint,
    "elastic_restart": lambda _run_on, folder: go_on_with_two_of_four(folder),
}
"""What executes each claim."""


@pytest.mark.parametrize("claim", sorted(claims()))
def test_a_claim_is_executed(run_on: Any, tmp_path: Path, claim: str) -> None:
    assert claim in EXECUTIONS, f"{claim} is claimed, and nothing here executes it"
    EXECUTIONS[claim](run_on, tmp_path)


def test_what_is_executed_is_claimed_and_the_table_says_the_same() -> None:
    table = decide(WEAKEST_HOST)
    executed = {capability.name for capability in table.capabilities if capability.executes}
    assert executed == claims() == set(EXECUTIONS)
