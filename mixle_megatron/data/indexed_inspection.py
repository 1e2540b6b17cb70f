"""What is in an indexed corpus, and whether it is whole: for ``data inspect``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mixle_megatron.data.corpus_record import CorpusRecord, read_record, record_path
from mixle_megatron.data.corpus_tokenizers import CorpusTokenizer, open_tokenizer
from mixle_megatron.data.index_checks import (
    IndexHeader,
    array_damage,
    chunks,
    one_sequence_each,
    read_header,
)
from mixle_megatron.data.megatron_dataset import IndexedDataset, get_bin_path, get_idx_path
from mixle_megatron.data.token_checks import scan_tokens
from mixle_megatron.errors import Fault, Refused

SAMPLE_TOKENS = 64
"""Tokens that a sample shows, from the beginning of its document."""


@dataclass(frozen=True)
class LengthBin:
    """Documents whose number of tokens is at least ``least`` and at most ``most``."""

    least: int
    most: int
    documents: int


@dataclass(frozen=True)
class Sample:
    """The beginning of a document.

    Attributes:
        document: its number.
        tokens: its length.
        ids: its first tokens.
        text: their text; None where there is no tokenizer to tell.
    """

    document: int
    tokens: int
    ids: tuple[int, ...]
    text: str | None


@dataclass
class CorpusInspection:
    """What was found of a corpus.

    Attributes:
        prefix: of its files.
        documents: how many; None where the index does not tell, as in all that follows.
        sequences: how many; Megatron's GPT datasets expect one a document.
        tokens: how many.
        dtype: of the tokens.
        bin_bytes: the size of ``PREFIX.bin``.
        idx_bytes: the size of ``PREFIX.idx``.
        shortest: tokens of the shortest document.
        mean: tokens of a document.
        longest: tokens of the longest document.
        histogram: documents by length, in powers of two.
        vocab_size: that the tokens were compared with.
        smallest_token: the smallest id; None where tokens were not read.
        largest_token: the largest id.
        record: ``PREFIX.json``.
        damage: what makes the corpus unfit to be read; empty where it is whole.
        notes: what is worth knowing, and no damage.
        samples: beginnings of documents from all over the corpus.
    """

    prefix: str
    documents: int | None = None
    sequences: int | None = None
    tokens: int | None = None
    dtype: str | None = None
    bin_bytes: int | None = None
    idx_bytes: int | None = None
    shortest: int | None = None
    mean: float | None = None
    longest: int | None = None
    histogram: list[LengthBin] = field(default_factory=list)
    vocab_size: int | None = None
    smallest_token: int | None = None
    largest_token: int | None = None
    record: CorpusRecord | None = None
    damage: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with the same keys whatever was found."""
        plain = asdict(self)
        plain["record"] = self.record.as_dict() if self.record else None
        return {"whole": not self.damage, **plain}


def inspect_corpus(
    prefix: str,
    *,
    vocab_size: int | None = None,
    samples: int = 3,
    quick: bool = False,
    watch: Callable[[int, int], None] = lambda _tokens, _total: None,
) -> CorpusInspection:
    """Look at a corpus, and read all of its tokens.

    Args:
        prefix: of its files.
        vocab_size: to compare the tokens with; None for that of ``PREFIX.json``.
        samples: how many documents to show.
        quick: whether to leave the tokens unread.
        watch: told the tokens that were read since, and how many there are.

    Raises:
        Refused: neither ``PREFIX.bin`` nor ``PREFIX.idx`` is there, or one cannot be read.
    """
    found = CorpusInspection(prefix)
    try:
        found.bin_bytes, found.idx_bytes = _sizes(prefix)
        _read_record(found)
        header = None if found.damage else _header(found)
        if header is not None:
            found.vocab_size = vocab_size or (found.record.vocab_size if found.record else None)
            dataset = IndexedDataset(prefix, mmap=False)
            found.damage += array_damage(prefix, header, dataset)
            if not found.damage:
                _describe(found, dataset)
                if not quick:
                    _scan(found, header, dataset, watch)
                found.samples = list(_samples(found, dataset, samples))
    except OSError as error:
        rule = f"cannot be read: {error.strerror or error}"
        raise Refused([Fault("PREFIX", error.filename or prefix, rule, "make it readable")]) from error
    return found


def _sizes(prefix: str) -> tuple[int | None, int | None]:
    """The sizes of the tokens' file and of the index; None of one that is not there."""
    sizes = tuple(
        os.path.getsize(path) if os.path.exists(path) else None
        for path in (get_bin_path(prefix), get_idx_path(prefix))
    )
    if sizes == (None, None):
        base = os.path.splitext(prefix)[0]
        is_file = prefix.endswith((".bin", ".idx", ".json")) and os.path.exists(get_idx_path(base))
        remedy = f"did you mean {base}?" if is_file else "name the files' path without .bin or .idx"
        raise Refused([Fault("PREFIX", prefix, "names no corpus: there is no such .bin or .idx", remedy)])
    return sizes


def _read_record(found: CorpusInspection) -> None:
    """Note which of the files are missing, and what the record says."""
    for size, path in (
        (found.bin_bytes, get_bin_path(found.prefix)),
        (found.idx_bytes, get_idx_path(found.prefix)),
    ):
        if size is None:
            found.damage.append(f"{path} is missing")
    try:
        found.record = read_record(found.prefix)
    except (ValueError, TypeError) as error:
        found.damage.append(f"{record_path(found.prefix)} {error}")
    if found.record is None and not found.damage:
        found.notes.append(f"there is no {record_path(found.prefix)}, which says what the tokens stand for")


def _header(found: CorpusInspection) -> IndexHeader | None:
    header = read_header(found.prefix)
    if isinstance(header, str):
        found.damage.append(header)
        return None
    found.dtype, found.sequences = header.dtype, header.sequences
    found.documents = max(header.document_ends - 1, 0)
    return header


def _describe(found: CorpusInspection, dataset: IndexedDataset) -> None:
    """Count tokens and lengths, and compare with the record."""
    counts: dict[int, int] = {}
    found.tokens, shortest, longest = 0, [], []
    for _, lengths, _ in chunks(dataset):
        found.tokens += int(lengths.sum(dtype=np.int64))
        shortest.append(int(lengths.min()))
        longest.append(int(lengths.max()))
        for exponent, number in zip(*np.unique(np.frexp(lengths)[1], return_counts=True), strict=True):
            counts[int(exponent)] = counts.get(int(exponent), 0) + int(number)
    if counts:
        found.shortest, found.longest = min(shortest), max(longest)
        found.mean = found.tokens / found.sequences
        exponents = range(min(counts), max(counts) + 1)
        found.histogram = [LengthBin(1 << e >> 1, (1 << e) - 1, counts.get(e, 0)) for e in exponents]
    else:
        found.notes.append("the corpus holds no document")
    if not one_sequence_each(dataset):
        heard = found.damage if found.record else found.notes  # a corpus with a record has one each
        heard.append(
            f"not every one of its {found.documents:,} documents is one of its {found.sequences:,} sequences,"
            " as Megatron's GPT datasets expect"
        )
    if found.shortest == 0:
        found.notes.append("some documents are empty")
    found.damage += _record_damage(found)


def _record_damage(found: CorpusInspection) -> Iterator[str]:
    for name in ("documents", "tokens", "dtype") if found.record else ():
        said, there = getattr(found.record, name), getattr(found, name)
        if said != there:
            yield f"{record_path(found.prefix)} says {name} {said}, and the index {there}"


def _scan(
    found: CorpusInspection, header: IndexHeader, dataset: IndexedDataset, watch: Callable[[int, int], None]
) -> None:
    """Read every token."""
    record = found.record
    ended = record is not None and record.append_eod
    scan = scan_tokens(
        found.prefix,
        header,
        dataset,
        vocab_size=found.vocab_size,
        end=record.eod if ended else None,
        watch=lambda tokens: watch(tokens, found.tokens or 0),
    )
    found.smallest_token, found.largest_token = scan.smallest, scan.largest
    if scan.outside:
        found.damage.append(
            f"{scan.outside:,} tokens are not in the vocabulary of {found.vocab_size:,}"
            f" (ids {scan.smallest} to {scan.largest}), the first of them token {scan.first_outside:,}"
        )
    if scan.unended:
        found.damage.append(
            f"{scan.unended:,} documents do not end with token {record.eod},"
            f" the first of them document {scan.first_unended:,}"
        )
    if found.vocab_size is None:
        found.notes.append("the tokens were compared with no vocabulary: --vocab-size gives one")


def _samples(found: CorpusInspection, dataset: IndexedDataset, number: int) -> Iterator[Sample]:
    """The beginnings of some sequences, evenly spread."""
    number = min(number, found.sequences or 0)
    tokenizer = _tokenizer(found) if number else None
    for place in range(number):
        index = place * (found.sequences or 0) // number
        length = int(dataset.sequence_lengths[index])
        ids = dataset.get(index, 0, min(length, SAMPLE_TOKENS)).tolist()
        yield Sample(index, length, tuple(ids), _text(tokenizer, ids))


def _text(tokenizer: CorpusTokenizer | None, ids: list[int]) -> str | None:
    if tokenizer is None or not all(0 <= each < tokenizer.vocab_size for each in ids):
        return None
    return tokenizer.decode(ids)


def _tokenizer(found: CorpusInspection) -> CorpusTokenizer | None:
    """The tokenizer that the corpus was built with, if it is here and still the same."""
    if found.record is None:
        return None
    try:
        tokenizer = open_tokenizer(found.record.tokenizer)
    except Refused as refused:
        found.notes.append(f"samples are shown as ids: {refused}")
        return None
    if tokenizer.digest != found.record.tokenizer_digest:
        found.notes.append(f"samples are shown as ids: {tokenizer.name} is another than the corpus's")
        return None
    return tokenizer
