"""How many forward passes a pipeline stage has in flight, and what they hold. Pure arithmetic.

A pass is in flight from its forward to its backward pass, and keeps its activations for so long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ChunkActivations:
    """Bytes of one microbatch in one chunk of a stage, on one rank.

    Attributes:
        kept: between the forward and the backward pass.
        rebuilt: what recomputation adds at most while the backward pass runs, less what the pass has
            freed by then.
    """

    kept: int
    rebuilt: int


def most_in_flight(
    chunks: Sequence[ChunkActivations], pp: int, stage: int, microbatches: int
) -> tuple[int, int]:
    """Forward passes of chunks whose backward pass is to come, at most, and the most bytes at one time.

    1F1B (Narayanan et al. 2021, section 2.2) begins with a forward pass for each later stage, and then
    makes one forward and one backward pass in turn. Interleaved, it takes ``pp`` microbatches through
    each chunk, the first chunk first and, backward, the last one first; before its first backward pass a
    stage makes ``2 · (pp - stage - 1) + (chunks - 1) · pp`` forward passes and one more
    (Megatron's ``get_pp_rank_microbatches``).

    Args:
        chunks: what each chunk of the stage keeps of one microbatch.
        pp: pipeline stages.
        stage: index of the stage.
        microbatches: of one schedule call; interleaved, a multiple of ``pp``.
    """
    if pp == 1:
        return len(chunks), sum(chunk.kept for chunk in chunks) + max(chunk.rebuilt for chunk in chunks)
    total = microbatches * len(chunks)
    ahead = pp - stage if len(chunks) == 1 else 2 * (pp - stage - 1) + (len(chunks) - 1) * pp + 1
    passes = min(ahead, total)
    if len(set(chunks)) == 1:
        return passes, passes * chunks[0].kept + chunks[0].rebuilt
    kept = [chunk.kept for chunk in chunks]
    forward, backward = _Turns(kept, pp), _Turns(kept[::-1], pp)
    return passes, max(
        forward.bytes_of(min(done + passes, total))
        - backward.bytes_of(done)
        + chunks[-1 - backward.chunk_of(done)].rebuilt
        for done in _telling(total, passes, pp, len(chunks))
    )


def _telling(total: int, passes: int, pp: int, chunks: int) -> set[int]:
    """Numbers of backward passes done, after which the most may be held.

    That is where the next pass, forward or backward, is of another chunk than the one before: between two
    such, what is held grows or falls evenly. The schedule repeats itself after all chunks; its end does not.
    """
    turn = chunks * pp
    spans = (range(0, min(turn + pp, total)), range(max(total - passes - pp, 0), total))
    starts = {0, total - passes}
    for span in spans:
        for shift in (0, passes):
            first = span.start + (-(span.start + shift)) % pp
            starts |= set(range(first, span.stop, pp))
    ends = {start - 1 for start in starts} | {total - 1}
    return {done for done in starts | ends if 0 <= done < total}


class _Turns:
    """The bytes of a schedule's first passes, which take ``group`` microbatches through chunk after chunk."""

    def __init__(self, kept: Sequence[int], group: int) -> None:
        self._kept, self._group = [*kept, 0], group
        self._before = [0]
        for size in kept:
            self._before.append(self._before[-1] + size * group)

    def bytes_of(self, passes: int) -> int:
        """Bytes of the first ``passes``."""
        turns, rest = divmod(passes, self._group * (len(self._kept) - 1))
        chunk, into = divmod(rest, self._group)
        return turns * self._before[-1] + self._before[chunk] + into * self._kept[chunk]

    def chunk_of(self, passes: int) -> int:
        """The place among the chunks, in the order of this schedule, of the pass after ``passes``."""
        return passes // self._group % (len(self._kept) - 1)
