"""``mixle-megatron plan``: the translation of a config, as tables or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML config file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values set over those of the file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Consecutive ranks that share a node.")] = 8,
) -> None:
    """Show what a plan comes to in Megatron's terms: ranks, groups, arguments, batch, memory, values."""
    from mixle_megatron.config.load import check_config, load_config
    from mixle_megatron.explain import explain
    from mixle_megatron.rules import verdict

    loaded = load_config(config, overrides or [])
    verdict(check_config(loaded))
    explanation = explain(loaded, ranks_per_node=ranks_per_node)
    if as_json:
        import json

        typer.echo(json.dumps(explanation, indent=2, ensure_ascii=False))
        return
    from mixle_megatron.cli.plan_tables import print_plan

    print_plan(explanation)
