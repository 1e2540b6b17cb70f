"""A run whose checkpoints are written while it trains on: announced when they are whole, whatever ends it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_run import CONFIG, overrides, train_here

from mixle_megatron.checkpoint.iterations import iteration_name, named_by_tracker, steps_in
from mixle_megatron.checkpoint.newest import find_newest

HELD_OUT = "data.validation_fraction=0.3"  # of few documents, which differ between Pythons
ASYNCHRONOUS = "checkpoint.asynchronous=true"
SHARED = (HELD_OUT, "plan.dp_shard=2", "evaluation.every=3", "run.steps=7")


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "receipts.jsonl").read_text().splitlines()]


def test_it_trains_and_keeps_what_it_would_if_it_waited(run_on: Any, tmp_path: Path) -> None:
    kept = ("checkpoint.every=2", "checkpoint.keep=2", "checkpoint.keep_every=4")
    folders = {
        more: Path(run_on(2, train_here, str(tmp_path / str(index)), *SHARED, *kept, *more)[0]["folder"])
        for index, more in enumerate([(), (ASYNCHRONOUS,)])
    }
    waited, asynchronous = folders.values()
    assert losses(asynchronous) == losses(waited)
    for folder in folders.values():
        checkpoints = folder / "checkpoints"
        assert sorted(steps_in(checkpoints)) == [4, 6, 7]
        assert named_by_tracker(checkpoints) == "7"
        assert find_newest(checkpoints).step == 7
        assert not find_newest(checkpoints).warnings
        assert not list(checkpoints.glob("*.writing"))


def test_a_run_that_is_asked_to_stop_waits_for_its_last_checkpoint(run_on: Any, tmp_path: Path) -> None:
    shared = (str(tmp_path), HELD_OUT, "plan.dp_shard=1", "evaluation.every=0", "run.steps=3", ASYNCHRONOUS)
    (stopped,) = run_on(1, stop_at_once, *shared)
    assert stopped["stopped_by"] == "SIGTERM"
    checkpoints = Path(stopped["folder"]) / "checkpoints"
    assert named_by_tracker(checkpoints) == "0"
    assert run_on(1, train_here, *shared)[0]["step"] == 3
    assert named_by_tracker(checkpoints) == "3"


def stop_at_once(folder: str, *more: str) -> dict[str, Any]:
    return train_here(folder, *more, stop=True)


def run_until_the_disk_is_full(folder: str) -> str:
    """A run on whose second rank the kernel refuses files longer than the first checkpoint's, after that."""
    import torch.distributed as dist

    from mixle_megatron.errors import CheckpointError
    from mixle_megatron.training.run_directory import RunDirectory

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    announce = RunDirectory.announce

    def announce_and_fill(directory: RunDirectory, step: int, **options: Any) -> None:
        announce(directory, step, **options)
        if dist.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    RunDirectory.announce = announce_and_fill
    try:
        train_here(folder, *SHARED, "run.steps=100", "checkpoint.every=2", ASYNCHRONOUS)
    except CheckpointError as error:
        return str(error)
    finally:
        RunDirectory.announce = announce
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "went on"


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_the_one_before_stays(
    run_on: Any, tmp_path: Path
) -> None:
    for said in run_on(2, run_until_the_disk_is_full, str(tmp_path)):
        assert "iter_0000004: rank 0: [Errno 27] File too large" in said
    checkpoints = tmp_path / "tiny-gpt" / "checkpoints"
    assert find_newest(checkpoints).step == 2
    assert named_by_tracker(checkpoints) == "2"
    assert [path.name for path in checkpoints.glob("iter*")] == [iteration_name(2)]


def killed_while_writing(process: subprocess.Popen[str]) -> tuple[list[psutil.Process], str]:
    """Stop a writer of the run, kill all that trains, and let the writer go on; writers and output."""
    shown = []
    for line in process.stdout:
        shown.append(line)
        trainers = [process, *psutil.Process(process.pid).children()]
        writers = [writer for trainer in trainers[1:] for writer in psutil.Process(trainer.pid).children()]
        if line.startswith("step ") and writers and suspended(writers[0]):
            for trainer in trainers:
                trainer.kill()
            process.wait()
            writers[0].resume()
            return writers, "".join(shown)
    raise AssertionError("no checkpoint was being written at any time:\n" + "".join(shown))


def suspended(writer: psutil.Process) -> bool:
    """Stop the process, unless it has ended."""
    try:
        writer.suspend()
    except psutil.NoSuchProcess:
        return False
    return writer.is_running() and writer.status() != psutil.STATUS_ZOMBIE


def test_a_trainer_killed_while_it_saves_leaves_no_writer_and_goes_on_from_a_whole_checkpoint(
    tmp_path: Path,
) -> None:
    saving = (HELD_OUT, "plan.dp_shard=2", "evaluation.every=0", "checkpoint.every=1", ASYNCHRONOUS)
    run = [sys.executable, "-m", "mixle_megatron", "pretrain", str(CONFIG)]
    longer = "optimizer.decay_steps=100000"
    environment = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    with subprocess.Popen(
        [*run, *overrides(tmp_path, *saving, "run.steps=100000", longer)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        writers, shown = killed_while_writing(process)
    _, left = psutil.wait_procs(writers, timeout=60)
    assert left == []
    folder = tmp_path / "tiny-gpt"
    checkpoints = folder / "checkpoints"
    assert list(checkpoints.glob("*.writing")), shown
    reached = find_newest(checkpoints).step or 0
    again = subprocess.run(
        [*run, *overrides(tmp_path, *saving, f"run.steps={reached + 2}", longer)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert find_newest(checkpoints).step == reached + 2
    assert not list(checkpoints.glob("*.writing"))
    assert len(losses(folder)) == reached + 2


@pytest.mark.parametrize("value", ["maybe", "2"])
def test_its_key_is_true_or_false(value: str) -> None:
    from mixle_megatron.config.load import load_config
    from mixle_megatron.errors import Refused

    with pytest.raises(Refused, match=r"checkpoint\.asynchronous"):
        load_config(CONFIG, [f"checkpoint.asynchronous={value}"])
