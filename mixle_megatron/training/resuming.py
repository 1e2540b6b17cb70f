"""Where a rank's training begins: its run's newest checkpoint, another's (``run.resume``), or the start."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mixle_megatron.checkpoint.first_rank import on_first_rank
from mixle_megatron.checkpoint.origin import find_origin
from mixle_megatron.config.schema import Config
from mixle_megatron.data import PrefetchingLoader
from mixle_megatron.session import MegatronSession
from mixle_megatron.training.beginning import FROM, unseen_differences
from mixle_megatron.training.run_directory import RunDirectory


def resume(
    config: Config,
    session: MegatronSession,
    loader: PrefetchingLoader,
    directory: RunDirectory,
    *,
    anew: bool,
) -> int | None:
    """Bring session, loader and folder to where the run goes on. Collective.

    Args:
        config: of the run.
        session: has made no update.
        loader: stands at the start of the data.
        directory: of the run.
        anew: whether to leave the run's own checkpoints, which are then set aside with all else of it.

    Returns:
        The step of the run's own checkpoint; None where it goes on from none.

    Raises:
        CheckpointError: no checkpoint is whole, it does not fit the session, or the folder cannot be written.
    """
    step = None if anew else _newest_step(directory)
    if step is not None:
        payload = session.load_checkpoint(str(directory.checkpoint(step)))
        loader.load_state_dict(payload["loader_state"])
    elif config.run.resume is not None:
        _begin(config, session, loader)
    # Every rank has read the folder before the first one changes it.
    dist.barrier()
    if anew:
        _set_aside(directory)
    on_first_rank(partial(directory.start, config, session.step), doing="begin the run's records")
    return step


def _newest_step(directory: RunDirectory) -> int | None:
    """The step that every rank goes on from; one of them looks, and says what it set aside."""
    step, warnings = on_first_rank(directory.settle, doing="find the newest checkpoint")
    _warn(warnings)
    return step


def _begin(config: Config, session: MegatronSession, loader: PrefetchingLoader) -> None:
    """Take from the checkpoint of ``run.resume`` what it says to."""
    resume: Any = config.run.resume

    def choose() -> tuple[Path, list[str]]:
        origin = find_origin(resume.path, FROM, checksums=True)
        return origin.folder, [*origin.warnings, *unseen_differences(config, origin.folder)]

    folder, warnings = on_first_rank(choose, doing="find the checkpoint to begin from")
    _warn(warnings)
    payload = session.load_checkpoint(str(folder), what=resume.what, keep_schedule=True)
    if resume.what == "model":
        return
    position = payload["loader_state"]
    differing = loader.differences(position)
    if differing:
        _warn(f"the data is read from its start: {fault.field} differs from {folder}" for fault in differing)
    else:
        loader.load_state_dict(position)


def _set_aside(directory: RunDirectory) -> None:
    aside = on_first_rank(directory.set_aside, doing="set aside what there is of the run")
    if aside is not None:
        _warn([f"what there was of the run was set aside as {aside}"])


def _warn(warnings: Iterable[str]) -> None:
    """Say it once."""
    if dist.get_rank() == 0:
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
