"""What stands where documents should: told with file and line, and refused where there is too much of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from mixle_megatron.errors import Fault, Refused

if TYPE_CHECKING:
    from mixle_megatron.data.shards import PieceRecord
    from mixle_megatron.data.span_reading import BadRecord

SHOWN = 20
"""Bad records that a refusal lists; it counts them all."""

KEPT = 1000
"""Bad records that the record of a corpus lists."""

_BUFFER = 8 << 20


def refuse_bad_records(records: Sequence[PieceRecord], most: int, json_key: str, *, unread: int) -> None:
    """Refuse a corpus of which more than ``most`` records are bad.

    Args:
        records: of the pieces that are done, in order.
        most: bad records that are allowed.
        json_key: the key that was looked for.
        unread: how many pieces are not done yet, for lack of which there may be more.

    Raises:
        Refused: with the first bad records as its faults, each at its file and line.
    """
    number = sum(record.bad for record in records)
    if number <= most:
        return
    rule = f"is exceeded: {number} bad record{'s' if number > 1 else ''} so far" if unread else ""
    rule = rule or f"is exceeded by {number} bad record{'s' if number > 1 else ''}"
    listed = _located(records, SHOWN)
    more = f"; {number - len(listed)} more are not listed" if number > len(listed) else ""
    remedy = f"mend them, allow for more, or name another --json-key than {json_key!r}{more}"
    faults = [Fault("--max-bad", most, rule, remedy)]
    raise Refused([*faults, *(Fault("record", None, rule, source=place) for place, rule in listed)])


def fault_lines(records: Iterable[PieceRecord]) -> list[str]:
    """The first bad records of a corpus, a line each."""
    return [f"{place}: {rule}" for place, rule in _located(records, KEPT)]


def _located(records: Iterable[PieceRecord], most: int) -> list[tuple[str, str]]:
    """``file:line`` and what is wrong there, of the first ``most`` bad records."""
    listed = [bad for record in records for bad in record.bad_records][:most]
    lines = {path: _lines_before(path, sorted(starts)) for path, starts in _starts(listed).items()}
    return [(f"{bad.path}:{lines[bad.path][bad.start] + bad.line}", bad.rule) for bad in listed]


def _starts(listed: Iterable[BadRecord]) -> dict[str, set[int]]:
    starts: dict[str, set[int]] = {}
    for bad in listed:
        starts.setdefault(bad.path, set()).add(bad.start)
    return starts


def _lines_before(path: str, starts: Sequence[int]) -> dict[int, int]:
    """How many lines begin before each of some bytes of a file, which is read once and no further."""
    if not starts[-1]:
        return {0: 0}
    return dict(zip(starts, _line_counts(path, starts), strict=True))


def _line_counts(path: str, starts: Sequence[int]) -> Iterator[int]:
    position = newlines = 0
    last = b"\n"
    with open(path, "rb") as file:
        for start in starts:
            while position < start and (block := file.read(min(_BUFFER, start - position))):
                newlines += block.count(b"\n")
                position, last = position + len(block), block[-1:]
            yield newlines + (last != b"\n")
