"""What the plugin refuses, and how it says so.

Every refusal of an input is a :class:`Refused` that carries one :class:`Fault` for each thing
that is wrong with it. The command line, ``--json``, the API and the tests all use these objects;
nothing formats a refusal by hand. This module imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with an input.

    Attributes:
        field: dotted name of the key or argument, as the user wrote it (``plan.tp``).
        value: what the user gave; ``None`` where the key is missing.
        rule: what must hold, with its numbers (``must divide model.num_attention_heads=8``).
        remedy: what would work (``use 1, 2, 4 or 8``), or ``""`` where nothing can be named.
        source: ``file:line`` that the value came from, ``command line`` for an override, or None.
    """

    field: str
    value: Any
    rule: str
    remedy: str = ""
    source: str | None = None

    def __str__(self) -> str:
        given = self.field if self.value is None else f"{self.field}={self.value}"
        text = f"{given} {self.rule}"
        if self.remedy:
            text += f"; {self.remedy}"
        return f"{self.source}: {text}" if self.source else text

    def as_dict(self) -> dict[str, Any]:
        """The fault as plain data, for ``--json``."""
        return asdict(self)


class MixleMegatronError(Exception):
    """The root of every error that this package raises on purpose."""


class Refused(MixleMegatronError, ValueError):
    """The input cannot be run; raised before the first process group is made, on every rank alike.

    Attributes:
        faults: everything that is wrong with the input, in the order in which it was written.
    """

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))

    def __reduce__(self) -> tuple[type, tuple[tuple[Fault, ...]]]:
        return (type(self), (self.faults,))


class Unsupported(Refused, NotImplementedError):
    """The input is sound, but this host or this version does not execute what it asks for.

    It is a ``NotImplementedError`` too, as mixle's ``BackendCapabilities.validate`` raises one.
    """


class CheckpointError(MixleMegatronError, RuntimeError):
    """A checkpoint could not be written, or does not fit what it is loaded into."""


class RanksLost(MixleMegatronError, RuntimeError):
    """Another rank died, or does not answer within the collective timeout; what it was doing is the cause."""


class DoesNotFit(Refused, CheckpointError):
    """A checkpoint is not of what it should be loaded into; nothing of that was changed.

    Raised on every rank alike, with one fault for each difference.
    """


class SessionError(MixleMegatronError, RuntimeError):
    """A session was used in a way that its state does not allow (closed, failed, pending)."""


def refuse_if_any(faults: Iterable[Fault]) -> None:
    """Raise :class:`Refused` with all of ``faults`` if there are any."""
    found = tuple(faults)
    if found:
        raise Refused(found)
