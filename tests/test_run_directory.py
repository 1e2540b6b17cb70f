"""What may change when a run goes on, and what a run's folder says."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import CONFIG, overrides

from mixle_megatron.checkpoint.iterations import TRACKER
from mixle_megatron.config.load import load_config
from mixle_megatron.config.schema import Config, effective_config
from mixle_megatron.errors import Refused
from mixle_megatron.training.command import checked, threads
from mixle_megatron.training.run_directory import RunDirectory, continued, resume_faults


def config(folder: Path, *more: str) -> Config:
    return load_config(CONFIG, overrides(folder, *more)).config


def run_at(folder: Path, step: int, *more: str) -> RunDirectory:
    """A run folder with an empty checkpoint of ``step``."""
    made = config(folder, *more)
    directory = RunDirectory(made)
    directory.start(made, step)
    directory.checkpoint(step).mkdir()
    (directory.path / "checkpoints" / TRACKER).write_text(str(step))
    return directory


CHANGEABLE = [
    "plan.tp=2",
    "plan.gradient_accumulation_steps=2",
    "run.steps=500",
    "precision=bf16",
    "batch.micro_batch_size=1",
    "logging.progress=off",
    "evaluation.every=7",
    "checkpoint.keep=5",
    "host.threads_per_rank=1",
]
FIXED = {
    "model.hidden_size": "64",
    "model.init_method_std": "0.1",
    "data.validation_fraction": "0.2",
    "batch.global_batch_size": "16",
    "run.seed": "7",
    "optimizer.lr": "0.1",
    "optimizer.decay_steps": "77",
}


@pytest.mark.parametrize("change", CHANGEABLE)
def test_a_run_may_go_on_with_another(change: str, tmp_path: Path) -> None:
    run_at(tmp_path, 5)
    loaded = load_config(CONFIG, overrides(tmp_path, change))
    assert checked(loaded).run.name == "tiny-gpt"


@pytest.mark.parametrize("key", FIXED)
def test_a_run_may_not_go_on_with_another(key: str, tmp_path: Path) -> None:
    run_at(tmp_path, 5)
    loaded = load_config(CONFIG, overrides(tmp_path, f"{key}={FIXED[key]}"))
    with pytest.raises(Refused) as refused:
        checked(loaded)
    assert key in [fault.field for fault in refused.value.faults]
    assert all("when the run began" in fault.rule for fault in refused.value.faults)


def test_the_decay_is_that_of_the_run_when_it_began(tmp_path: Path) -> None:
    stored = run_at(tmp_path, 5, "run.steps=100").stored_values()
    longer = continued(config(tmp_path, "run.steps=900"), stored)
    assert longer.optimizer.decay_steps == 100
    assert resume_faults(longer, stored) == []


def test_everything_may_change_before_there_is_a_checkpoint(tmp_path: Path) -> None:
    made = config(tmp_path)
    RunDirectory(made).start(made, 0)
    assert RunDirectory(made).stored_values() is None
    assert checked(load_config(CONFIG, overrides(tmp_path, "run.seed=9"))).run.seed == 9


def test_the_stored_config_is_the_effective_one_and_loads_again(tmp_path: Path) -> None:
    directory = run_at(tmp_path, 5)
    again = load_config(directory.path / "config.yaml").config
    assert again == effective_config(config(tmp_path))


@pytest.mark.parametrize("tracker", ["five", "", "99"])
def test_a_tracker_that_names_no_checkpoint_says_nothing_of_the_step(tracker: str, tmp_path: Path) -> None:
    directory = run_at(tmp_path, 5)
    (directory.path / "checkpoints" / TRACKER).write_text(tracker)
    assert directory.latest_step() is None
    assert directory.stored_values() is not None, "there is something to go on from all the same"


def test_cores_are_shared_out_unless_threads_are_stated(tmp_path: Path) -> None:
    assert threads(config(tmp_path), 10_000) == 1
    assert threads(config(tmp_path, "host.threads_per_rank=3"), 2) == 3
