"""A printed batch script, run on two stand-in nodes of this machine by stand-ins of Slurm's programs."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_stubs import directives, install
from tiny_run import CONFIG, overrides

from mixle_megatron.training.joining import FIRST_PORT, PORTS

NO_EVALUATION = ("evaluation.every=0", "data.validation_fraction=0")
TWO_NODES = ("--nodes", "2", "--gpus-per-node", "1", "--cpus-per-task", "1")


def printed(folder: Path, *values: str, options: tuple[str, ...] = TWO_NODES) -> Path:
    """The batch script of a tiny run, as a user writes it into a file."""
    arguments = [str(CONFIG), *overrides(folder / "runs", "plan.dp_shard=2", *NO_EVALUATION, *values)]
    command = [sys.executable, "-m", "mixle_megatron", "launch", "slurm", *arguments, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    script = folder / "job.sbatch"
    script.write_text(done.stdout, encoding="utf-8")
    return script


def submit(script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Submit a script from its own folder."""
    stubs = install(script.parent, STUB_JOB_ID=job_with_a_free_port(), **environment)
    return subprocess.run(
        ["sbatch", str(script)], cwd=script.parent, env=stubs, capture_output=True, text=True, check=False
    )


def job_with_a_free_port() -> str:
    """A job's number whose port nobody on this machine listens on."""
    for number in range(4_700_000, 4_700_000 + PORTS):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", FIRST_PORT + number % PORTS))
            except OSError:
                continue
            return str(number)
    raise AssertionError("every port is taken")


def asked(script: Path) -> dict[str, list]:
    """What Slurm's programs were asked for."""
    return json.loads((script.parent / "slurm" / "state.json").read_text())


def logs(script: Path) -> dict[str, str]:
    """The logs of the nodes by their names."""
    (folder,) = (script.parent / "jobs").iterdir()
    return {path.name: path.read_text() for path in folder.glob("*.log")}


def steps(script: Path) -> list[int]:
    lines = (script.parent / "runs" / "tiny-gpt" / "receipts.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_two_nodes_train_together(tmp_path: Path) -> None:
    script = printed(tmp_path, "run.steps=3", "checkpoint.every=0")
    done = submit(script)
    batch_log = next(tmp_path.glob("tiny-gpt-*.log")).read_text()
    assert done.returncode == 0, batch_log + str(logs(script))
    assert steps(script) == [1, 2, 3]
    assert set(logs(script)) == {"0-127.0.0.1.log", "1-127.0.0.2.log"}
    assert "finished" in logs(script)["0-127.0.0.1.log"]
    assert asked(script)["requeued"] == []


def test_a_time_limit_ends_in_a_checkpoint_that_the_requeued_job_goes_on_from(tmp_path: Path) -> None:
    script = printed(tmp_path, "run.steps=100000", "checkpoint.every=100000")
    done = submit(script, STUB_STOP_AT="/100000 ", STUB_STARTS="2")
    log = logs(script)["0-127.0.0.1.log"]
    assert done.returncode == 3, log
    assert len(asked(script)["starts"]) == len(asked(script)["requeued"]) == 2
    assert asked(script)["signals"] == ["TERM@300"]
    assert log.count("stopped by SIGTERM") == 2
    assert steps(script) == list(range(1, steps(script)[-1] + 1))


@pytest.mark.parametrize(
    ("codes", "code", "starts"),
    [("0", 0, 1), ("3,0", 0, 2), ("3,3,1", 1, 3), ("1", 1, 1), ("2", 2, 1), ("137", 137, 1)],
)
def test_only_a_stop_with_a_checkpoint_is_queued_again(
    codes: str, code: int, starts: int, tmp_path: Path
) -> None:
    script = printed(tmp_path, "run.steps=3")
    done = submit(script, STUB_EXIT=codes)
    assert done.returncode == code
    number = asked(script)
    assert (len(number["starts"]), len(number["requeued"])) == (starts, starts - 1)
    assert number["starts"][0]["kill-on-bad-exit"] == "0"


def test_a_container_sees_the_working_folder_and_run_dir(tmp_path: Path) -> None:
    mounts = ("--container-image", "nvcr.io#nvidia/pytorch:25.09-py3", "--container-mounts", "/data:/data:ro")
    script = printed(tmp_path, options=(*TWO_NODES, *mounts, "--setup", 'echo "$NOT_SET" prepared'))
    assert submit(script, STUB_EXIT="0").returncode == 0
    (options,) = asked(script)["starts"]
    runs = tmp_path / "runs"
    assert options["container-image"] == "nvcr.io#nvidia/pytorch:25.09-py3"
    assert options["container-mounts"] == f"{tmp_path}:{tmp_path},{runs}:{runs},/data:/data:ro"
    assert options["container-workdir"] == str(tmp_path)
    assert runs.is_dir()
    assert "prepared" in next(tmp_path.glob("tiny-gpt-*.log")).read_text()


def test_a_script_that_nobody_submitted_says_so(tmp_path: Path) -> None:
    script = printed(tmp_path)
    done = subprocess.run(
        ["bash", str(script)], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == 1
    assert "submit this file with sbatch" in done.stderr


def test_its_directives_are_those_of_the_nodes(tmp_path: Path) -> None:
    stated = directives(printed(tmp_path, options=(*TWO_NODES, "--time", "1-0", "--partition", "a,b")))
    assert stated.pop("requeue") == ""
    assert stated == {
        **{"job-name": "tiny-gpt", "partition": "a,b", "time": "1-0", "nodes": "2", "ntasks-per-node": "1"},
        **{"gpus-per-node": "1", "cpus-per-task": "1", "output": "%x-%j.log", "open-mode": "append"},
        "signal": "TERM@300",
    }
