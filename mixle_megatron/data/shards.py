"""The tokens of one piece of a corpus, on disk: small indexed datasets of Megatron's, and a record of them.

A piece whose record is there is done. Its files are named by a key, which is a digest of all that decides
their content, so that a build which is started again finds what it can keep by name. Everything is written
under a name of its own, brought to the disk and renamed, the record last: two processes that work on the
same piece, as after a crash, only do it twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixle_megatron.checkpoint.durable import rename, sync_file
from mixle_megatron.data.corpus_tokenizers import CorpusTokenizer
from mixle_megatron.data.counts import Counts
from mixle_megatron.data.index_format import index_bytes
from mixle_megatron.data.megatron_dataset import (
    DType,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)
from mixle_megatron.data.pieces import Piece
from mixle_megatron.data.span_reading import BadRecord, SpanReader
from mixle_megatron.errors import Fault, Refused

DOCUMENTS_OF_A_PART = 1 << 18
"""Megatron's builder keeps two Python numbers a document until it is finished; this bounds them."""

BAD_KEPT = 1000
"""Bad records that a piece's record names; it counts them all."""

LONGEST = np.iinfo(np.int32).max
"""Tokens of a document that Megatron's index can count."""

_BATCH = 1 << 18  # bytes of text that a tokenizer gets at once


Report = Callable[[Counts], None]


@dataclass
class PieceRecord:
    """What a piece became.

    Attributes:
        parts: documents and tokens of each of its datasets, in order.
        text_bytes: bytes of the documents' text.
        empty: documents without a token, which are left out.
        bad: how many records were none.
        bad_records: the first of them.
    """

    parts: list[tuple[int, int]] = field(default_factory=list)
    text_bytes: int = 0
    empty: int = 0
    bad: int = 0
    bad_records: list[BadRecord] = field(default_factory=list)

    @property
    def documents(self) -> int:
        """Documents of all parts."""
        return sum(documents for documents, _ in self.parts)

    @property
    def tokens(self) -> int:
        """Tokens of all parts."""
        return sum(tokens for _, tokens in self.parts)

    def as_counts(self, input_bytes: int) -> Counts:
        """What the piece adds to the progress of a build."""
        return Counts(input_bytes, self.documents, self.text_bytes, self.tokens)


def part_prefix(folder: Path, key: str, part: int) -> str:
    """The prefix of a part's ``.bin`` and ``.idx``."""
    return str(folder / f"{key}.{part}")


def finished(folder: Path, key: str, dtype: type[np.number]) -> PieceRecord | None:
    """The record of a piece that is done, or None where it is not, or its files are not whole."""
    try:
        stored = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        stored["parts"] = [(int(documents), int(tokens)) for documents, tokens in stored["parts"]]
        stored["bad_records"] = [BadRecord(**each) for each in stored["bad_records"]]
        record = PieceRecord(**stored)
        for part, (documents, tokens) in enumerate(record.parts):
            prefix = part_prefix(folder, key, part)
            sizes = [os.path.getsize(path(prefix)) for path in (get_bin_path, get_idx_path)]
            if sizes != [tokens * DType.size(dtype), index_bytes(documents, documents + 1)]:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record


class ShardWriting:
    """Writes pieces, one after another.

    Args:
        folder: where their files lie.
        tokenizer: turns documents into ids.
        end: the id that is appended to each document, or None for none.
        json_key: the key, or the column of Parquet, that holds a document's text.
        dtype: of the tokens in the files.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: CorpusTokenizer,
        *,
        end: int | None,
        json_key: str,
        dtype: type[np.number],
    ) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._end = end
        self._json_key = json_key
        self._dtype = dtype

    def write(self, key: str, piece: Piece, report: Report) -> PieceRecord:
        """Turn a piece into files and their record, telling ``report`` what is done since it was told last.

        Raises:
            Refused: a file cannot be read to its end, or a document is too long for Megatron's index.
            OSError: the files cannot be written.
        """
        record = PieceRecord()
        with contextlib.closing(_Parts(self._folder, key, self._dtype)) as parts:
            for span in piece.spans:
                reader, read, waiting, size = SpanReader(span, self._json_key), 0, [], 0
                for document in reader:
                    if isinstance(document, BadRecord):
                        _note(record, document)
                        continue
                    waiting.append(document)
                    size += len(document)
                    if size >= _BATCH:
                        report(self._encode(waiting, parts, record, span.input.path, reader.read - read))
                        read, waiting, size = reader.read, [], 0
                report(self._encode(waiting, parts, record, span.input.path, span.size - read))
            record.parts = parts.publish()
        _write_record(self._folder / f"{key}.json", record)
        return record

    def _encode(
        self, documents: list[bytes], parts: _Parts, record: PieceRecord, path: str, input_bytes: int
    ) -> Counts:
        """Add a batch of documents to the files."""
        texts = [document for document in documents if document]
        added = tokens = text_bytes = 0
        for text, ids in zip(texts, self._tokenizer.encode(texts), strict=True):
            if not len(ids):
                continue
            if len(ids) >= LONGEST:
                rule = f"holds a document of {len(ids)} tokens, and Megatron's index counts up to {LONGEST}"
                raise Refused([Fault("--input", path, rule, "cut it into several documents")])
            parts.add(self._ended(ids))
            added, tokens, text_bytes = added + 1, tokens + len(ids), text_bytes + len(text)
        record.empty += len(documents) - added
        record.text_bytes += text_bytes
        ends = added if self._end is not None else 0
        return Counts(input_bytes, added, text_bytes, tokens + ends)

    def _ended(self, ids: NDArray[Any] | list[int]) -> NDArray[Any]:
        """The ids in the files' dtype, with the end token."""
        if self._end is None:
            return np.asarray(ids, dtype=self._dtype)
        tokens = np.empty(len(ids) + 1, dtype=self._dtype)
        tokens[:-1] = ids
        tokens[-1] = self._end
        return tokens


class _Parts:
    """The datasets of a piece, each begun when the one before it has its number of documents."""

    def __init__(self, folder: Path, key: str, dtype: type[np.number]) -> None:
        self._folder, self._key, self._dtype = folder, key, dtype
        self._aside = f"{key}.{os.getpid()}.{secrets.token_hex(4)}.aside"
        self._builder: IndexedDatasetBuilder | None = None
        self._sizes: list[tuple[int, int]] = []
        self._tokens = 0

    def add(self, tokens: NDArray[Any]) -> None:
        """Add one document."""
        if self._builder is None:
            self._builder = IndexedDatasetBuilder(get_bin_path(self._prefix()), dtype=self._dtype)
        self._builder.add_document(tokens, [len(tokens)])
        self._tokens += len(tokens)
        if len(self._builder.sequence_lengths) >= DOCUMENTS_OF_A_PART:
            self._finish()

    def publish(self) -> list[tuple[int, int]]:
        """Give all files their names; documents and tokens of each part."""
        self._finish()
        for part in range(len(self._sizes)):
            for path in (get_bin_path, get_idx_path):
                os.replace(path(self._prefix(part)), path(part_prefix(self._folder, self._key, part)))
        return self._sizes

    def close(self) -> None:
        """Leave nothing behind that has no name yet."""
        if self._builder is not None:
            with contextlib.suppress(OSError):  # what a full disk has no room for
                self._builder.data_file.close()
        for part in range(len(self._sizes) + 1):
            for path in (get_bin_path, get_idx_path):
                Path(path(self._prefix(part))).unlink(missing_ok=True)

    def _prefix(self, part: int | None = None) -> str:
        return str(self._folder / f"{self._aside}.{len(self._sizes) if part is None else part}")

    def _finish(self) -> None:
        if self._builder is None:
            return
        prefix = self._prefix()
        self._builder.finalize(get_idx_path(prefix))
        for path in (get_bin_path, get_idx_path):
            sync_file(Path(path(prefix)))
        self._sizes.append((len(self._builder.sequence_lengths), self._tokens))
        self._builder, self._tokens = None, 0


def _note(record: PieceRecord, bad: BadRecord) -> None:
    record.bad += 1
    if len(record.bad_records) < BAD_KEPT:
        record.bad_records.append(bad)


def _write_record(path: Path, record: PieceRecord) -> None:
    aside = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.aside")
    try:
        with aside.open("x", encoding="utf-8") as file:
            json.dump(asdict(record), file)
            file.flush()
            os.fsync(file.fileno())
        rename(aside, path)  # the names of the parts come to the disk with this one
    finally:
        aside.unlink(missing_ok=True)
