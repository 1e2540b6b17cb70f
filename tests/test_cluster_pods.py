"""Printed manifests, run on this machine as a kubelet would run their pods; and the ranks of one node."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_run import CONFIG, overrides

from mixle_megatron.training import node_ranks
from mixle_megatron.training.node import Node
from mixle_megatron.training.node_ranks import launch_node_ranks

NO_EVALUATION = ("evaluation.every=0", "data.validation_fraction=0")
POD = ("--image", "image", "--volume-claim", "claim")
EXIT_3, EXIT_2, EXIT_1, WELL = ("import sys; sys.exit(3)", "import sys; sys.exit(2)", "1 / 0", "pass")
FOREVER = "import signal; signal.pause()"


def printed(folder: Path, kind: str, ranks: int, *values: str) -> list[dict[str, Any]]:
    """The manifests of a tiny run on two nodes."""
    stated = overrides(folder / "runs", f"plan.dp_shard={2 * ranks}", "host.device=cpu", *NO_EVALUATION)
    layout = ["--nodes", "2", "--gpus-per-node", str(ranks), "--kind", kind]
    command = [sys.executable, "-m", "mixle_megatron", "launch", "kubernetes", str(CONFIG), *stated, *values]
    done = subprocess.run([*command, *layout, *POD], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


@contextmanager
def pods(
    folder: Path, manifests: list[dict[str, Any]], template: dict[str, Any], given: dict[str, str]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Both pods of a job: the container's command, in its environment, with its config where it looks.

    ``given`` is what the operator sets in every pod. Names of pods are addresses of this machine here.
    """
    (container,) = template["spec"]["containers"]
    config = folder / "config.yaml"
    config.write_text(manifests[0]["data"]["config.yaml"], encoding="utf-8")
    command = [str(config) if word.startswith("/etc/") else word for word in container["command"]]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    place = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "mixle_megatron", *command[1:]],
            env=outside() | given | environment_of(container, index) | place,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    assert command[0] == "mixle-megatron"
    try:
        yield started
    finally:
        for pod in started:
            pod.kill()
            pod.wait()


def outside() -> dict[str, str]:
    """The environment of the tests without what makes a process a rank."""
    return {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }


def environment_of(container: dict[str, Any], index: int) -> dict[str, str]:
    """A container's environment; the only reference among its values is the pod's index in its Job."""
    field = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    assert all(each["valueFrom"] == field for each in container["env"] if "valueFrom" in each)
    return {each["name"]: each.get("value", str(index)) for each in container["env"]}


def steps(folder: Path) -> list[int]:
    lines = (folder / "runs" / "tiny-gpt" / "receipts.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_pod_that_is_told_to_stop_ends_all_of_them_with_a_checkpoint(tmp_path: Path) -> None:
    """Evicting one pod of a JobSet ends the ranks of both, two each, with the code that restarts them."""
    manifests = printed(tmp_path, "jobset", 2, "run.steps=100000", "checkpoint.every=100000")
    template = manifests[1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    with pods(tmp_path, manifests, template, {}) as (first, second):
        shown = []
        for line in first.stdout:
            shown.append(line)
            if line.startswith("step 1/"):
                second.send_signal(signal.SIGTERM)
        assert (first.wait(), second.wait()) == (3, 3), "".join(shown) + second.stdout.read()
    assert any("starting 2 local ranks of tiny-gpt on node 1 of 2" in line for line in shown)
    assert any("stopped by" in line for line in shown)
    assert steps(tmp_path) == list(range(1, steps(tmp_path)[-1] + 1))
    assert json.loads((tmp_path / "runs" / "tiny-gpt" / "stopped.json").read_text())["checkpoint"]


def test_pods_of_a_trainjob_train_to_the_end(tmp_path: Path) -> None:
    manifests = printed(tmp_path, "trainjob", 1, "run.steps=3", "checkpoint.every=0")
    runtime, job = manifests[1]["spec"], manifests[2]["spec"]
    template = runtime["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    trainer = job["trainer"]
    template["spec"]["containers"][0]["env"] += [
        {"name": "PET_NNODES", "value": str(trainer["numNodes"])},
        {"name": "PET_NPROC_PER_NODE", "value": str(trainer["numProcPerNode"])},
        {
            "name": "PET_NODE_RANK",
            "valueFrom": {
                "fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
            },
        },
    ]
    with pods(tmp_path, manifests, template, {}) as started:
        told = [pod.communicate()[0] for pod in started]
        assert [pod.returncode for pod in started] == [0, 0], told
    assert steps(tmp_path) == [1, 2, 3]


def test_a_node_of_another_plan_is_refused_before_any_rank_is_started(tmp_path: Path) -> None:
    told = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "0",
        "PET_NPROC_PER_NODE": "4",
        "PET_MASTER_ADDR": "localhost",
    }
    command = [sys.executable, "-m", "mixle_megatron", "pretrain", str(CONFIG), *overrides(tmp_path)]
    done = subprocess.run(command, env=outside() | told, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is not the number of ranks there are, 8" in done.stderr
    assert "starting" not in done.stdout


@pytest.mark.parametrize(
    ("ranks", "code", "said"),
    [
        ((WELL, WELL), 0, ""),
        ((EXIT_3, WELL), 3, ""),
        ((EXIT_3, EXIT_3), 3, ""),
        ((EXIT_2, FOREVER), 2, ""),
        ((FOREVER, EXIT_1), 1, "rank 7 ended with exit code 1; the other ranks of this node were stopped."),
        (
            (FOREVER, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
            1,
            "rank 7 was killed by SIGKILL; the other ranks of this node were stopped.",
        ),
    ],
)
def test_a_nodes_exit_code_is_that_of_its_ranks(
    ranks: tuple[str, ...],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With programs in place of ``python -m mixle_megatron``, and no time for those that would never end."""
    programs = iter(ranks)
    popen = subprocess.Popen
    monkeypatch.setattr(node_ranks, "_GRACE", 0.0)
    monkeypatch.setattr(
        node_ranks.subprocess,
        "Popen",
        lambda command, **options: popen([command[0], "-c", next(programs)], **options),
    )
    node = Node(index=3, nodes=4, ranks=2, address="localhost", port=29500)
    assert launch_node_ranks(node, ["pretrain"], threads_per_rank=1) == code
    assert said in capfd.readouterr().err
