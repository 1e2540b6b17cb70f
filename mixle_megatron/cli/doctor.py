"""``mixle-megatron doctor``: what this host executes, and why not the rest."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what this host executes, and why not the rest: exit code 1 where it can train nothing."""
    from mixle_megatron.training.quiet import quieten

    quieten()
    from mixle_megatron.capability.diagnosis import diagnose
    from mixle_megatron.capability.imports import facts_after_importing
    from mixle_megatron.evidence.store import kept_evidence

    facts = facts_after_importing()
    diagnosis = diagnose(facts, kept_evidence(facts))
    if as_json:
        import json

        typer.echo(json.dumps(diagnosis.as_dict(), indent=2, ensure_ascii=False))
    else:
        from mixle_megatron.cli.doctor_tables import print_diagnosis

        print_diagnosis(diagnosis)
    if not diagnosis.table.trains:
        raise typer.Exit(1)
