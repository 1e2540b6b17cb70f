"""A corpus in Megatron's indexed format as a run meets it: its facts, its split, and what speaks against it.

Nothing here needs torch, and no token is read but for the digest: a config is judged by the indices.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mixle_megatron.data.checking import TRAIN, VALIDATION
from mixle_megatron.data.corpus_record import CorpusRecord, read_record, record_path
from mixle_megatron.data.index_checks import IndexHeader, read_header
from mixle_megatron.data.index_format import HEADER_BYTES, get_bin_path, get_idx_path
from mixle_megatron.errors import Fault, Refused, refuse_if_any

_SAMPLED_BLOCKS = 64
_BLOCK = 64 << 10


class Entry(Protocol):
    """A corpus as a config names it."""

    path: str
    weight: float


@dataclass(frozen=True)
class Corpus:
    """What the files of a corpus say.

    Attributes:
        prefix: of its files.
        header: of its index.
        record: ``PREFIX.json``; None where there is none.
    """

    prefix: str
    header: IndexHeader
    record: CorpusRecord | None

    @functools.cached_property
    def digest(self) -> str:
        """Equal for equal files, wherever they lie: of sizes, and of blocks spread over each file."""
        digest = hashlib.blake2b(digest_size=16)
        for path in (get_idx_path(self.prefix), get_bin_path(self.prefix)):
            add_sampled(digest, path)
        return digest.hexdigest()

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of text to a token, on average; None where nothing tells."""
        if self.record is None or not self.record.tokens:
            return None
        return self.record.text_bytes / self.record.tokens

    def tokens_in(self, sequences: range) -> int:
        """Tokens of a run of sequences."""
        return int(self._lengths[sequences.start : sequences.stop].sum(dtype=np.int64))

    @property
    def _lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence, mapped."""
        if not self.header.sequences:
            return np.empty(0, dtype=np.int32)
        shape = (self.header.sequences,)
        path = get_idx_path(self.prefix)
        return np.memmap(path, dtype=np.dtype("<i4"), mode="r", offset=HEADER_BYTES, shape=shape)


def add_sampled(digest: Any, path: str) -> None:
    """Add a file's size and 64 blocks of it, evenly spread, or all of a small one, to a digest."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        if size <= _SAMPLED_BLOCKS * _BLOCK:
            digest.update(file.read())
            return
        for number in range(_SAMPLED_BLOCKS):
            file.seek(number * (size - _BLOCK) // (_SAMPLED_BLOCKS - 1))
            digest.update(file.read(_BLOCK))


def split_spans(split: Sequence[float], sequences: int) -> list[range]:
    """The sequences of each part, by Megatron's arithmetic.

    Args:
        split: shares of the parts, in order; they need not add up to one.
        sequences: how many the corpus has.
    """
    shares = np.asarray(split, dtype=np.float64)
    ends = accumulate((shares / shares.sum()).tolist(), initial=0.0)
    return [range(first, last) for first, last in pairwise(round(end * float(sequences)) for end in ends)]


def open_blend(entries: Iterable[Entry], field: str) -> list[Corpus]:
    """Open every corpus of a blend.

    Args:
        entries: the corpora.
        field: the blend's key in the config.

    Raises:
        Refused: with every corpus that is missing or damaged.
    """
    corpora, faults = [], []
    for number, entry in enumerate(entries):
        try:
            corpora.append(_open(entry.path, f"{field}.{number}.path"))
        except Refused as refused:
            faults += refused.faults
    refuse_if_any(faults)
    return corpora


def _open(path: str, field: str) -> Corpus:
    prefix = os.path.expanduser(path)
    files = (get_bin_path(prefix), get_idx_path(prefix))
    missing = [file for file in files if not os.path.isfile(file)]
    if missing:
        ending = os.path.splitext(path)[1]
        rule = f"is the prefix of no corpus, for want of {' and '.join(missing)}"
        remedy = "build it with mixle-megatron data build"
        if ending in (".bin", ".idx"):
            remedy = f"leave {ending} out"
        raise Refused([Fault(field, path, rule, remedy)])
    try:
        header, record = read_header(prefix), read_record(prefix)
    except (OSError, ValueError) as error:
        rule = f"cannot be read: {error}"
        raise Refused([Fault(field, path, rule, f"look at {record_path(prefix)}")]) from error
    if isinstance(header, str):
        raise Refused([Fault(field, path, f"is damaged: {header}", "build it again")])
    if not np.issubdtype(np.dtype(header.dtype), np.integer):
        raise Refused([Fault(field, path, f"holds tokens of {header.dtype}", "build it with integers")])
    corpus = Corpus(prefix, header, record)
    size, expected = os.path.getsize(files[0]), corpus.tokens_in(range(header.sequences)) * header.itemsize
    if size != expected:
        rule = f"is damaged: {files[0]} has {size:,} bytes, and by its index {expected:,}"
        raise Refused([Fault(field, path, rule, "build it again")])
    return corpus


def blend_faults(
    corpora: Sequence[Corpus],
    split: Sequence[float],
    *,
    field: str,
    split_field: str,
    parts: Sequence[int],
    sequence_length: int,
    vocab_size: int,
) -> Iterator[Fault]:
    """What keeps corpora from being trained or evaluated on.

    Args:
        corpora: of the blend.
        split: shares of the parts.
        field: the blend's key in the config.
        split_field: that of the split.
        parts: which of them are read.
        sequence_length: S; a part needs S + 1 tokens for a sample.
        vocab_size: tokens that the model has.
    """
    names = {TRAIN: "training", VALIDATION: "validation"}
    for number, corpus in enumerate(corpora):
        sequences = corpus.header.sequences
        total = corpus.tokens_in(range(sequences))
        if total <= sequence_length:
            rule = f"has {total} tokens, and one sample of model.seq_length={sequence_length} takes one more"
            yield Fault(
                f"{field}.{number}.path", corpus.prefix, rule, "give a larger one, or a shorter sequence"
            )
            continue
        spans = split_spans(split, sequences)
        for part in parts:
            span = spans[part] if part < len(spans) else range(0)
            if corpus.tokens_in(span) <= sequence_length:
                rule = (
                    f"gives the {names[part]} part of {corpus.prefix} {len(span)} of {sequences} documents"
                    f" and {corpus.tokens_in(span)} tokens; a sample takes {sequence_length + 1}"
                )
                yield Fault(
                    split_field, list(split), rule, "give that part a larger share, or more documents"
                )
    yield from _vocabulary_faults(corpora, field, vocab_size)


def _vocabulary_faults(corpora: Sequence[Corpus], field: str, vocab_size: int) -> Iterator[Fault]:
    """Where the records tell of more tokens than the model has, or of tokens that mean different things."""
    recorded = [(number, each.prefix, each.record) for number, each in enumerate(corpora) if each.record]
    for _, prefix, record in recorded:
        if record.vocab_size > vocab_size:
            rule = (
                f"is below the {record.vocab_size} ids of {record.tokenizer}, which {prefix} was built with"
            )
            yield Fault("model.vocab_size", vocab_size, rule, f"use {record.vocab_size} or more")
    for number, prefix, record in recorded[1:]:
        first = recorded[0]
        if record.tokenizer_digest != first[2].tokenizer_digest:
            rule = f"was built with another tokenizer than {first[1]}: {record.tokenizer}"
            yield Fault(f"{field}.{number}.path", prefix, rule, f"build it with {first[2].tokenizer}")


def end_token(corpora: Sequence[Corpus], stated: int | None) -> int | None:
    """The token that ends a document: what the config states, else what the records say."""
    if stated is not None:
        return stated
    known = {corpus.record.eod for corpus in corpora if corpus.record is not None}
    return known.pop() if len(known) == 1 else None
