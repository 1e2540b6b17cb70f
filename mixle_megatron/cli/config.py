"""``mixle-megatron config``: check, show, schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Check a config, show its effective values, print its schema.")

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values set over those of the file.")
]


@app.command()
def check(
    configs: Annotated[
        list[str],
        typer.Argument(metavar="CONFIG", help="Config files, and values over all of them."),
    ],
    here: Annotated[
        bool, typer.Option("--here", help="Judge what only this host can tell, too: the data, the ranks.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all faults as one JSON object.")] = False,
) -> None:
    """Judge config files without running them: exit code 0 where all are sound, 2 where one is not."""
    from mixle_megatron.config.check_files import check_files

    checked = check_files(configs, here=here)
    if as_json:
        import json

        typer.echo(
            json.dumps({"files": {path: found.as_dict() for path, found in checked.items()}}, indent=2)
        )
    else:
        for path, found in checked.items():
            typer.echo(f"{path}: {found.summary}", err=bool(found.faults))
            for line in found.lines():
                typer.echo(f"  {line}", err=True)
    if any(found.faults for found in checked.values()):
        raise typer.Exit(2)


@app.command()
def show(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML config file.")],
    overrides: Overrides = None,
) -> None:
    """Print the effective config as YAML, every default included."""
    from mixle_megatron.config.load import check_config, load_config, resolved_yaml
    from mixle_megatron.rules import verdict

    loaded = load_config(config, overrides or [])
    verdict(check_config(loaded))
    typer.echo(resolved_yaml(loaded.config), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a config file, for editors."""
    import json

    from mixle_megatron.config.schema import Config

    typer.echo(json.dumps(Config.model_json_schema(), indent=2, ensure_ascii=False))
