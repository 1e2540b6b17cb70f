"""mixle's RayTrainLauncher with the plugin's loop, on real Ray with two workers on the CPU."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_gpts import parallel_plan
from tiny_run import CONFIG, overrides

import mixle_megatron
from mixle_megatron.errors import Refused

ray = pytest.importorskip("ray", reason="ray[train] is in the extra 'dev'")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray of this machine alone, whose workers import the tests' modules too."""
    paths = os.pathsep.join([str(Path(__file__).parent), str(CONFIG.parent.parent)])
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables})
    yield
    ray.shutdown()


def launched(folder: Path, *more: str) -> Any:
    """What Ray says of a run on two workers."""
    from mixle.utils.parallel.training_launchers import RayTrainLauncher
    from ray.train import RunConfig

    values = overrides(folder / "runs", "plan.dp_shard=1", "plan.tp=2", "evaluation.every=0", *more)
    return RayTrainLauncher().launch(
        mixle_megatron.ray_train_loop,
        plan=parallel_plan(tp=2),
        train_loop_config={"config": str(CONFIG), "overrides": values},
        use_gpu=False,
        run_config=RunConfig(name="run", storage_path=str(folder / "ray")),
    )


def losses(folder: Path) -> list[float]:
    lines = (folder / "runs" / "tiny-gpt" / "receipts.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_two_workers_train_as_two_ranks_do_and_report_it(cluster: None, run_on: Any, tmp_path: Path) -> None:
    from tiny_run import train_here

    steps = ("checkpoint.every=2", "run.steps=4")
    result = launched(tmp_path, *steps)
    assert result.metrics["step"] == 4
    assert result.metrics["loss"] == losses(tmp_path)[-1]
    with result.checkpoint.as_directory() as folder:
        pointer = json.loads((Path(folder) / "mixle_megatron.json").read_text())
    assert pointer["step"] == 4
    assert Path(pointer["path"]) == tmp_path / "runs" / "tiny-gpt" / "checkpoints" / "iter_0000004"
    assert Path(pointer["path"]).is_dir()

    alone = tmp_path / "alone" / "runs"
    run_on(2, train_here, str(alone), *steps, "plan.dp_shard=1", "plan.tp=2", "evaluation.every=0")
    assert losses(tmp_path) == losses(tmp_path / "alone")


def test_a_plan_that_is_not_the_configs_is_refused_before_anything_is_read() -> None:
    told = {
        "config": str(CONFIG),
        "mixle_parallel_plan": parallel_plan(tp=2).as_dict(),
        "mixle_worker_topology_attestation": {},
    }
    with pytest.raises(Refused) as caught:
        mixle_megatron.ray_train_loop(told)
    assert {fault.field for fault in caught.value.faults} == {"plan.dp_shard", "plan.tp"}


def test_what_a_loop_is_told_is_refused_by_name() -> None:
    with pytest.raises(Refused) as caught:
        mixle_megatron.ray_train_loop({"configuration": str(CONFIG)})
    assert [fault.field for fault in caught.value.faults] == [
        "train_loop_config.configuration",
        "train_loop_config.config",
        "train_loop_config.mixle_parallel_plan",
        "train_loop_config.mixle_worker_topology_attestation",
    ]
