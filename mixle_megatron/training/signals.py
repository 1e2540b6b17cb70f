"""Ending a run at a step boundary when it is asked to stop."""

from __future__ import annotations

import signal
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what Slurm, Kubernetes and torchrun send before they kill."""


class StopRequest:
    """Whether this process was asked to stop.

    The first signal only sets a flag, which the loop reads between two updates; the second ends the
    process at once with KeyboardInterrupt.

    Attributes:
        signal_name: the first signal's name, or None.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def install(self) -> StopRequest:
        """Take over Ctrl-C and SIGTERM for the rest of the process."""
        for number in STOPPING:
            signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.signal_name is not None:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name

    def __bool__(self) -> bool:
        return self.signal_name is not None
