"""Cutting a corpus into pieces of work, which depend on the files alone and not on who works.

A piece is some whole files, or a range of bytes of one large file of JSON lines. Each is turned into
tokens by one process at a time, and what is done stays done: so pieces are small against a corpus,
and large against what starting and ending one costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mixle_megatron.data.inputs import Input

SMALLEST = 8 << 20
"""Bytes of a piece, on the disk, of a corpus of no more than ``SMALLEST * MOST`` bytes."""

MOST = 4096
"""Pieces of a larger corpus, about: its pieces are larger, as each has files of its own for a while."""


@dataclass(frozen=True)
class Span:
    """A file, or a part of one.

    Attributes:
        input: the file.
        start: the first byte. A line of JSON belongs to the span in which it begins.
        end: the byte after the last one.
    """

    input: Input
    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return self.end - self.start


@dataclass(frozen=True)
class Piece:
    """What one process turns into tokens at a time: spans, in the order of the corpus."""

    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return sum(span.size for span in self.spans)


def cut(inputs: Sequence[Input], smallest: int = SMALLEST) -> list[Piece]:
    """The pieces of a corpus, in order: their documents one after another are those of the files."""
    size, total = smallest, sum(each.size for each in inputs)
    while total > size * MOST:
        size *= 2
    return [Piece(tuple(spans)) for spans in _gathered(_spans(inputs, size), size)]


def _spans(inputs: Sequence[Input], size: int) -> Iterator[Span]:
    for each in inputs:
        parts = max(each.size // size, 1) if each.can_be_cut else 1
        bounds = [each.size * part // parts for part in range(parts + 1)]
        for start, end in pairwise(bounds):
            yield Span(each, start, end)


def _gathered(spans: Iterator[Span], size: int) -> Iterator[list[Span]]:
    """Consecutive spans until they are ``size`` bytes together."""
    gathered: list[Span] = []
    bytes_so_far = 0
    for span in spans:
        if gathered and bytes_so_far + span.size > size:
            yield gathered
            gathered, bytes_so_far = [], 0
        gathered.append(span)
        bytes_so_far += span.size
    if gathered:
        yield gathered
