"""``mixle-megatron checkpoint``: inspect, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Say what is in a checkpoint, and whether it is whole.")

Checkpoint = Annotated[
    Path, typer.Argument(metavar="PATH", help="An iter_* folder, or a run's folder for its newest.")
]


@app.command()
def inspect(
    path: Checkpoint,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what is in a checkpoint: tensors, plan, versions, step. Nothing that is in it is run."""
    _quieten()
    from mixle_megatron.checkpoint.inspection import inspect, locate
    from mixle_megatron.errors import CheckpointError, Fault, Refused

    folder = locate(path)
    try:
        inspection = inspect(folder)
    except CheckpointError as error:
        raise Refused([Fault("PATH", str(folder), f"cannot be inspected: {error}")]) from error
    if as_json:
        import json

        typer.echo(json.dumps(inspection.as_dict(), indent=2, default=repr))
        return
    from mixle_megatron.cli.checkpoint_tables import print_inspection

    print_inspection(inspection)


@app.command()
def verify(
    path: Checkpoint,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare each file of a checkpoint with its manifest: exit code 1 where it is not whole, or has none."""
    _quieten()
    from mixle_megatron.checkpoint.completeness import damage
    from mixle_megatron.checkpoint.inspection import locate

    folder = locate(path)
    found = damage(folder, checksums=True, needs_manifest=True)
    if as_json:
        import json

        listed = [one.as_dict() for one in found]
        typer.echo(json.dumps({"path": str(folder), "whole": not found, "damage": listed}, indent=2))
    else:
        from mixle_megatron.cli.checkpoint_tables import verdict_lines

        for line in verdict_lines(folder, found):
            typer.echo(line, err=bool(found))
    if found:
        raise typer.Exit(1)


def _quieten() -> None:
    """Keep what Megatron prints when it is imported out of the output."""
    from mixle_megatron.training.quiet import quieten

    quieten()
