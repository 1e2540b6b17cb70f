"""What is wrong with a checkpoint, one thing at a time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["missing", "truncated", "longer", "changed", "unexpected", "unreadable", "incomplete"]

READ_BY_NAME = (".distcp", ".metadata", ".pt", ".json")
"""Endings of what Megatron or torch would read although no manifest names it: Megatron-Core 0.19, for
one, takes a ``common.pt`` that is there in place of the state that the checkpoint was saved with."""


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong with one file of a checkpoint.

    Attributes:
        file: its name in the checkpoint's folder.
        kind: what is wrong with it, as one word.
        detail: the same in full, with its numbers.
    """

    file: str
    kind: Kind
    detail: str

    @property
    def prevents_loading(self) -> bool:
        """Whether to go on without this checkpoint; a stray file that nothing reads is no reason to."""
        return self.kind != "unexpected" or self.file.endswith(READ_BY_NAME)

    def __str__(self) -> str:
        return f"{self.file}: {self.detail}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for ``--json``."""
        return asdict(self)
