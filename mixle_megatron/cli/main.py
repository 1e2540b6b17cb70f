"""The program ``mixle-megatron``: its commands, and its exit codes.

0 done; 2 the input was refused (one message on stderr, no traceback); 3 stopped early with a
checkpoint, to be started again; 1 anything else. Command modules import what they need when they
run, so that ``plan`` and ``config`` never load torch.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mixle_megatron.cli import checkpoint as checkpoint_commands
from mixle_megatron.cli import config as config_commands
from mixle_megatron.cli import data as data_commands
from mixle_megatron.cli.checkpoint_export import export, import_
from mixle_megatron.cli.doctor import doctor
from mixle_megatron.cli.launch import app as launch_app
from mixle_megatron.cli.plan import plan
from mixle_megatron.cli.verify import verify
from mixle_megatron.errors import DoesNotFit, RanksLost, Refused

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_STOPPED_EARLY = 3


class RefusingGroup(TyperGroup):
    """A group of commands that turns a refusal, or the loss of other ranks, into one message and a code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; what it refuses ends here, and what it cannot go on without."""
        try:
            return super().invoke(ctx)
        except Refused as refused:
            if not (isinstance(refused, DoesNotFit) and os.environ.get("RANK", "0") != "0"):
                typer.echo(refusal_message(refused), err=True)  # which every rank has found alike
            raise typer.Exit(EXIT_REFUSED) from None
        except RanksLost as lost:
            typer.echo(f"failed: {lost}", err=True)
            raise typer.Exit(EXIT_FAILED) from None


def refusal_message(refused: Refused) -> str:
    """All faults of a refusal, one a line."""
    number = len(refused.faults)
    lines = [
        f"refused: {number} fault{'s' if number > 1 else ''}",
        *(f"  {fault}" for fault in refused.faults),
    ]
    return "\n".join(lines)


app = typer.Typer(
    name="mixle-megatron",
    cls=RefusingGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Pretrain with NVIDIA Megatron-Core as a backend of mixle, on GPU and on CPU.",
)
app.command("doctor")(doctor)
app.command("plan")(plan)
app.command("verify")(verify)
app.add_typer(config_commands.app, name="config")
checkpoint_commands.app.command("export")(export)
checkpoint_commands.app.command("import")(import_)
app.add_typer(checkpoint_commands.app, name="checkpoint")
app.add_typer(launch_app, name="launch")
app.add_typer(data_commands.app, name="data")


@app.command("pretrain")
def pretrain(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML config file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values set over those of the file.")
    ] = None,
    no_resume: Annotated[
        bool, typer.Option("--no-resume", help="Begin the run anew; what there is of it is set aside, whole.")
    ] = False,
) -> None:
    """Pretrain a model: start the plan's local ranks, or join those of torchrun or srun."""
    from mixle_megatron.cli.pretrain import pretrain as run

    run(config, overrides or [], anew=no_resume)


def main() -> None:
    """Run the program with the process's arguments, and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app()


if __name__ == "__main__":
    main()
