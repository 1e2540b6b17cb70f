"""``mixle-megatron pretrain``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer


def pretrain(config: Path, overrides: Sequence[str], *, anew: bool) -> None:
    """Run the config, and exit with the code that says how it ended."""
    from mixle_megatron.training.command import run_pretraining

    raise typer.Exit(run_pretraining(config, overrides, anew=anew))
