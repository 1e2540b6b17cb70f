"""A run's folder: what is in it, and whether a config may go on from it.

``config.yaml`` is the resolved config, ``receipts.jsonl`` holds each committed step once and in
order, ``evaluations.jsonl`` the losses of held-out text, ``checkpoints/`` Megatron-LM's layout
(``iter_0000100/`` and ``latest_checkpointed_iteration.txt``), and ``stopped.json`` says that the run
ended early. ``before-1`` and so on are what the run was before it began anew. Only the logging rank
writes; every rank reads. Judging checkpoints takes torch, which is loaded only where that is done: the
process that launches ranks does without.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mixle_megatron.checkpoint.durable import delete_old, recover_all, rename, sync_folder, write_text
from mixle_megatron.checkpoint.iterations import TRACKER, iteration_name, named_by_tracker, steps_in
from mixle_megatron.config.schema import Config, effective_config
from mixle_megatron.errors import CheckpointError, Fault

_FIXED = ("model", "data", "optimizer", "run.seed", "batch.global_batch_size")
_FREE = re.compile(r"data\.(cache|path|blend\.\d+\.path)")
"""What of the data may change: where it lies. What is there, the loader compares by its content."""


def data_cache(config: Config) -> Path:
    """Where the tokens of all runs in a ``run.dir`` lie."""
    return Path(config.run.dir).expanduser() / ".data"


class RunDirectory:
    """The folder of one run.

    Attributes:
        path: ``{run.dir}/{run.name}``.
        receipts: committed receipts, one JSON object a line.
        evaluations: evaluations, one JSON object a line.
        stopped: present where the run was asked to stop before its end.
        checkpoints: the folder of its checkpoints.
    """

    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.dir).expanduser() / config.run.name
        self.receipts = self.path / "receipts.jsonl"
        self.evaluations = self.path / "evaluations.jsonl"
        self.stopped = self.path / "stopped.json"
        self._config = self.path / "config.yaml"
        self.checkpoints = self.path / "checkpoints"

    # What is there

    def latest_step(self) -> int | None:
        """The step of the checkpoint that the tracker file names; None where it names none that is there.

        Which checkpoint a run goes on from, :meth:`settle` decides.
        """
        named = named_by_tracker(self.checkpoints)
        if named is None or not named.isdigit() or not self.checkpoint(int(named)).is_dir():
            return None
        return int(named)

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint of ``step``."""
        return self.checkpoints / iteration_name(step)

    def stored_values(self) -> dict[str, Any] | None:
        """The resolved config of the run so far, as plain data; None where nothing can be gone on from."""
        if not steps_in(self.checkpoints) or not self._config.exists():
            return None
        return yaml.safe_load(self._config.read_text(encoding="utf-8"))

    # What goes in

    def set_aside(self) -> Path | None:
        """Move everything of the run so far into a folder of its own; one process calls it.

        That folder, ``before-1`` and so on, is laid out as a run's. Checkpoints are moved last: while they
        are in their place the run can be gone on with, and after a crash what is left follows the rest.

        Returns:
            The folder; None where there is nothing of the run yet.
        """
        there = [path for path in (*self._records, self.checkpoints) if path.exists()]
        if not there:
            return None
        number = 1
        while any((self._before(number) / path.name).exists() for path in there):
            number += 1
        self._before(number).mkdir(exist_ok=True)
        for path in there:
            rename(path, self._before(number) / path.name)
        sync_folder(self.path)
        return self._before(number)

    def _before(self, number: int) -> Path:
        return self.path / f"before-{number}"

    @property
    def _records(self) -> tuple[Path, ...]:
        """What lies beside the checkpoints."""
        return self.receipts, self.evaluations, self.stopped, self.path / "tensorboard", self._config

    def start(self, config: Config, step: int) -> None:
        """Write the config, and cut receipts and evaluations past the step that the run goes on from."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        values = effective_config(config).model_dump(mode="json")
        write_text(self._config, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        for lines in (self.receipts, self.evaluations):
            write_text(lines, "".join(line for line in _lines(lines) if _step(line) <= step))
        self.stopped.unlink(missing_ok=True)

    def settle(self) -> tuple[int | None, list[str]]:
        """The step of the newest whole checkpoint, damaged newer ones set aside; one process calls it.

        Returns:
            The step, None where there is no checkpoint; and what was done, one sentence each.

        Raises:
            CheckpointError: there are checkpoints, and none is whole.
        """
        from mixle_megatron.checkpoint.newest import find_newest, settle

        recover_all(self.checkpoints)
        choice = find_newest(self.checkpoints)
        return choice.step, settle(self.checkpoints, choice)

    def announce(self, step: int) -> None:
        """Verify the checkpoint of ``step``, and name it as the one to go on from.

        Raises:
            CheckpointError: it is not as its manifest has it.
        """
        from mixle_megatron.checkpoint.completeness import damage

        found = damage(self.checkpoint(step), checksums=True, needs_manifest=True)
        if found:
            raise CheckpointError(f"{self.checkpoint(step)}: " + "; ".join(map(str, found)))
        write_text(self.checkpoints / TRACKER, str(step))

    def delete_old(self, announced: int, *, keep: int, keep_every: int) -> None:
        """Delete whole checkpoints older than the ``announced`` one.

        Args:
            announced: the step of the newest.
            keep: how many of the newest stay.
            keep_every: those whose step is a multiple of it stay too; 0 for none.
        """
        delete_old(self.checkpoints, announced, _is_whole, keep=keep, keep_every=keep_every)

    def write_stopped(self, values: Mapping[str, Any]) -> None:
        """Say that the run ended early, for whoever starts it again."""
        write_text(self.stopped, json.dumps(dict(values)) + "\n")


def continued(config: Config, stored: Mapping[str, Any]) -> Config:
    """``config`` with the decay that was fixed when the run was created, where it states none itself."""
    if config.optimizer.decay_steps is not None:
        return config
    decay_steps = stored["optimizer"]["decay_steps"]
    optimizer = config.optimizer.model_copy(update={"decay_steps": decay_steps})
    return config.model_copy(update={"optimizer": optimizer})


def resume_faults(config: Config, stored: Mapping[str, Any]) -> list[Fault]:
    """What of ``config`` may not differ from the run that it goes on from, and does."""
    directory = RunDirectory(config).path
    now, before = (dict(_flat(values)) for values in (_effective(config), stored))
    return [
        Fault(
            key,
            now.get(key),
            f"was {before.get(key)} when the run began, and may not change while it goes on",
            f"use {before.get(key)}, or another run.name, with run.resume.from={directory}",
        )
        for key in sorted(now.keys() | before.keys())
        if key.startswith(_FIXED) and not _FREE.fullmatch(key) and now.get(key) != before.get(key)
    ]


def _effective(config: Config) -> dict[str, Any]:
    return effective_config(config).model_dump(mode="json")


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []


def _step(line: str) -> float:
    """The step of a line; one that a crash cut short belongs to no step that is kept."""
    try:
        return int(json.loads(line)["step"])
    except ValueError:
        return float("inf")


def _is_whole(folder: Path) -> bool:
    from mixle_megatron.checkpoint.completeness import damage

    return not damage(folder, checksums=False, needs_manifest=False)
