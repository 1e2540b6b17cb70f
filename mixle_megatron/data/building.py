"""Building a corpus: from text in files to Megatron's indexed dataset, on all cores."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mixle_megatron.data.bad_records import fault_lines, refuse_bad_records
from mixle_megatron.data.build_errors import BuildFailed
from mixle_megatron.data.build_folder import build_folder, held_folder, remove
from mixle_megatron.data.corpus_record import CorpusRecord, read_record
from mixle_megatron.data.corpus_tokenizers import CorpusTokenizer, open_tokenizer
from mixle_megatron.data.counts import BuildWatch, Counts
from mixle_megatron.data.inputs import Format, Input, find_inputs
from mixle_megatron.data.pieces import Piece, cut
from mixle_megatron.data.processes import start_server, work_on
from mixle_megatron.errors import Fault, Refused, refuse_if_any

if TYPE_CHECKING:
    from mixle_megatron.data.shards import PieceRecord, Report

KEYS_FORMAT = 1
"""Counts the changes that make pieces of an earlier version of this package worthless."""

_SHARDS = "mixle_megatron.data.shards"


@dataclass(frozen=True)
class BuildRequest:
    """What is to be built, and from what.

    Attributes:
        inputs: files, folders, globs or ``stdlib``.
        tokenizer: ``byte`` or ``hf:PATH``.
        output: the prefix of the files to write.
        form: what every input file holds; None to tell by its name.
        json_key: the key, or the column of Parquet, that holds a document's text.
        append_eod: whether each document ends with the tokenizer's end token.
        eod_token: the text of that token, where it is not the tokenizer's own.
        max_bad: bad records up to which a build goes on without them.
        workers: how many processes; None for one a core.
        overwrite: whether other files of that name may be replaced.
    """

    inputs: Sequence[str]
    tokenizer: str
    output: str
    form: Format | None = None
    json_key: str = "text"
    append_eod: bool = True
    eod_token: str | None = None
    max_bad: int = 0
    workers: int | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class Built:
    """How a build ended.

    Attributes:
        record: of the corpus.
        already: whether it was there already, so that nothing was done.
        kept: how many pieces an earlier build had finished.
        pieces: how many there are.
    """

    record: CorpusRecord
    already: bool
    kept: int
    pieces: int


def build_corpus(request: BuildRequest, watch: BuildWatch | None = None) -> Built:
    """Build ``PREFIX.bin``, ``PREFIX.idx`` and ``PREFIX.json``.

    They hold the same bytes whatever the number of processes, and however often a build was stopped.

    Args:
        request: what is to be built.
        watch: told how it goes; it may raise to stop the build. What is done stays done.

    Raises:
        Refused: the input, the tokenizer or the output cannot be used, or too many records are bad.
        BuildFailed: the disk is full, say, or a process was lost; the message says what to do.
    """
    inputs, faults = find_inputs(request.inputs, request.form)
    refuse_if_any([*_faults(request), *faults])
    tokenizer = open_tokenizer(request.tokenizer, eod_token=request.eod_token)
    refuse_if_any(_end_faults(request, tokenizer))
    work = _Work(request, inputs, cut(inputs), tokenizer, watch or BuildWatch())
    there = work.already_there()
    if there is not None:
        return Built(there, already=True, kept=0, pieces=len(work.pieces))
    if work.workers(len(work.pieces)) > 1:
        start_server(_SHARDS)
    try:
        with held_folder(request.output) as folder:
            return work.done_in(folder)
    except OSError as error:
        raise BuildFailed(_unwritten(request.output, error)) from error


@dataclass(frozen=True)
class _Work:
    """One build, once its input has been found sound."""

    request: BuildRequest
    inputs: Sequence[Input]
    pieces: Sequence[Piece]
    tokenizer: CorpusTokenizer
    watch: BuildWatch

    def workers(self, pieces: int) -> int:
        """How many processes work on so many pieces."""
        return max(min(self.request.workers or len(os.sched_getaffinity(0)), pieces), 1)

    def already_there(self) -> CorpusRecord | None:
        """The record of the corpus if this very one is there already, and whole.

        Raises:
            Refused: something else is there, and may not be replaced.
        """
        prefix, record = self.request.output, None
        there = [ending for ending in (".bin", ".idx", ".json") if os.path.exists(prefix + ending)]
        with suppress(ValueError):  # of a file that is no record of a corpus
            record = read_record(prefix)
        if record is not None and record.fingerprint == self._fingerprint:
            as_good = record.bad_records <= self.request.max_bad
            return record if as_good and ".idx" in there and _size_fits(prefix, record) else None
        if there and not self.request.overwrite:
            rule = f"is there already, from other input or options: {prefix}{there[0]}"
            raise Refused([Fault("--output", prefix, rule, "name another place, or --overwrite")])
        return None

    def done_in(self, folder: Path) -> Built:
        """Do what is left of the pieces, and put them together."""
        from mixle_megatron.data.shards import finished

        found = [finished(folder, key, self._dtype) for key in self._keys]
        kept = sum(record is not None for record in found)
        self.watch.begin("reading", sum(piece.size for piece in self.pieces), self._counted(found))
        self._refuse_bad(found)
        left = [number for number in self._longest_first() if found[number] is None]
        results = work_on(
            [(self._keys[number], self.pieces[number]) for number in left],
            partial(_open_writing, folder, self.request, self.tokenizer.name, self._dtype),
            workers=self.workers(len(left)),
            watch=self.watch.advance,
        )
        for task, record in results:
            found[left[task]] = record
            if record.bad:
                self._refuse_bad(found)
        corpus = self._published(folder, found)
        return Built(corpus, already=False, kept=kept, pieces=len(found))

    def _counted(self, found: Sequence[PieceRecord | None]) -> Counts:
        counted = Counts()
        for record, piece in zip(found, self.pieces, strict=True):
            if record is not None:
                counted += record.as_counts(piece.size)
        return counted

    def _longest_first(self) -> list[int]:
        """Pieces in the order in which they are begun, so that no long one is begun last."""
        return sorted(range(len(self.pieces)), key=lambda number: -self.pieces[number].size)

    def _refuse_bad(self, found: Sequence[PieceRecord | None]) -> None:
        done = [record for record in found if record is not None]
        refuse_bad_records(done, self.request.max_bad, self.request.json_key, unread=len(found) - len(done))

    def _published(self, folder: Path, records: Sequence[PieceRecord]) -> CorpusRecord:
        """Put the pieces together, and give the corpus its name."""
        from mixle_megatron.data.concatenation import concatenate
        from mixle_megatron.data.shards import part_prefix

        corpus = self._record(records)
        if not corpus.documents:
            raise Refused([Fault("--input", None, "holds no document with a token", "give files with text")])
        parts = [
            (part_prefix(folder, key, number), documents, tokens)
            for key, record in zip(self._keys, records, strict=True)
            for number, (documents, tokens) in enumerate(record.parts)
        ]
        aside = str(folder / "whole.aside")
        self.watch.begin("joining", corpus.tokens, Counts())
        concatenate(parts, aside, self._dtype, lambda tokens: self.watch.advance(Counts(tokens)))
        _publish(aside, self.request.output, corpus)
        remove(folder)
        return corpus

    def _record(self, records: Sequence[PieceRecord]) -> CorpusRecord:
        return CorpusRecord(
            tokenizer=self.tokenizer.name,
            tokenizer_digest=self.tokenizer.digest,
            vocab_size=self.tokenizer.vocab_size,
            eod=self.tokenizer.eod,
            append_eod=self.request.append_eod,
            dtype=self._dtype.__name__,
            documents=sum(record.documents for record in records),
            tokens=sum(record.tokens for record in records),
            text_bytes=sum(record.text_bytes for record in records),
            empty_documents=sum(record.empty for record in records),
            bad_records=sum(record.bad for record in records),
            bad=tuple(fault_lines(records)),
            input_files=len(self.inputs),
            input_bytes=sum(each.size for each in self.inputs),
            fingerprint=self._fingerprint,
        )

    @cached_property
    def _dtype(self) -> type[Any]:
        """The smallest that Megatron has for the vocabulary."""
        from mixle_megatron.data.megatron_dataset import DType

        return DType.optimal_dtype(self.tokenizer.vocab_size)

    @cached_property
    def _keys(self) -> list[str]:
        """The name of each piece: a digest of all that decides what it becomes."""
        options = [KEYS_FORMAT, self.tokenizer.digest, self.tokenizer.vocab_size, self.tokenizer.eod]
        options += [self.request.append_eod, self.request.json_key]
        return [_digest([options, _described(piece)]) for piece in self.pieces]

    @cached_property
    def _fingerprint(self) -> str:
        return _digest(self._keys)


def _open_writing(
    folder: Path, request: BuildRequest, tokenizer_name: str, dtype: type[Any]
) -> Callable[[tuple[str, Piece], Report], PieceRecord]:
    """What a process does with a piece; called in that process."""
    from mixle_megatron.data.shards import ShardWriting

    tokenizer = open_tokenizer(tokenizer_name, eod_token=request.eod_token)
    end = tokenizer.eod if request.append_eod else None
    writing = ShardWriting(folder, tokenizer, end=end, json_key=request.json_key, dtype=dtype)
    return lambda task, report: writing.write(*task, report)


def _publish(aside: str, prefix: str, corpus: CorpusRecord) -> None:
    """Give the files their names, the index last: without it there is no corpus, whatever else there is.

    The record comes first, so that a build that is started again after a crash in between knows the rest.
    """
    from mixle_megatron.checkpoint.durable import rename, sync_folder

    index = Path(f"{prefix}.idx")
    if index.exists():
        index.unlink()
        sync_folder(index.parent)
    corpus.write(prefix)
    rename(Path(f"{aside}.bin"), Path(f"{prefix}.bin"))
    rename(Path(f"{aside}.idx"), index)


def _faults(request: BuildRequest) -> list[Fault]:
    faults = [
        Fault(field, value, f"must be at least {least}", f"use {least}")
        for field, value, least in (("--max-bad", request.max_bad, 0), ("--workers", request.workers, 1))
        if value is not None and value < least
    ]
    if not os.path.basename(request.output):
        remedy = "name the files' prefix, such as data/corpus"
        faults.append(Fault("--output", request.output, "names no file", remedy))
    return faults


def _end_faults(request: BuildRequest, tokenizer: CorpusTokenizer) -> list[Fault]:
    """A tokenizer that has no end token, where each document should have one."""
    if not request.append_eod or tokenizer.eod is not None:
        return []
    special = getattr(tokenizer, "special_tokens", [])
    named = f"--eod-token {special[0]!r}" if special else "--eod-token TOKEN"
    remedy = f"name it by {named} (special tokens: {', '.join(special[:8]) or 'none'}), or --no-append-eod"
    rule = "does not say which token ends a document"
    return [Fault("--tokenizer", request.tokenizer, rule, remedy)]


def _size_fits(prefix: str, record: CorpusRecord) -> bool:
    size = 2 if record.dtype == "uint16" else 4
    try:
        return os.path.getsize(f"{prefix}.bin") == record.tokens * size
    except OSError:
        return False


def _unwritten(prefix: str, error: OSError) -> str:
    reason = error.strerror or str(error)
    kept = f"the pieces that are done stay in {build_folder(prefix)}; the same command goes on from there"
    return f"{prefix} cannot be written: {reason} ({error.filename or build_folder(prefix)}); {kept}"


def _described(piece: Piece) -> list[list[Any]]:
    return [
        [
            span.input.path,
            span.input.size,
            span.input.mtime_ns,
            span.input.format.value,
            span.input.compression.value,
            span.start,
            span.end,
        ]
        for span in piece.spans
    ]


def _digest(described: Any) -> str:
    return hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()
