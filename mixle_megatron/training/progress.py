"""What a run shows while it runs: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

_SMOOTHING = 0.1


class TrainingProgress:
    """Step, loss, tokens per second and time left of the updates of one rank.

    Attributes:
        tokens_per_second: a running mean over the last ten or so updates.
    """

    def __init__(self, mode: str, *, first: int, steps: int, every: int, shown: bool) -> None:
        """
        Args:
            mode: ``auto``, ``bar``, ``plain`` or ``off``.
            first: committed updates before this start.
            steps: updates of the whole run.
            every: updates between two plain lines.
            shown: False on every rank but the logging one.
        """
        self._console = Console(file=sys.stdout)
        if mode == "auto":
            mode = "bar" if self._console.is_terminal else "plain"
        self._mode = mode if shown else "off"
        self._every, self._steps = every, steps
        self.tokens_per_second = 0.0
        self._last = perf_counter()
        self._bar = _bar(self._console)
        self._task = self._bar.add_task("training", total=steps, completed=first, loss="", speed="")

    def __enter__(self) -> TrainingProgress:
        if self._mode == "bar":
            self._bar.start()
        self._last = perf_counter()
        return self

    def __exit__(self, *_error: Any) -> None:
        if self._mode == "bar":
            self._bar.stop()

    def update(self, step: int, loss: float, tokens: int) -> None:
        """Show one committed update of ``tokens`` tokens and ``loss`` nats a token."""
        now = perf_counter()
        speed = tokens / max(now - self._last, 1e-9)
        self._last = now
        if self.tokens_per_second:
            speed = _SMOOTHING * speed + (1 - _SMOOTHING) * self.tokens_per_second
        self.tokens_per_second = speed
        if self._mode == "bar":
            self._bar.update(self._task, completed=step, loss=f"{loss:.4f}", speed=f"{speed:,.0f}")
        elif self._mode == "plain" and (step % self._every == 0 or step == self._steps):
            left = (self._steps - step) * tokens / speed
            self.say(f"step {step}/{self._steps}  loss {loss:.4f}  {speed:,.0f} tokens/s  {left:.0f} s left")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._mode == "bar":
            self._bar.console.print(text, highlight=False)
        elif self._mode == "plain":
            print(text, flush=True)

    def pause(self) -> AbstractContextManager[None]:
        """Leave out of the speed what is done inside: evaluation and checkpoints."""
        return _Pause(self)


class _Pause(AbstractContextManager[None]):
    def __init__(self, progress: TrainingProgress) -> None:
        self._progress = progress
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, *_error: Any) -> None:
        self._progress._last += perf_counter() - self._began


def _bar(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]} tokens/s"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
    )


class ReadingProgress:
    """A bar over the bytes of a corpus that is being turned into tokens; nothing off a terminal."""

    def __init__(self, *, shown: bool) -> None:
        console = Console(file=sys.stdout)
        self._progress = Progress(
            TextColumn("reading text"), BarColumn(), TimeRemainingColumn(), console=console
        )
        self._context = self._progress if shown and console.is_terminal else nullcontext()
        self._task = self._progress.add_task("reading", total=None)

    def __enter__(self) -> ReadingProgress:
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def __call__(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` bytes are read."""
        self._progress.update(self._task, completed=done, total=total)
