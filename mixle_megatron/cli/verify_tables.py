"""What ``verify`` shows: a bar while it runs, or a line a trial; then every measurement."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from mixle_megatron.cli.plan_tables import PIPED_WIDTH
from mixle_megatron.cli.terminal_text import printable
from mixle_megatron.evidence.claims import Trial
from mixle_megatron.evidence.record import ClaimEvidence, Evidence, Measurement

_COLUMNS = ("claim", "", "trial", "loss", "gradient", "weights", "same")


class TrialProgress:
    """Shows which trial is running, on stderr."""

    def __init__(self, trials: int) -> None:
        """Show nothing yet; there will be so many ``trials``."""
        console = Console(file=sys.stderr)
        self._terminal = console.is_terminal
        self._trials, self._begun = trials, 0
        columns = (TextColumn("verifying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, TextColumn("{task.description}"), console=console, transient=True)
        self._task = self._bar.add_task("starting ranks", total=trials)

    def __enter__(self) -> TrialProgress:
        if self._terminal:
            self._bar.start()
        return self

    def __exit__(self, *_error: Any) -> None:
        if self._terminal:
            self._bar.stop()

    def begin(self, trial: Trial) -> None:
        """Show that a trial begins, and the one before it is done."""
        self._begun += 1
        if self._terminal:
            self._bar.update(self._task, completed=self._begun - 1, description=trial.name)
        else:
            print(f"{self._begun} of {self._trials}  {trial.name}", file=sys.stderr, flush=True)


def print_evidence(evidence: Evidence, path: Path) -> None:
    """Print the verdict, every measurement, what is wrong, and where the evidence is kept."""
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
    console.print(Text(_verdict(evidence), style="bold"), "", sep="\n")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in _COLUMNS:
        words = column in ("claim", "trial")
        table.add_column(column, overflow="fold", no_wrap=not words, min_width=12 if words else None)
    for claim in evidence.claims:
        for row in _rows(claim):
            table.add_row(*(Text(printable(cell)) for cell in row))
    console.print(table, "", sep="\n")
    for claim in evidence.claims:
        if not claim.holds:
            console.print(Text(printable(f"{claim.name}: {claim.problem}")))
    said = "Errors are relative; two runs of a trial are the same if they are equal to the last bit."
    console.print(Text(f"{said} The evidence is kept in {path}."))


def _verdict(evidence: Evidence) -> str:
    withdrawn = [each.name for each in evidence.claims if each.withdrawn]
    if withdrawn:
        return f"Withdrawn on this host: {', '.join(withdrawn)}."
    not_run = [each.name for each in evidence.claims if not each.holds]
    held = sum(each.holds for each in evidence.claims)
    said = f"{held} claim{' holds' if held == 1 else 's hold'} on this host."
    return said + (f" Not run: {', '.join(not_run)}." if not_run else "")


def _rows(claim: ClaimEvidence) -> list[tuple[str, ...]]:
    standing = "withdrawn" if claim.withdrawn else "holds" if claim.holds else "not run"
    rows = [_row(each) for each in claim.measurements] or [("",) * 5]
    names = [(claim.name, standing), *[("", "")] * (len(rows) - 1)]
    return [(*name, *row) for name, row in zip(names, rows, strict=True)]


def _row(measured: Measurement) -> tuple[str, ...]:
    if not measured.samples:
        return (measured.trial, "", "", "", "")
    errors = (measured.loss, measured.gradient, measured.parameters)
    shown = [f"{each.relative:.1e}" for each in errors]
    return measured.trial, *shown, "yes" if measured.bit_identical else "no"
