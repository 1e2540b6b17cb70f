"""The pretraining of a config as one worker of Ray Train, for mixle's launcher.

``RayTrainLauncher().launch(mixle_megatron.ray_train_loop, plan=plan, train_loop_config={"config": ...})``.
Ray has started torch's default group by then, and mixle has put the worker's attestation and the plan into
its config. The run's folder is as ever: checkpoints lie there, on a file system that all workers see, and a
loop that Ray starts again goes on from the newest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mixle.utils.parallel.training_contracts import StepReceipt

from mixle_megatron.config.load import LoadedConfig, config_from_mapping, load_config
from mixle_megatron.config.schema import Config, effective_plan
from mixle_megatron.errors import Fault, Refused, refuse_if_any
from mixle_megatron.plan_record import AXES, PlanRecord
from mixle_megatron.training.command import alone_on, checked, data_of, finished
from mixle_megatron.training.lost_ranks import naming_lost_ranks
from mixle_megatron.training.pretraining import pretrain
from mixle_megatron.training.quiet import quieten
from mixle_megatron.training.run_directory import RunDirectory
from mixle_megatron.training.signals import StopRequest

POINTER = "mixle_megatron.json"
"""In what Ray calls a checkpoint: ``{"path": the folder of the checkpoint, "step": committed updates}``."""

_KEYS = {"config", "overrides", "mixle_parallel_plan", "mixle_worker_topology_attestation"}


def ray_train_loop(worker_config: Mapping[str, Any]) -> None:
    """Pretrain as the worker that this process is; mixle's RayTrainLauncher calls it.

    Args:
        worker_config: ``config``, a file or the mapping that one holds; ``overrides``, a list of
            ``key=value`` over a file; and what mixle adds: the plan and the worker's attestation.
            Relative paths start from the folder that Ray runs a worker in, so absolute ones are better.

    Metrics are reported every ``logging.every`` updates (``step``, ``loss``, ``tokens``, ``grad_norm``,
    ``learning_rate``), and with each checkpoint a pointer to its folder, :data:`POINTER`; nothing is copied.

    Raises:
        Refused: the config, or its plan is not the one that Ray was given.
    """
    quieten()
    loaded = _loaded(worker_config)
    config = checked(loaded)
    directory = RunDirectory(config)
    if finished(directory, config):
        return
    with alone_on(directory), naming_lost_ranks():
        pretrain(
            config,
            data_of(config),
            StopRequest(),  # Ray runs the loop in a thread, which gets no signals
            reports=RayReports(every=config.logging.every, steps=config.run.steps),
            attestation=worker_config["mixle_worker_topology_attestation"],
        )


class RayReports:
    """What a run tells Ray Train, the same on every worker: Ray waits for all of them at each report."""

    def __init__(self, *, every: int, steps: int) -> None:
        self._every = every
        self._steps = steps
        self._metrics: dict[str, Any] = {}

    def committed(self, receipt: StepReceipt) -> None:
        """An update was committed."""
        self._metrics = {
            "step": receipt.step,
            "loss": receipt.loss,
            "tokens": receipt.global_tokens_observed,
            "grad_norm": receipt.extra["grad_norm"],
            "learning_rate": receipt.extra["learning_rate"],
        }
        if receipt.step % self._every == 0 or receipt.step == self._steps:
            self._report(None)

    def saved(self, step: int, folder: Path) -> None:
        """The checkpoint of ``step`` has its name and is announced."""
        with TemporaryDirectory() as pointer:
            text = json.dumps({"path": str(folder.resolve()), "step": step})
            (Path(pointer) / POINTER).write_text(text, encoding="utf-8")
            self._report(pointer)

    def _report(self, pointer: str | None) -> None:
        from ray import train

        first = train.get_context().get_world_rank() == 0
        checkpoint = train.Checkpoint.from_directory(pointer) if pointer and first else None
        train.report(dict(self._metrics), checkpoint=checkpoint)


def _loaded(worker_config: Mapping[str, Any]) -> LoadedConfig:
    """The config of the run, under the plan that Ray has started workers for.

    Raises:
        Refused: with what is missing, unknown, or differs from that plan.
    """
    unknown = sorted(worker_config.keys() - _KEYS)
    faults = [
        Fault(f"train_loop_config.{name}", None, "is not known", "use config, overrides") for name in unknown
    ]
    missing = sorted(_KEYS - {"overrides"} - worker_config.keys())
    remedy = "give train_loop_config={'config': ...} to mixle's RayTrainLauncher().launch"
    faults += [Fault(f"train_loop_config.{name}", None, "is missing", remedy) for name in missing]
    refuse_if_any(faults)
    loaded = _read(worker_config["config"], worker_config.get("overrides", ()))
    refuse_if_any(_plan_faults(loaded.config, worker_config["mixle_parallel_plan"]))
    return loaded


def _read(config: Any, overrides: Sequence[str]) -> LoadedConfig:
    if isinstance(config, str | os.PathLike):
        return load_config(Path(config), overrides)
    if overrides:
        raise Refused([Fault("train_loop_config.overrides", None, "is for a file, and config is none")])
    return LoadedConfig(config_from_mapping(config))


def _plan_faults(config: Config, given: Mapping[str, Any]) -> list[Fault]:
    """Where the axes of Ray's plan are not the config's; its microbatches follow from the config's batch."""
    ours, theirs = effective_plan(config), PlanRecord.from_mapping(given)
    return [
        Fault(
            f"plan.{axis}",
            getattr(ours, axis),
            f"is {getattr(theirs, axis)} in the plan that Ray was given",
            f"launch with ParallelPlan({axis}={getattr(ours, axis)}, ...), or override plan.{axis}",
        )
        for axis in AXES
        if getattr(ours, axis) != getattr(theirs, axis)
    ]
