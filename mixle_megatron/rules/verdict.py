"""Which exception a list of faults amounts to."""

from __future__ import annotations

from collections.abc import Iterable

from mixle_megatron.errors import Fault, Refused, Unsupported

NOT_EXECUTED = "is not executed by this version: "
"""How the rule of a fault begins whose input is sound, but whose execution is not built."""

NOT_HERE = "is not executed on this host: "
"""How the rule of a fault begins whose input is sound, but for which this host lacks something."""


def is_unsupported(fault: Fault) -> bool:
    """Whether the fault is about what this version or this host executes, and not about the input."""
    return fault.rule.startswith((NOT_EXECUTED, NOT_HERE))


def verdict(faults: Iterable[Fault]) -> None:
    """Raise what the faults amount to; return where there are none.

    Raises:
        Unsupported: every fault is about what this version or this host executes.
        Refused: at least one fault is about the input itself.
    """
    found = tuple(faults)
    if not found:
        return
    raise (Unsupported if all(map(is_unsupported, found)) else Refused)(found)
