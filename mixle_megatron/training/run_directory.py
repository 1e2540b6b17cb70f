"""A run's folder: what is in it, and whether a config may go on from it.

``config.yaml`` is the resolved config, ``receipts.jsonl`` holds each committed step once and in
order, ``evaluations.jsonl`` the losses of held-out text, ``checkpoints/`` Megatron-LM's layout
(``iter_0000100/`` and ``latest_checkpointed_iteration.txt``), and ``stopped.json`` says that the run
ended early. Only the logging rank writes; every rank reads.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mixle_megatron.config.schema import Config, effective_config
from mixle_megatron.errors import CheckpointError, Fault

_TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{7,})")
_FIXED = ("model", "data", "optimizer", "run.seed", "batch.global_batch_size")


class RunDirectory:
    """The folder of one run.

    Attributes:
        path: ``{run.dir}/{run.name}``.
        receipts: committed receipts, one JSON object a line.
        evaluations: evaluations, one JSON object a line.
        stopped: present where the run was asked to stop before its end.
    """

    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.dir).expanduser() / config.run.name
        self.receipts = self.path / "receipts.jsonl"
        self.evaluations = self.path / "evaluations.jsonl"
        self.stopped = self.path / "stopped.json"
        self._config = self.path / "config.yaml"
        self._checkpoints = self.path / "checkpoints"

    # What is there

    def latest_step(self) -> int | None:
        """The step of the checkpoint that the tracker file names; None if there is none.

        Raises:
            CheckpointError: the tracker holds no number, or names a folder that is not there.
        """
        tracker = self._checkpoints / _TRACKER
        if not tracker.exists():
            return None
        text = tracker.read_text(encoding="utf-8").strip()
        if not text.isdigit():
            raise CheckpointError(f"{tracker} holds {text!r}, which is no step")
        if not self.checkpoint(int(text)).is_dir():
            raise CheckpointError(
                f"{tracker} names step {text}, but {self.checkpoint(int(text))} is not there"
            )
        return int(text)

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint of ``step``."""
        return self._checkpoints / f"iter_{step:07d}"

    def stored_values(self) -> dict[str, Any] | None:
        """The resolved config of the run so far, as plain data; None where nothing can be gone on from."""
        if self.latest_step() is None or not self._config.exists():
            return None
        return yaml.safe_load(self._config.read_text(encoding="utf-8"))

    # What goes in

    def start(self, config: Config, step: int) -> None:
        """Write the config, and cut receipts and evaluations past the step that the run goes on from."""
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        values = effective_config(config).model_dump(mode="json")
        _write(self._config, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        for lines in (self.receipts, self.evaluations):
            _write(lines, "".join(line for line in _lines(lines) if _step(line) <= step))
        self.stopped.unlink(missing_ok=True)

    def announce(self, step: int) -> None:
        """Name the checkpoint of ``step`` as the one to go on from."""
        _write(self._checkpoints / _TRACKER, str(step))

    def keep_newest(self, number: int) -> None:
        """Delete all but the newest ``number`` checkpoints."""
        steps = sorted(
            int(match[1]) for match in map(_ITERATION.fullmatch, os.listdir(self._checkpoints)) if match
        )
        for step in steps[:-number]:
            shutil.rmtree(self.checkpoint(step))

    def write_stopped(self, values: Mapping[str, Any]) -> None:
        """Say that the run ended early, for whoever starts it again."""
        _write(self.stopped, json.dumps(dict(values)) + "\n")


def continued(config: Config, stored: Mapping[str, Any]) -> Config:
    """``config`` with the decay that was fixed when the run was created, where it states none itself."""
    if config.optimizer.decay_steps is not None:
        return config
    decay_steps = stored["optimizer"]["decay_steps"]
    optimizer = config.optimizer.model_copy(update={"decay_steps": decay_steps})
    return config.model_copy(update={"optimizer": optimizer})


def resume_faults(config: Config, stored: Mapping[str, Any]) -> list[Fault]:
    """What of ``config`` may not differ from the run that it goes on from, and does."""
    now, before = (dict(_flat(values)) for values in (_effective(config), stored))
    return [
        Fault(
            key,
            now.get(key),
            f"was {before.get(key)} when the run began, and may not change while it goes on",
            f"use {before.get(key)}, or another run.name",
        )
        for key in sorted(now.keys() | before.keys())
        if key.startswith(_FIXED) and now.get(key) != before.get(key)
    ]


def _effective(config: Config) -> dict[str, Any]:
    return effective_config(config).model_dump(mode="json")


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
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


def _write(path: Path, text: str) -> None:
    """Replace a file by ``text`` at once: a reader sees the old one or the new one whole."""
    aside = path.with_name(path.name + ".writing")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
