"""Weights from a file as the checkpoint of step 0, which a run or a session starts from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch.distributed as dist
from mixle.utils.parallel.training_contracts import ParallelPlan

from mixle_megatron.backend import MegatronBackend
from mixle_megatron.checkpoint.import_weights import fill_stage
from mixle_megatron.checkpoint.iterations import steps_in
from mixle_megatron.checkpoint.run_lock import run_lock
from mixle_megatron.checkpoint.weight_sources import WeightSource, open_weights
from mixle_megatron.config.here import data_request
from mixle_megatron.config.load import LoadedConfig, check_config, load_config
from mixle_megatron.config.model import ModelSection
from mixle_megatron.config.schema import Config, decay_steps
from mixle_megatron.data import GlobalBatchLoader, prepare_data
from mixle_megatron.errors import Fault, Refused, refuse_if_any
from mixle_megatron.models.gpt import GPT
from mixle_megatron.optimizer_settings import OptimizerSettings
from mixle_megatron.rules import verdict
from mixle_megatron.session import MegatronSession
from mixle_megatron.training.run_directory import RunDirectory, data_cache

_SEED = 1234
_CONFIG = "config.yaml"
"""The config in a run's folder (:mod:`mixle_megatron.training.run_directory`)."""


@dataclass(frozen=True)
class Imported:
    """What an import made.

    Attributes:
        checkpoint: the folder of the checkpoint.
        run: the run that starts from it; None where the checkpoint is a folder by itself.
        tensors: how many tensors were imported.
        elements: their elements, all together.
    """

    checkpoint: Path
    run: Path | None
    tensors: int
    elements: int


def import_weights(
    source: Path, target: Path, *, config: Path | None = None, overrides: tuple[str, ...] = ()
) -> Imported:
    """Make the checkpoint of step 0 of the weights in a file.

    One rank on the CPU holds the whole model meanwhile, with its optimizer, which has not stepped. What
    it saves loads under every plan.

    Args:
        source: a file of mixle's ``LM.save``; a safetensors file, or a folder of them.
        target: the folder of the run that the config describes, which then starts from these weights; or
            another folder, which becomes the checkpoint itself.
        config: the run's config file; None for the ``config.yaml`` that is in ``target``, or else the
            model that ``source`` describes.
        overrides: ``key=value`` over the config.

    Raises:
        Refused: with all faults, before anything is written.
    """
    weights = open_weights(source)
    loaded = _config_of(target, config, overrides)
    if loaded is None:
        return _import_alone(weights, target, _described(weights), None)
    directory = RunDirectory(loaded.config)
    if directory.path.resolve() != target.resolve():
        return _import_alone(weights, target, loaded.config.model, loaded.config)
    verdict(check_config(loaded, here=True))
    return _import_into_run(weights, directory, loaded.config)


def _import_into_run(weights: WeightSource, directory: RunDirectory, config: Config) -> Imported:
    refuse_if_any(_run_faults(directory))
    with _session(config.model, config) as session:
        fill_stage(session.stage, config.model, weights)
        with run_lock(directory.path):
            refuse_if_any(_run_faults(directory))
            position = _first_position(config)
            directory.start(config, 0)
            checkpoint = directory.checkpoint(0)
            session.save_checkpoint(str(checkpoint), loader_state=position, extra=_origin(weights))
            directory.announce(0)
    return _imported(weights, checkpoint, directory.path)


def _import_alone(
    weights: WeightSource, target: Path, model: ModelSection, config: Config | None
) -> Imported:
    """The checkpoint as a folder by itself, with the optimizer of ``config``, or ``prepare``'s own."""
    refuse_if_any(_folder_faults(target))
    with _session(model, config) as session:
        fill_stage(session.stage, model, weights)
        session.save_checkpoint(str(target), extra=_origin(weights))
    return _imported(weights, target, None)


def _config_of(target: Path, config: Path | None, overrides: tuple[str, ...]) -> LoadedConfig | None:
    """The config that is given; else that of the run which ``target`` is, wherever it lies by now."""
    if config is not None:
        return load_config(config, overrides)
    if not (target / _CONFIG).is_file():
        refuse_if_any(
            Fault("--config", None, f"is not given, which {each} is laid over") for each in overrides
        )
        return None
    loaded = load_config(target / _CONFIG, overrides)
    here = {"dir": str(target.absolute().parent), "name": target.absolute().name}
    run = loaded.config.run.model_copy(update=here)
    return replace(loaded, config=loaded.config.model_copy(update={"run": run}))


def _described(weights: WeightSource) -> ModelSection:
    if weights.model is not None:
        return weights.model
    rule = f"is not given, and {weights.path} does not describe its model"
    raise Refused([Fault("--config", None, rule, "give the config of the run")])


def _run_faults(directory: RunDirectory) -> list[Fault]:
    steps = steps_in(directory.checkpoints)
    if not steps:
        return []
    rule = f"has checkpoints already, the newest of step {steps[-1]}"
    return [Fault("RUN_OR_FOLDER", str(directory.path), rule, "use another run.name")]


def _folder_faults(target: Path) -> list[Fault]:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return []
    return [Fault("RUN_OR_FOLDER", str(target), "is there already", "name a folder that is not, or is empty")]


@contextmanager
def _session(model: ModelSection, config: Config | None) -> Iterator[MegatronSession]:
    """One rank that holds the whole model in fp32."""
    starts_group = not dist.is_initialized()
    seed = _SEED if config is None else config.run.seed
    optimizer = None
    if config is not None:
        optimizer = OptimizerSettings.from_section(config.optimizer, decay_steps=decay_steps(config))
    session = MegatronBackend().prepare(
        GPT(model, seed=seed), plan=ParallelPlan(), optimizer=optimizer, device="cpu", seed=seed
    )
    try:
        yield session
    finally:
        session.close()
        if starts_group and dist.is_initialized():
            dist.destroy_process_group()


def _first_position(config: Config) -> dict[str, Any]:
    """Where a run stands in its data before its first update."""
    data = prepare_data(data_request(config), cache_dir=data_cache(config))
    rows = config.batch.global_batch_size
    loader = GlobalBatchLoader(
        data.training,
        global_batch_size=rows,
        micro_batch_size=rows,
        data_parallel_rank=0,
        data_parallel_size=1,
        gradient_accumulation_steps=1,
        microbatches=1,
    )
    return loader.state_dict()


def _origin(weights: WeightSource) -> dict[str, str]:
    return {"imported_from": str(weights.path)}


def _imported(weights: WeightSource, checkpoint: Path, run: Path | None) -> Imported:
    return Imported(checkpoint, run, len(weights.shapes), sum(map(prod, weights.shapes.values())))
