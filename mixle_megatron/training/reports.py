"""Whom a run tells of its updates and checkpoints, beside its own folder."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from mixle.utils.parallel.training_contracts import StepReceipt


class Reports(Protocol):
    """Told the same on every rank, in the same order, between two updates."""

    def committed(self, receipt: StepReceipt) -> None:
        """An update was committed."""

    def saved(self, step: int, folder: Path) -> None:
        """The checkpoint of ``step`` has its name and is announced."""
