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
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            metavar="GPU|SIZE", help="Say whether a rank fits: h100, h200, b200, a100, …, or 80GB, 80GiB."
        ),
    ] = None,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Consecutive ranks that share a node.")] = 8,
) -> None:
    """Show what a plan comes to in Megatron's terms: ranks, groups, arguments, batch, memory, values."""
    from mixle_megatron.config.load import check_config, load_config
    from mixle_megatron.explain import explain
    from mixle_megatron.gpu_memory import gpu_memory as memory_of
    from mixle_megatron.rules import verdict

    gpu = None if gpu_memory is None else memory_of(gpu_memory)
    loaded = load_config(config, overrides or [])
    verdict(check_config(loaded))
    explanation = explain(loaded, ranks_per_node=ranks_per_node, gpu=gpu)
    if as_json:
        import json

        typer.echo(json.dumps(explanation, indent=2, ensure_ascii=False))
        return
    from mixle_megatron.cli.plan_tables import print_plan

    print_plan(explanation)
