"""``mixle-megatron checkpoint export`` and ``checkpoint import``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Source = Annotated[
    Path, typer.Argument(metavar="PATH", help="A checkpoint's folder, or a run's: its newest is meant.")
]
Config = Annotated[Path | None, typer.Option("--config", metavar="CONFIG", help="The run's config file.")]


class Format(StrEnum):
    """What a checkpoint can be exported to."""

    MIXLE = "mixle"
    SAFETENSORS = "safetensors"


class Dtype(StrEnum):
    """What the parameters of an exported file are stored in."""

    FP32 = "fp32"
    BF16 = "bf16"


def export(
    path: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.")],
    to: Annotated[Format, typer.Option("--to", help="mixle: what LM.load reads.")],
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of the parameters in the file.")] = Dtype.FP32,
    config: Config = None,
    heads: Annotated[
        int | None,
        typer.Option("--heads", help="Heads of mixle's CausalLM, where no config says what the model is."),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option("--vocab-size", help="Tokens, where nothing else says which rows are padding."),
    ] = None,
) -> None:
    """Write the trained model of a checkpoint to one file, in one process."""
    from mixle_megatron.training.quiet import quieten

    quieten()
    from mixle_megatron.checkpoint.export import export_checkpoint
    from mixle_megatron.errors import CheckpointError

    try:
        done = export_checkpoint(
            path,
            out,
            to=to.value,
            dtype=dtype.value,
            config=config,
            heads=heads,
            vocab_size=vocab_size,
        )
    except CheckpointError as error:
        typer.echo(f"the checkpoint is damaged: {error}", err=True)
        raise typer.Exit(1) from None
    held = f"{done.tensors} tensors of {done.elements:,} elements in {done.dtype}"
    typer.echo(f"{done.path}: {held}, from {done.source}")


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="What mixle's LM.save wrote; a safetensors file, or a folder of them."
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_FOLDER",
            help="The config's run folder, which then starts from these weights; another folder becomes "
            "the checkpoint itself.",
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values set over those of the config.")
    ] = None,
    config: Config = None,
) -> None:
    """Make the checkpoint of step 0 from weights of the same model."""
    from mixle_megatron.training.quiet import quieten

    quieten()
    from mixle_megatron.training.initial_weights import import_weights

    done = import_weights(source, target, config=config, overrides=tuple(overrides or ()))
    typer.echo(f"{done.checkpoint}: {done.tensors} tensors of {done.elements:,} elements")
    if done.run is None:
        typer.echo("a checkpoint by itself: no run starts from it unless it is told to")
    else:
        typer.echo(f"the run in {done.run} starts from it")
