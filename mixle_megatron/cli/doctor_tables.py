"""What a host executes, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mixle_megatron.capability.decide import EXECUTED, Capability, CapabilityTable
from mixle_megatron.capability.diagnosis import Diagnosis
from mixle_megatron.capability.facts import Cuda, HostFacts, in_words
from mixle_megatron.capability.requirements import REQUIREMENTS
from mixle_megatron.cli.plan_tables import PIPED_WIDTH
from mixle_megatron.cli.terminal_text import byte_count, printable

Row = tuple[str, ...]

_HEADINGS = {"axis": "Axes of a plan", "precision": "Precisions", "feature": "Features"}
_IN_WORDS = {"executed": "yes", "not_run": "not run yet", "withheld": "no", "unsupported": "no"}


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print the verdict, the versions, every capability and the warnings."""
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
    table, facts = diagnosis.table, diagnosis.facts
    console.print(Text(_verdict(table, facts), style="bold"), "", sep="\n")
    _section(console, "What is here", ("", "found", "needed", ""), _found(table, facts))
    with_cuda = bool(facts.cuda.devices)
    for kind, heading in _HEADINGS.items():
        of_kind = [one for one in table.capabilities if one.kind == kind]
        rows = [row for one in of_kind for row in _capability_rows(one, with_cuda)]
        columns = ("", *(("on",) if with_cuda else ()), "executes", "why", "what would make it so")
        _section(console, heading, columns, _merged(rows))
    if diagnosis.evidence is not None:
        console.print(Text("Evidence: " + printable(diagnosis.evidence.message)), "", sep="\n")
    warnings = [(one.about, one.message, one.remedy) for one in diagnosis.hazards]
    if warnings:
        _section(console, "Warnings", ("", "found", "what to do"), warnings)


def _verdict(table: CapabilityTable, facts: HostFacts) -> str:
    if not table.trains:
        return "This host trains nothing: " + "; ".join(
            found.problem for found in table.requirements if not found.met
        )
    if table["fp32"].standings["cuda"].status == "unsupported":
        return "This host trains on the CPU, over gloo."
    return (
        f"This host trains on {_devices(facts.cuda)}, over NCCL, which no test of this version has run, and "
        "on the CPU, over gloo."
    )


def _devices(cuda: Cuda) -> str:
    """The devices of each kind and how many they are: ``2 x NVIDIA A (8.0, 80.00 GiB)``."""
    kinds = [
        f"{each.name} ({in_words(each.compute_capability)}, {byte_count(each.memory_bytes)})"
        for each in cuda.devices
    ]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))


def _found(table: CapabilityTable, facts: HostFacts) -> Iterator[Row]:
    """Everything that was looked for: what training needs, then what it may use."""
    for found in table.requirements:
        yield found.name, found.found or "none", found.needs or "any", found.problem
    needed = {requirement.name for requirement in REQUIREMENTS}
    for name, package in facts.packages.items():
        if name not in needed:
            yield name, package.version or "none", "", package.error or _about(name, facts)
    cuda = facts.cuda
    yield "CUDA devices", _devices(cuda) or "none", "", cuda.error or ""
    yield "CUDA driver", cuda.driver or "none", "", _labelled("runs CUDA", cuda.supported_by_driver)
    yield "CUDA of torch", cuda.built_for or "none", "", ""
    yield "NCCL", cuda.nccl or "none", "", ""
    shared = facts.shared_memory_bytes
    yield "/dev/shm", "none" if shared is None else byte_count(shared), "", ""
    yield "open files", "unlimited" if facts.open_files is None else f"{facts.open_files:,}", "", ""
    for name, value in facts.environment.items():
        yield name, value, "", ""


def _about(name: str, facts: HostFacts) -> str:
    """What is known of an optional package beside its version."""
    engine = facts.transformer_engine
    if name == "transformer-engine":
        checks = [f"{check} {'yes' if one.passes else 'no'}" for check, one in engine.support.items()]
        return "; ".join(filter(None, (_labelled("for CUDA", engine.built_for), ", ".join(checks))))
    if name == "apex" and facts.apex == "other":
        return "not NVIDIA's"
    return ""


def _labelled(label: str, value: str | None) -> str:
    return f"{label} {value}" if value else ""


def _capability_rows(capability: Capability, with_cuda: bool) -> Iterator[Row]:
    """A row for each kind of device that is here; without CUDA one that answers for the host."""
    if not with_cuda:
        telling = capability.telling
        yield capability.name, _IN_WORDS[telling.status], telling.reason, telling.remedy
        return
    for device, standing in capability.standings.items():
        name = capability.name if device == "cpu" else ""
        yield name, device, _IN_WORDS[standing.status], standing.reason, standing.remedy


def _merged(rows: list[Row]) -> Iterator[Row]:
    """The rows, with what repeats the row above left out."""
    above: Row = ()
    for row in rows:
        same = len(above) == len(row) and row[-3:] == above[-3:] and row[-3] == _IN_WORDS[EXECUTED]
        yield (*row[:-2], "″", row[-1]) if same else row
        above = row


def _section(console: Console, title: str, columns: Row, rows: Iterator[Row] | list[Row]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console.print(Text(title, style="bold"), table, "", sep="\n")
