"""What is in a checkpoint, and what is wrong with it, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mixle_megatron.checkpoint.damage import Damage
from mixle_megatron.checkpoint.inspection import Inspection, StoredTensor
from mixle_megatron.checkpoint.manifest import MANIFEST, read_manifest
from mixle_megatron.cli.plan_tables import PIPED_WIDTH
from mixle_megatron.cli.terminal_text import byte_count, printable


def print_inspection(inspection: Inspection) -> None:
    """Print the facts of a checkpoint, its tensors, its objects and its files."""
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
    totals = inspection.totals
    parameters = f"Parameters: {totals['parameters']:,} in {byte_count(totals['parameter_bytes'])}"
    sections = {
        str(inspection.path): _rows(("", ""), _facts(inspection)),
        parameters: _tensor_table(inspection.parameters),
        f"Optimizer: {byte_count(totals['optimizer_bytes'])}": _tensor_table(inspection.optimizer),
        f"Objects: {byte_count(totals['object_bytes'])}": _size_table("object", inspection.objects),
        f"Files: {byte_count(totals['file_bytes'])}": _size_table("file", inspection.files),
    }
    for title, table in sections.items():
        console.print(Text(printable(title), style="bold"), table, "", sep="\n")
    for note in inspection.notes:
        console.print(Text(printable(f"note: {note}")))


def verdict_lines(folder: Path, found: Sequence[Damage]) -> list[str]:
    """What is wrong with a checkpoint, a line each, and then the verdict."""
    if not found:
        sizes = [record.size for record in read_manifest(folder).files.values()]
        verdict = f"whole ({len(sizes)} files, {byte_count(sum(sizes))}, checksums compared)"
    elif all(one.file == MANIFEST and one.kind == "missing" for one in found):
        verdict = "complete by its own metadata, but not verified"
    else:
        verdict = "damaged"
    return [printable(line) for line in (*(f"{folder}/{one}" for one in found), f"{folder}: {verdict}")]


def _facts(inspection: Inspection) -> Iterable[tuple[str, str]]:
    """The facts that are known, one a row."""
    for name in ("step", "precision", "optimizer_format"):
        yield name.replace("_", " "), _word(getattr(inspection, name))
    for name in ("plan", "versions", "model"):
        yield name, _word(getattr(inspection, name))


def _word(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_word(entry)}" for key, entry in value.items() if entry is not None)
    return str(value)


def _tensor_table(tensors: Sequence[StoredTensor]) -> Table:
    rows = (
        (tensor.name, _shape(tensor.shape), tensor.dtype, f"{tensor.shards:,}", byte_count(tensor.bytes))
        for tensor in tensors
    )
    return _rows(("tensor", "shape", "dtype", "shards", "size"), rows, numbers=("shards", "size"))


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _size_table(kind: str, sizes: Mapping[str, int]) -> Table:
    rows = ((name, byte_count(size)) for name, size in sizes.items())
    return _rows((kind, "size"), rows, numbers=("size",))


def _rows(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, show_header=any(columns))
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table
