"""Judging several config files at once, as ``mixle-megatron config check`` does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mixle_megatron.config.check import located
from mixle_megatron.config.here import here_faults
from mixle_megatron.config.load import check_config, load_config, warnings_of
from mixle_megatron.errors import Fault, Refused


@dataclass(frozen=True)
class Checked:
    """The verdict on one file.

    Attributes:
        faults: everything that is wrong with it.
        warnings: what it states to no effect, and what only this host can tell, where that was not
            to be judged.
    """

    faults: tuple[Fault, ...] = ()
    warnings: tuple[Fault, ...] = ()

    @property
    def summary(self) -> str:
        """The verdict in a few words."""
        number = len(self.faults)
        return f"{number} fault{'s' if number > 1 else ''}" if number else "sound"

    def lines(self) -> list[str]:
        """Each fault and each warning as one line."""
        return [*map(str, self.faults), *(f"warning: {fault}" for fault in self.warnings)]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for ``--json``."""
        return {
            "faults": [fault.as_dict() for fault in self.faults],
            "warnings": [fault.as_dict() for fault in self.warnings],
        }


def check_files(arguments: Sequence[str], *, here: bool = False) -> dict[str, Checked]:
    """The verdict on each file.

    Args:
        arguments: config files and, wherever there is a ``=`` in one that is no file, overrides
            of all of them.
        here: judge what only this host can tell as well.

    Raises:
        Refused: no file is named.
    """
    files = [text for text in arguments if "=" not in text or os.path.isfile(text)]
    overrides = [text for text in arguments if text not in files]
    if not files:
        raise Refused([Fault("config", None, "is required", "name a YAML file")])
    return {path: _checked(path, overrides, here) for path in files}


def _checked(path: str, overrides: Sequence[str], here: bool) -> Checked:
    try:
        loaded = load_config(path, overrides)
    except Refused as refused:
        return Checked(refused.faults)
    faults = check_config(loaded, _launched_ranks() if here else None, here)
    warnings = warnings_of(loaded) + ([] if here else located(here_faults(loaded.config), loaded.sources))
    return Checked(tuple(faults), tuple(warnings))


def _launched_ranks() -> int | None:
    """Ranks that a launcher around this process has started, or None."""
    stated = os.environ.get("WORLD_SIZE", "")
    return int(stated) if stated.isdigit() and int(stated) > 0 else None
