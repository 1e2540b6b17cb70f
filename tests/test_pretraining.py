"""A run from its config: one curve whatever the plan, and going on from where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import train_here

STEPS = 10
PLANS = {
    "dp_shard": (2, ["plan.dp_shard=2"]),
    "dp_replicate with accumulation": (2, ["plan.dp_replicate=2", "plan.gradient_accumulation_steps=2"]),
    "tp": (2, ["plan.tp=2"]),
    "pp with other microbatches": (2, ["plan.pp=2", "batch.micro_batch_size=1"]),
    "tp x dp_shard": (4, ["plan.tp=2", "plan.dp_shard=2"]),
}


def receipts(folder: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "receipts.jsonl").read_text().splitlines()]


def losses(folder: str | Path) -> list[float]:
    return [receipt["loss"] for receipt in receipts(folder)]


@pytest.fixture(scope="module")
def one_rank(run_on: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run on one rank, uninterrupted."""
    folder = tmp_path_factory.mktemp("one_rank")
    arguments = (
        str(folder),
        "plan.dp_shard=1",
        f"run.steps={STEPS}",
        "checkpoint.every=5",
        "evaluation.every=4",
    )
    return run_on(1, train_here, *arguments)[0]


@pytest.mark.parametrize("plan", PLANS)
def test_the_plan_does_not_change_the_curve(
    plan: str, run_on: Any, one_rank: dict[str, Any], tmp_path: Path
) -> None:
    ranks, keys = PLANS[plan]
    arguments = (str(tmp_path), "plan.dp_shard=1", *keys, f"run.steps={STEPS}", "checkpoint.every=0")
    run = run_on(ranks, train_here, *arguments, "evaluation.every=4")[0]
    assert losses(run["folder"]) == pytest.approx(losses(one_rank["folder"]), rel=1e-5)
    norms, expected = (
        [receipt["extra"]["grad_norm"] for receipt in receipts(each["folder"])[:2]]
        for each in (run, one_rank)
    )
    assert norms == pytest.approx(expected, rel=1e-4)
    assert evaluations(run["folder"]) == pytest.approx(evaluations(one_rank["folder"]), rel=1e-5)


def evaluations(folder: str) -> list[float]:
    lines = (Path(folder) / "evaluations.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_run_leaves_its_record(one_rank: dict[str, Any]) -> None:
    folder = Path(one_rank["folder"])
    written = receipts(folder)
    assert [receipt["step"] for receipt in written] == list(range(1, STEPS + 1))
    assert {receipt["global_tokens"] for receipt in written} == {8 * 32}
    assert {"grad_norm", "learning_rate", "loss_scale", "seconds", "plan"} <= written[0]["extra"].keys()
    checkpoints = folder / "checkpoints"
    assert sorted(path.name for path in checkpoints.glob("iter_*")) == ["iter_0000005", "iter_0000010"]
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "10"
    lines = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8, 10]
    assert "decay_steps: 21" in (folder / "config.yaml").read_text()


def test_loss_falls(one_rank: dict[str, Any]) -> None:
    curve = losses(one_rank["folder"])
    assert curve[-1] < curve[0] - 0.3


def test_going_on_under_other_plans_gives_the_uninterrupted_curve(
    run_on: Any, one_rank: dict[str, Any], tmp_path: Path
) -> None:
    shared = (str(tmp_path), "plan.dp_shard=1", "checkpoint.every=100", "evaluation.every=0")
    run_on(1, train_here, *shared, "run.steps=4")
    run_on(2, train_here, *shared, "run.steps=7", "plan.tp=2")
    run = run_on(2, train_here, *shared, f"run.steps={STEPS}", "plan.pp=2", "batch.micro_batch_size=4")[0]
    assert [receipt["step"] for receipt in receipts(run["folder"])] == list(range(1, STEPS + 1))
    assert losses(run["folder"]) == pytest.approx(losses(one_rank["folder"]), rel=1e-5)


def test_going_on_under_the_same_plan_is_exact_and_cuts_what_lies_past_the_checkpoint(
    run_on: Any, one_rank: dict[str, Any], tmp_path: Path
) -> None:
    shared = (str(tmp_path), "plan.dp_shard=1", "checkpoint.every=100", "evaluation.every=0")
    run = run_on(1, train_here, *shared, "run.steps=4")[0]
    lines = Path(run["folder"]) / "receipts.jsonl"
    # What a run that crashed after its checkpoint leaves: a later step, and half a line.
    lines.write_text(
        lines.read_text() + lines.read_text().splitlines()[0].replace('"step": 1', '"step": 5') + '\n{"st'
    )
    run_on(1, train_here, *shared, f"run.steps={STEPS}")
    assert losses(run["folder"]) == losses(one_rank["folder"])


def test_a_run_that_is_asked_to_stop_ends_with_a_checkpoint(run_on: Any, tmp_path: Path) -> None:
    shared = (str(tmp_path), "plan.dp_shard=2", "evaluation.every=0", "run.steps=3")
    results = run_on(2, stop_on_rank_one, *shared)
    assert {result["step"] for result in results} == {0}
    folder = Path(results[0]["folder"])
    stopped = json.loads((folder / "stopped.json").read_text())
    assert stopped["step"] == 0
    assert Path(stopped["checkpoint"]).name == "iter_0000000"
    assert run_on(2, train_here, *shared)[0]["step"] == 3
    assert not (folder / "stopped.json").exists()


def stop_on_rank_one(folder: str, *more: str) -> dict[str, Any]:
    """Only one rank gets the signal; all of them have to end."""
    import torch.distributed as dist

    return train_here(folder, *more, stop=dist.get_rank() == 1)


def damage_newest(folder: str | Path) -> Path:
    """Flip a bit of the newest checkpoint's tensors; its size stays."""
    newest = max((Path(folder) / "checkpoints").glob("iter_*"))
    shard = min(newest.glob("__*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    return newest


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_gone_on_from(
    run_on: Any, one_rank: dict[str, Any], tmp_path: Path
) -> None:
    arguments = (str(tmp_path), "plan.dp_shard=2", "evaluation.every=0", "checkpoint.every=2")
    folder = run_on(2, train_here, *arguments, "run.steps=6")[0]["folder"]
    newest = damage_newest(folder)
    run_on(2, train_here, *arguments, f"run.steps={STEPS}")
    assert losses(folder) == pytest.approx(losses(one_rank["folder"]), rel=1e-5)
    assert newest.with_name(f"{newest.name}.damaged").is_dir()
    assert "distcp" in newest.with_name(f"{newest.name}.damaged.txt").read_text()


def test_old_checkpoints_go_but_for_the_newest_and_every_so_many_steps(run_on: Any, tmp_path: Path) -> None:
    arguments = (str(tmp_path), "plan.dp_shard=1", "evaluation.every=0", "checkpoint.every=1")
    kept = ("checkpoint.keep=2", "checkpoint.keep_every=3", "run.steps=8")
    folder = run_on(1, train_here, *arguments, *kept)[0]["folder"]
    names = sorted(path.name for path in (Path(folder) / "checkpoints").glob("iter_*"))
    assert names == [f"iter_{step:07d}" for step in (3, 6, 7, 8)]


def fail_to_announce(folder: str) -> str:
    """A run whose first rank finds its new checkpoint damaged."""
    from mixle_megatron.errors import CheckpointError
    from mixle_megatron.training.run_directory import RunDirectory

    def announce(_directory: Any, step: int, **_options: Any) -> None:
        raise CheckpointError(f"checkpoint {step} is not as it was written")

    original, RunDirectory.announce = RunDirectory.announce, announce
    try:
        train_here(folder, "plan.dp_shard=2", "evaluation.every=0", "checkpoint.every=1", "run.steps=3")
    except CheckpointError as error:
        return str(error)
    finally:
        RunDirectory.announce = original
    return "went on"


def test_a_checkpoint_that_cannot_be_announced_ends_every_rank(run_on: Any, tmp_path: Path) -> None:
    assert run_on(2, fail_to_announce, str(tmp_path)) == ["checkpoint 1 is not as it was written"] * 2


def test_without_checkpoints_nothing_is_written_and_nothing_gone_on_from(run_on: Any, tmp_path: Path) -> None:
    shared = (str(tmp_path), "plan.dp_shard=1", "checkpoint.every=0", "evaluation.every=0", "run.steps=2")
    first = run_on(1, train_here, *shared)[0]
    again = run_on(1, train_here, *shared)[0]
    assert list((Path(first["folder"]) / "checkpoints").iterdir()) == []
    assert [receipt["step"] for receipt in receipts(again["folder"])] == [1, 2]


def test_bf16_follows_fp32(run_on: Any, tmp_path: Path) -> None:
    shared = (
        "plan.dp_shard=1",
        "checkpoint.every=0",
        "evaluation.every=0",
        "run.steps=40",
        "optimizer.warmup_steps=5",
    )
    curves = [
        losses(run_on(1, train_here, str(tmp_path / name), *shared, f"precision={name}")[0]["folder"])
        for name in ("fp32", "bf16")
    ]
    fp32, bf16 = (sum(curve[-5:]) / 5 for curve in curves)
    assert curves[0] != curves[1]
    assert bf16 == pytest.approx(fp32, rel=0.02)
