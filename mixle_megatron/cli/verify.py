"""``mixle-megatron verify``: proves what is claimed of this host, and keeps the evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def verify(
    axes: Annotated[str, typer.Option("--axes", help="Only these axes of a plan: tp,pp,...")] = "",
    precisions: Annotated[str, typer.Option("--precisions", help="Only these precisions: bf16,...")] = "",
    checkpoints: Annotated[
        str, typer.Option("--checkpoints", help="Only these optimizer formats: fully_reshardable,...")
    ] = "",
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, or auto.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where to keep the evidence; by default in the user's cache folder."),
    ] = None,
) -> None:
    """Train small models under every plan and precision this host claims, and compare with one rank in fp32.

    Exit code 1 where a claim is withdrawn.
    """
    from mixle_megatron.capability.gather import facts_of_this_host
    from mixle_megatron.cli.verify_tables import TrialProgress, print_evidence
    from mixle_megatron.evidence.selection import chosen_device, selected
    from mixle_megatron.evidence.store import keep, writable
    from mixle_megatron.evidence.verification import most_ranks, runnable, verify_here

    facts = facts_of_this_host()
    on = chosen_device(device, facts)
    claims = selected(
        facts, on, axes=_names(axes), precisions=_names(precisions), checkpoints=_names(checkpoints)
    )
    path = writable(out)
    with TrialProgress(sum(1 for _ in runnable(claims, most_ranks(on, facts)))) as progress:
        evidence = verify_here(claims, on, facts, progress.begin)
    keep(evidence, path)
    if as_json:
        typer.echo(json.dumps({"path": str(path), **evidence.as_dict()}, indent=2, ensure_ascii=False))
    else:
        print_evidence(evidence, path)
    if any(each.withdrawn for each in evidence.claims):
        raise typer.Exit(1)


def _names(text: str) -> list[str]:
    """The words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]
