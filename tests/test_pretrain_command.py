"""``mixle-megatron pretrain`` as a user starts it: its own ranks, Ctrl-C, going on, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import CONFIG, overrides

from mixle_megatron.checkpoint.run_lock import run_lock

TWO_RANKS = ("plan.dp_shard=2", "evaluation.every=0", "checkpoint.every=1000")


def command(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "mixle_megatron", "pretrain", str(CONFIG), *overrides(folder, *more)]


def environment() -> dict[str, str]:
    """That of a user's shell: no launcher has set anything in it."""
    return {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }


def finish(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *more), env=environment(), capture_output=True, text=True, check=False
    )


def steps(folder: Path) -> list[int]:
    lines = (folder / "tiny-gpt" / "receipts.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def interrupt_after(step: int, number: int, folder: Path, *more: str) -> tuple[int, str]:
    """Start a run, send it a signal when that step is shown, and give its exit code and output."""
    with subprocess.Popen(
        command(folder, *more), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        shown = []
        for line in process.stdout:
            shown.append(line)
            if line.startswith(f"step {step}/"):
                process.send_signal(number)
        return process.wait(), "".join(shown)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_it_with_a_checkpoint_and_the_same_command_goes_on(number: int, tmp_path: Path) -> None:
    code, shown = interrupt_after(3, number, tmp_path, *TWO_RANKS, "run.steps=100000")
    assert code == 3, shown
    assert "stopped by" in shown
    assert "Traceback" not in shown
    reached = steps(tmp_path)[-1]
    assert steps(tmp_path) == list(range(1, reached + 1))
    stopped = json.loads((tmp_path / "tiny-gpt" / "stopped.json").read_text())
    assert stopped["step"] == reached
    assert stopped["signal"] == signal.Signals(number).name

    longer = (f"run.steps={reached + 2}", "optimizer.decay_steps=100000")
    again = finish(tmp_path, *TWO_RANKS, *longer)
    assert again.returncode == 0, again.stdout + again.stderr
    assert steps(tmp_path) == list(range(1, reached + 3))
    for row in (
        "first loss",
        "last loss",
        "validation loss",
        "tokens",
        "time",
        "checkpoint",
        "unigram",
        "bigram",
    ):
        assert row in again.stdout

    finished = finish(tmp_path, *TWO_RANKS, f"run.steps={reached + 2}", "optimizer.decay_steps=100000")
    assert finished.returncode == 0
    assert "has finished" in finished.stdout


def test_under_a_foreign_torchrun_a_stopped_rank_exits_0(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    run = ["-m", "mixle_megatron", "pretrain", str(CONFIG), *overrides(tmp_path, *TWO_RANKS, "run.steps=3")]
    done = subprocess.run([*torchrun, *run], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps(tmp_path) == [1, 2, 3]


def test_a_refusal_starts_no_rank_and_names_every_fault(tmp_path: Path) -> None:
    refused = finish(tmp_path, "plan.tp=3", "data.paths=[/nowhere]", "batch.micro_batch_size=5")
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    for field in ("plan.tp=3", "data.paths=/nowhere", "batch.global_batch_size=8"):
        assert field in refused.stderr
    assert not (tmp_path / "tiny-gpt").exists()


def test_a_second_job_on_a_run_is_refused_with_the_first_ones_process(tmp_path: Path) -> None:
    with run_lock(tmp_path / "tiny-gpt"):
        done = finish(tmp_path, *TWO_RANKS, "run.steps=2")
    assert done.returncode == 2
    assert f"in use by process {os.getpid()}" in done.stderr
    assert "starting" not in done.stdout


def test_its_launcher_loads_neither_torch_nor_megatron_before_it_reads_the_text() -> None:
    code = (
        "import sys, mixle_megatron.training.command\n"
        "loaded = {'torch', 'megatron'} & set(sys.modules)\n"
        "sys.exit(', '.join(loaded) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_value_without_effect_is_said_once(tmp_path: Path) -> None:
    done = finish(tmp_path, "plan.dp_shard=1", "run.steps=1", "model.rotary_base=5000", "evaluation.every=0")
    assert done.returncode == 0, done.stderr
    said = "warning: command line: model.rotary_base=5000 has no effect"
    assert done.stderr.count(said) == 1


def test_no_held_out_text_to_evaluate_is_refused(tmp_path: Path) -> None:
    refused = finish(tmp_path, "data.validation_fraction=0", "evaluation.every=5")
    assert refused.returncode == 2
    assert "data.validation_fraction=0.0 holds no text out" in refused.stderr


def test_a_rank_that_dies_ends_the_run_with_one_cause(tmp_path: Path) -> None:
    with subprocess.Popen(
        command(tmp_path, *TWO_RANKS, "run.steps=100000"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        shown = []
        for line in process.stdout:
            shown.append(line)
            if line.startswith("step 2/"):
                kill_one_rank(process.pid)
        assert process.wait() == 1
    assert "was killed by SIGKILL" in "".join(shown)


def kill_one_rank(launcher: int) -> None:
    import psutil

    ranks = [
        child
        for child in psutil.Process(launcher).children()
        if "mixle_megatron" in child.cmdline() and child.environ().get("RANK") == "1"
    ]
    ranks[0].kill()
