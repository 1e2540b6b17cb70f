"""Reading the documents of a file, or of a part of one, one after another.

A document is the bytes of its text, valid UTF-8. What is no document is a :class:`BadRecord`: it has a
place in a file, and can be passed over. What makes the rest of a file doubtful cannot be passed over,
and is refused: a truncated or damaged archive, a file that changes while it is read.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any

from mixle_megatron.data.inputs import Compression, Format, Input, truncated
from mixle_megatron.data.pieces import Span
from mixle_megatron.errors import Fault, Refused

_BUFFER = 1 << 20
_ROWS = 256
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class BadRecord:
    """What stands where a document should, and is none.

    Attributes:
        path: of its file.
        start: the byte from which lines are counted, 0 but in a file that was cut.
        line: its line from there on, counted from 1; of Parquet, the row.
        rule: what is wrong with it.
    """

    path: str
    start: int
    line: int
    rule: str


class SpanReader:
    """The documents of a span, in order, as bytes; and what is none, as :class:`BadRecord`.

    Iterating raises :class:`Refused` where the file cannot be read, is truncated or damaged, or is not
    what it was when it was found.

    Attributes:
        read: how many of the span's bytes on the disk have been read.
    """

    def __init__(self, span: Span, json_key: str) -> None:
        self.read = 0
        self._span = span
        self._key = json_key

    def __iter__(self) -> Iterator[bytes | BadRecord]:
        given = self._span.input
        with ExitStack() as open_files:
            try:
                raw = open_files.enter_context(open(given.path, "rb", buffering=_BUFFER))
                yield from self._documents(raw, open_files)
                _refuse_changed(raw, given)
            except EOFError:
                raise Refused([truncated(given.path)]) from None
            except _damage_of(given.compression) as error:
                raise _damaged(given, str(error)) from None
            except OSError as error:
                raise _unreadable(given, error) from error
        self.read = self._span.size

    def _documents(self, raw: IO[bytes], open_files: ExitStack) -> Iterator[bytes | BadRecord]:
        given = self._span.input
        if given.format is Format.PARQUET:
            yield from self._rows(raw)
            return
        stream = _decompressed(raw, given, open_files)
        if given.format is Format.TEXT:
            yield self._whole_text(stream)
        elif given.can_be_cut:
            yield from self._lines(self._lines_of_span(raw))
        else:
            yield from self._lines(self._lines_of_archive(stream, raw))

    def _whole_text(self, stream: IO[bytes]) -> bytes | BadRecord:
        text = stream.read()
        try:
            text.decode("utf-8")
        except UnicodeDecodeError as error:
            line = text.count(b"\n", 0, error.start) + 1
            column = error.start - (text.rfind(b"\n", 0, error.start) + 1) + 1
            return self._bad(line, _no_utf8(error, column))
        return text

    def _lines_of_span(self, raw: IO[bytes]) -> Iterator[bytes]:
        """The lines that begin in the span."""
        start, end = self._span.start, self._span.end
        position = start
        if start:
            raw.seek(start - 1)
            position += len(raw.readline()) - 1
        while position < end and (line := raw.readline()):
            yield line
            position += len(line)
            self.read = min(position, end) - start

    def _lines_of_archive(self, stream: IO[bytes], raw: IO[bytes]) -> Iterator[bytes]:
        for line in stream:
            yield line
            self.read = raw.tell()

    def _lines(self, lines: Iterator[bytes]) -> Iterator[bytes | BadRecord]:
        key = self._key
        for number, line in enumerate(lines, 1):
            if number == 1 and not self._span.start:
                line = line.removeprefix(_BOM)
            try:
                document = json.loads(line.decode("utf-8"))[key].encode("utf-8")
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                if line.strip():
                    yield self._bad(number, _wrong_with_line(line, key, error))
            else:
                yield document

    def _rows(self, raw: IO[bytes]) -> Iterator[bytes | BadRecord]:
        """The documents of a Parquet file: the strings of one column."""
        given, parquet = self._span.input, importlib.import_module("pyarrow.parquet")
        arrow = importlib.import_module("pyarrow")
        try:
            file = parquet.ParquetFile(raw)
            _refuse_other_columns(given, file.schema_arrow, self._key, arrow)
            batches = file.iter_batches(_ROWS, columns=[self._key], use_threads=False)
            rows = 0
            for batch in batches:
                for number, value in enumerate(batch.column(0).to_pylist(), rows + 1):
                    yield self._row(number, value)
                rows += batch.num_rows
                self.read = given.size * rows // file.metadata.num_rows
        except arrow.ArrowException as error:
            raise _damaged(given, str(error).splitlines()[0]) from error
        except UnicodeDecodeError as error:  # which a batch raises as a whole
            raise _damaged(given, f"rows {rows + 1} to {rows + _ROWS}: {error}") from error

    def _row(self, number: int, value: str | None) -> bytes | BadRecord:
        if value is None:
            return self._bad(number, f"has no value under {self._key!r}")
        return value.encode("utf-8")

    def _bad(self, line: int, rule: str) -> BadRecord:
        return BadRecord(self._span.input.path, self._span.start, line, rule)


def _decompressed(raw: IO[bytes], given: Input, open_files: ExitStack) -> IO[bytes]:
    if given.compression is Compression.GZIP:
        return open_files.enter_context(gzip.GzipFile(fileobj=raw, mode="rb"))
    if given.compression is Compression.ZSTD:
        return open_files.enter_context(importlib.import_module("backports.zstd").ZstdFile(raw, "rb"))
    return raw


def _damage_of(compression: Compression) -> tuple[type[Exception], ...]:
    """What reading a damaged archive raises, which says nothing of its end."""
    if compression is Compression.ZSTD:
        return (importlib.import_module("backports.zstd").ZstdError,)
    return (gzip.BadGzipFile, zlib.error) if compression is Compression.GZIP else ()


def _wrong_with_line(line: bytes, key: str, error: Exception) -> str:
    """Why a line is no document, from what reading it as one raised."""
    if isinstance(error, UnicodeDecodeError):
        return _no_utf8(error, error.start + 1)
    if isinstance(error, UnicodeEncodeError):
        return f"holds half of a surrogate pair under {key!r}, which is no character"
    if isinstance(error, json.JSONDecodeError):
        column = min(error.pos, len(error.doc.rstrip())) + 1
        return f"is no JSON: {error.msg} at column {column}"
    if isinstance(error, RecursionError):
        return "is nested too deeply to be read"
    if isinstance(error, ValueError):
        return f"is no JSON: {error}"
    record: Any = json.loads(line.removeprefix(_BOM))
    if not isinstance(record, dict):
        return f"is no object with a key {key!r}"
    if key in record:
        return f"has no string under {key!r} but {json.dumps(record[key])[:40]}"
    return f"has no key {key!r}, but {', '.join(map(repr, list(record)[:5])) or 'none at all'}"


def _no_utf8(error: UnicodeDecodeError, column: int) -> str:
    return f"is no UTF-8: byte 0x{error.object[error.start]:02x} at byte {column} of the line"


def _refuse_other_columns(given: Input, schema: Any, key: str, arrow: Any) -> None:
    """Refuse a Parquet file that has no column of strings under ``key``."""
    if key not in schema.names:
        rule = f"has no column {key!r}, but {', '.join(map(repr, schema.names))}"
        raise Refused([Fault("--input", given.path, rule, "name one by --json-key")])
    kind = schema.field(key).type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        rule = f"has no strings in its column {key!r}, but {kind}"
        raise Refused([Fault("--input", given.path, rule, "name another by --json-key")])


def _refuse_changed(raw: IO[bytes], given: Input) -> None:
    status = os.fstat(raw.fileno())
    if (status.st_size, status.st_mtime_ns) != (given.size, given.mtime_ns):
        rule, remedy = "changed while it was read", "start again when it is complete"
        raise Refused([Fault("--input", given.path, rule, remedy)])


def _damaged(given: Input, reason: str) -> Refused:
    return Refused([Fault("--input", given.path, f"is damaged: {reason}", "get it anew")])


def _unreadable(given: Input, error: OSError) -> Refused:
    rule = f"cannot be read: {error.strerror or error}"
    return Refused([Fault("--input", given.path, rule, "make it readable, or leave it out")])
