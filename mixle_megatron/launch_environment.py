"""What a launcher tells a rank through its environment. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mixle_megatron.errors import Fault

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets, and torch's ``env://`` rendezvous reads."""

_NUMBERS = ("RANK", "WORLD_SIZE")


def environment_faults(environment: Mapping[str, str] = os.environ) -> list[Fault]:
    """Faults of a rendezvous that only part of the environment describes, or not in numbers."""
    if not any(name in environment for name in _NUMBERS):
        return []
    absent = [
        Fault(
            name,
            None,
            "is not set, but other variables of a distributed launch are",
            "start it with torchrun",
        )
        for name in VARIABLES
        if name not in environment
    ]
    wrong = [
        Fault(name, environment[name], "is no number of ranks", "start it with torchrun")
        for name in _NUMBERS
        if name in environment and not environment[name].isdigit()
    ]
    return absent + wrong
