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
def verify(path: Checkpoint) -> None:
    """Compare each file of a checkpoint with its manifest: exit code 1 where it is not whole, or has none."""
    _quieten()
    from mixle_megatron.checkpoint.completeness import damage
    from mixle_megatron.checkpoint.inspection import locate
    from mixle_megatron.checkpoint.manifest import MANIFEST, read_manifest
    from mixle_megatron.cli.checkpoint_tables import byte_count, printable

    folder = locate(path)
    found = damage(folder, checksums=True, needs_manifest=True)
    for one in found:
        typer.echo(printable(f"{folder}/{one}"), err=True)
    if found:
        unverified = all(one.file == MANIFEST and one.kind == "missing" for one in found)
        verdict = "complete by its own metadata, but not verified" if unverified else "damaged"
        typer.echo(printable(f"{folder}: {verdict}"), err=True)
        raise typer.Exit(1)
    sizes = [record.size for record in read_manifest(folder).files.values()]
    typer.echo(
        printable(f"{folder}: whole ({len(sizes)} files, {byte_count(sum(sizes))}, checksums compared)")
    )


def _quieten() -> None:
    """Keep what Megatron prints when it is imported out of the output."""
    from mixle_megatron.training.quiet import quieten

    quieten()
