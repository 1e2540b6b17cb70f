"""``mixle-megatron pretrain``: what this process is, and what it therefore does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mixle_megatron.checkpoint.run_lock import run_lock
from mixle_megatron.config.check import located
from mixle_megatron.config.elastic import changes, replanned
from mixle_megatron.config.here import data_request
from mixle_megatron.config.load import LoadedConfig, check_config, load_config, warnings_of
from mixle_megatron.config.schema import Config, effective_plan
from mixle_megatron.rules import verdict
from mixle_megatron.training.beginning import begun
from mixle_megatron.training.joining import is_first, is_one_of_many, is_restarted, join
from mixle_megatron.training.launch import launch_local_ranks
from mixle_megatron.training.node import Node
from mixle_megatron.training.node_ranks import launch_node_ranks
from mixle_megatron.training.progress import ReadingProgress
from mixle_megatron.training.quiet import quieten
from mixle_megatron.training.run_directory import RunDirectory, continued, data_cache, resume_faults
from mixle_megatron.training.signals import StopRequest

DONE, FAILED, STOPPED_EARLY = 0, 1, 3
_HELD = "MIXLE_MEGATRON_RUN"
"""Tells local ranks that their launcher holds the run's folder."""

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""Has torch's allocator on the CPU ask for pages of 2 MiB, where the kernel gives them on request.

Forking the writer of an asynchronous checkpoint then takes two thirds of the time, and what it costs the
updates after it a quarter less. torch reads it when it allocates for the first time.
"""


def run_pretraining(path: Path, overrides: Sequence[str], *, anew: bool = False) -> int:
    """Check the config, then start the plan's local ranks, or train as the rank that this process is.

    Args:
        path: the config file.
        overrides: ``key=value`` over it.
        anew: begin the run anew, with what there is of it set aside. Where a launcher starts a failed job
            again by itself, that has been done.

    Returns:
        The exit code: 0 done, 1 failed, 2 refused, 3 stopped early with a checkpoint.

    Raises:
        Refused: with all faults, before any rank is started or any process group made.
    """
    node = join()
    quieten()
    os.environ.setdefault(HUGE_PAGES, "1")
    anew = anew and not is_restarted()
    loaded = _for_the_ranks_there(load_config(path, overrides))
    config = checked(loaded, anew=anew)
    _warn(loaded)
    directory = RunDirectory(config)
    if not anew and finished(directory, config):
        return DONE
    ranks = effective_plan(config).world_size
    with alone_on(directory):
        if ranks == 1 or is_one_of_many():
            return _train(config, anew=anew)
        options = ["--no-resume"] if anew else []
        return _launch(config, directory, node or ranks, ["pretrain", *options, str(path), *overrides])


def _for_the_ranks_there(loaded: LoadedConfig) -> LoadedConfig:
    """The config, planned for the ranks that a launcher started where it is elastic; that is said once."""
    if "WORLD_SIZE" not in os.environ:
        return loaded
    ranks = int(os.environ["WORLD_SIZE"])
    planned = replanned(loaded, ranks)
    if planned is not loaded and is_first() and _HELD not in os.environ:
        print(f"planned for {ranks} ranks: {changes(loaded.config, planned.config)}", flush=True)
    return planned


@contextmanager
def alone_on(directory: RunDirectory) -> Iterator[None]:
    """Hold the run's folder for this job: in its launcher, or else in its first rank."""
    if not is_first() or os.environ.get(_HELD) == str(directory.path):
        yield
        return
    with run_lock(directory.path):
        os.environ[_HELD] = str(directory.path)
        try:
            yield
        finally:
            del os.environ[_HELD]


def checked(loaded: LoadedConfig, *, anew: bool = False) -> Config:
    """The config, judged by every rule, by this host's data and by the run that it goes on from.

    Args:
        loaded: the config.
        anew: whether the run's own checkpoints are left out of it.
    """
    world_size = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None
    faults = check_config(loaded, world_size=world_size, here=True)
    verdict(faults)
    stored = None if anew else RunDirectory(loaded.config).stored_values()
    if stored is None:
        config, faults = begun(loaded.config)
        verdict(located(faults, loaded.sources))
        return config
    config = continued(loaded.config, stored)
    verdict(located(resume_faults(config, stored), loaded.sources))
    return config


def _warn(loaded: LoadedConfig) -> None:
    """Say what the config states to no effect: once, where the run is started."""
    if is_first() and "TORCHELASTIC_RUN_ID" not in os.environ and _HELD not in os.environ:
        for warning in warnings_of(loaded):
            print(f"warning: {warning}", file=sys.stderr)


def finished(directory: RunDirectory, config: Config) -> bool:
    step = directory.latest_step()
    if step is None or step < config.run.steps:
        return False
    if is_first():
        print(f"{directory.path} has finished: step {step} of {config.run.steps}. Raise run.steps to go on.")
    return True


def data_of(config: Config) -> Any:
    from mixle_megatron.data import prepare_data

    with ReadingProgress(shown=is_first()) as progress:
        return prepare_data(data_request(config), cache_dir=data_cache(config), progress=progress)


def _launch(config: Config, directory: RunDirectory, ranks: int | Node, arguments: list[str]) -> int:
    """Start local ranks: all of them, or those of this node.

    The text is read once, here, before they are there to wait for it.
    """
    data_of(config)
    if isinstance(ranks, Node):
        node, number = ranks, ranks.ranks
        place = f"node {node.index + 1} of {node.nodes}"
        print(f"starting {number} local ranks of {config.run.name} on {place}", flush=True)
        return launch_node_ranks(node, arguments, threads_per_rank=threads(config, number))
    directory.stopped.unlink(missing_ok=True)
    print(f"starting {ranks} local ranks of {config.run.name}", flush=True)
    code = launch_local_ranks(ranks, arguments, threads_per_rank=threads(config, ranks))
    if code == DONE and directory.stopped.exists():
        return stopped_code(json.loads(directory.stopped.read_text(encoding="utf-8"))["checkpoint"])
    return code


def threads(config: Config, local_ranks: int) -> int:
    """CPU threads of each rank: what is stated, else an equal share of the cores."""
    stated = config.host.threads_per_rank
    return max(1, len(os.sched_getaffinity(0)) // local_ranks) if stated == "auto" else stated


def _train(config: Config, *, anew: bool) -> int:
    stop = StopRequest().install()
    streams = data_of(config)
    from mixle_megatron.training.lost_ranks import naming_lost_ranks
    from mixle_megatron.training.pretraining import pretrain

    with naming_lost_ranks():
        outcome = pretrain(config, streams, stop, anew=anew)
    if outcome.stopped_by is None:
        return DONE
    # An elastic agent takes every other code for a failure; stopped.json tells its caller.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return DONE
    return stopped_code(outcome.checkpoint)


def stopped_code(checkpoint: Any) -> int:
    """3 where there is a checkpoint to go on from, 1 where checkpoints are switched off."""
    return FAILED if checkpoint is None else STOPPED_EARLY
