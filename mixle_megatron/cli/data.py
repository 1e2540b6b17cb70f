"""``mixle-megatron data``: build, inspect."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Build Megatron's indexed datasets from text, and look at them.")


class Form(StrEnum):
    """What input files hold."""

    AUTO = "auto"
    TEXT = "text"
    JSON_LINES = "jsonl"
    PARQUET = "parquet"


@app.command()
def build(
    inputs: Annotated[
        list[str],
        typer.Option(
            "--input", metavar="PATH", help="A file, a folder, a quoted glob, or stdlib. May be repeated."
        ),
    ],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", metavar="NAME", help="byte, or hf:PATH of a tokenizer.json.")
    ],
    output: Annotated[
        str, typer.Option("--output", metavar="PREFIX", help="Writes PREFIX.bin, PREFIX.idx and PREFIX.json.")
    ],
    form: Annotated[
        Form, typer.Option("--format", help="What the files hold; auto tells it by their names.")
    ] = Form.AUTO,
    json_key: Annotated[
        str, typer.Option("--json-key", help="The key, or the column of Parquet, that holds the text.")
    ] = "text",
    append_eod: Annotated[
        bool, typer.Option("--append-eod/--no-append-eod", help="End each document with the end token.")
    ] = True,
    eod_token: Annotated[
        str | None, typer.Option("--eod-token", help="That token, where the tokenizer does not name its own.")
    ] = None,
    max_bad: Annotated[
        int, typer.Option("--max-bad", help="Bad lines to leave out; more of them fail the build.")
    ] = 0,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Processes.", show_default="one a core")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what has the same PREFIX.")] = False,
) -> None:
    """Turn text into Megatron's indexed dataset; stopped, the same command goes on where it was."""
    from mixle_megatron.training.quiet import quieten

    quieten()
    from mixle_megatron.cli.build_progress import summary_lines, watched_build
    from mixle_megatron.data.build_errors import BuildFailed, BuildStopped
    from mixle_megatron.data.building import BuildRequest
    from mixle_megatron.data.inputs import Format

    request = BuildRequest(
        inputs=inputs,
        tokenizer=tokenizer,
        output=output,
        form=None if form is Form.AUTO else Format(form.value),
        json_key=json_key,
        append_eod=append_eod,
        eod_token=eod_token,
        max_bad=max_bad,
        workers=workers,
        overwrite=overwrite,
    )
    try:
        built, seconds = watched_build(request)
    except BuildStopped as stopped:
        typer.echo(f"stopped: {stopped}", err=True)
        raise typer.Exit(3) from None
    except BuildFailed as failed:
        typer.echo(f"failed: {failed}", err=True)
        raise typer.Exit(1) from None
    for line in built.record.bad[:20]:
        typer.echo(f"left out: {line}", err=True)
    for line in summary_lines(output, built, seconds):
        typer.echo(line)


@app.command()
def inspect(
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="The path without .bin or .idx.")],
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", min=1, help="Tokens are to be below it.")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=0, help="Documents to show.")] = 3,
    quick: Annotated[
        bool, typer.Option("--quick", help="Judge by the index and the sizes, without reading tokens.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what is in an indexed dataset: exit code 1 where it is damaged."""
    from mixle_megatron.training.quiet import quieten

    quieten()
    from mixle_megatron.cli.build_progress import ScanProgress
    from mixle_megatron.data.indexed_inspection import inspect_corpus

    with ScanProgress(shown=not as_json) as watch:
        found = inspect_corpus(prefix, vocab_size=vocab_size, samples=samples, quick=quick, watch=watch)
    if as_json:
        import json

        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        from mixle_megatron.cli.data_tables import print_corpus

        print_corpus(found)
    if found.damage:
        raise typer.Exit(1)
