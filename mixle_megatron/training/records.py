"""What the logging rank writes of each step: receipts, evaluations, TensorBoard events."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from mixle_megatron.errors import Fault, Refused
from mixle_megatron.training.evaluating import SetEvaluation
from mixle_megatron.training.run_directory import RunDirectory


class Records:
    """Appends one line a committed step and one an evaluation, each whole when it returns.

    On every rank but the logging one it writes nothing.
    """

    def __init__(self, directory: RunDirectory, *, writes: bool, tensorboard: bool) -> None:
        self._directory = directory
        self._writes = writes
        self._events = _event_writer(directory.path / "tensorboard") if writes and tensorboard else None

    def receipt(self, receipt: Any) -> None:
        """Write a committed receipt."""
        self._append(self._directory.receipts, receipt.as_dict())
        if self._events is not None:
            extra = receipt.extra
            values = {
                "loss/train": receipt.loss,
                "gradient_norm": extra["grad_norm"],
                "learning_rate": extra["learning_rate"],
                **{f"seconds/{name}": seconds for name, seconds in extra["seconds"].items()},
                "seconds/data": extra["data_seconds"],
            }
            self._scalars(values, receipt.step)

    def evaluation(self, step: int, evaluation: SetEvaluation) -> None:
        """Write what one validation set gave after ``step``."""
        self._append(self._directory.evaluations, {"step": step, **evaluation.as_dict()})
        if self._events is not None:
            values = {"loss": evaluation.loss, "perplexity": evaluation.perplexity}
            values["bits_per_byte"] = evaluation.bits_per_byte
            known = {f"{kind}/{evaluation.name}": each for kind, each in values.items() if each is not None}
            self._scalars(known, step)

    def close(self) -> None:
        """Flush the events."""
        if self._events is not None:
            self._events.close()

    def _append(self, path: Path, values: dict[str, Any]) -> None:
        if self._writes:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")

    def _scalars(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._events.add_scalar(name, value, step)


def wants_tensorboard(stated: bool | str) -> bool:
    """Whether events are written: ``auto`` means where tensorboard is installed.

    Raises:
        Refused: events are asked for and tensorboard is not installed.
    """
    installed = importlib.util.find_spec("tensorboard") is not None
    if stated == "auto":
        return installed
    if stated and not installed:
        remedy = "install mixle-megatron[tensorboard], or use auto"
        raise Refused(
            [Fault("logging.tensorboard", True, "needs tensorboard, which is not installed", remedy)]
        )
    return bool(stated)


def _event_writer(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))
