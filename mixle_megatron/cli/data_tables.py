"""What is in an indexed corpus, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mixle_megatron.cli.checkpoint_tables import byte_count, printable
from mixle_megatron.cli.plan_tables import PIPED_WIDTH
from mixle_megatron.data.indexed_inspection import CorpusInspection, LengthBin, Sample

BAR_WIDTH = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_SAMPLE_WIDTH = 160


def print_corpus(found: CorpusInspection) -> None:
    """Print the facts of a corpus, its documents by length, samples, and the verdict."""
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
    console.print(Text(printable(found.prefix), style="bold"), _table(("", ""), _facts(found)), "", sep="\n")
    if found.histogram:
        console.print(Text("Documents by tokens", style="bold"), _picture(found.histogram), "", sep="\n")
    if found.samples:
        console.print(Text("Samples", style="bold"), _samples(found.samples), "", sep="\n")
    for note in found.notes:
        console.print(Text(printable(f"note: {note}")))
    for wrong in found.damage:
        print(printable(f"damaged: {wrong}"), file=sys.stderr)
    if not found.damage:
        read = "sizes and index compared" if found.smallest_token is None else "every token read"
        console.print(f"whole ({read})")


def bar(share: float) -> str:
    """A bar of ``share`` of the width, to an eighth of a character; what is not nothing is seen."""
    eighths = round(share * BAR_WIDTH * 8)
    if share > 0:
        eighths = max(eighths, 1)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _facts(found: CorpusInspection) -> Iterator[tuple[str, str]]:
    numbers = {"documents": found.documents, "tokens": found.tokens}
    yield from ((name, f"{number:,}") for name, number in numbers.items() if number is not None)
    if found.dtype is not None:
        yield "dtype", found.dtype
    if found.mean is not None:
        lengths = f"{found.shortest:,} to {found.longest:,} tokens, {found.mean:,.1f} on average"
        yield "a document has", lengths
    if found.smallest_token is not None:
        known = f" of a vocabulary of {found.vocab_size:,}" if found.vocab_size else ""
        yield "token ids", f"{found.smallest_token:,} to {found.largest_token:,}{known}"
    for name, size in ((".bin", found.bin_bytes), (".idx", found.idx_bytes)):
        yield name, "missing" if size is None else byte_count(size)
    record = found.record
    if record is not None:
        yield "tokenizer", record.tokenizer
        yield "end of document", f"{record.eod}" if record.append_eod else "not appended"
        ratio = record.text_bytes / max(record.tokens, 1)
        yield "text", f"{byte_count(record.text_bytes)}, {ratio:.2f} bytes a token"
        yield "left out", f"{record.empty_documents:,} empty documents, {record.bad_records:,} bad records"


def _picture(histogram: Sequence[LengthBin]) -> Table:
    most = max(each.documents for each in histogram)
    total = sum(each.documents for each in histogram)
    rows = (
        (
            f"{each.least:,}" if each.least >= each.most else f"{each.least:,} to {each.most:,}",
            bar(each.documents / most),
            f"{each.documents:,}",
            f"{100 * each.documents / total:.1f} %",
        )
        for each in histogram
    )
    return _table(("tokens", "", "documents", "share"), rows, right=("tokens", "documents", "share"))


def _samples(samples: Sequence[Sample]) -> Table:
    rows = (
        (f"{each.document:,}", f"{each.tokens:,}", _short(each.text or " ".join(map(str, each.ids))))
        for each in samples
    )
    return _table(("document", "tokens", "begins with"), rows, right=("document", "tokens"))


def _short(text: str) -> str:
    """The beginning of a text in one line, as it can be printed."""
    line = printable(text)
    return line if len(line) <= _SAMPLE_WIDTH else line[:_SAMPLE_WIDTH] + "…"


def _table(columns: Sequence[str], rows: Iterator[Sequence[str]], *, right: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, show_header=any(columns))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table
