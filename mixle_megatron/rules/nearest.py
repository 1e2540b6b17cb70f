"""The values near a refused one that would work, and how a sentence lists them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isqrt

MOST_LISTED = 8
"""Longest list of values in one remedy; of more, those nearest to what was given are named."""


def divisors(number: int) -> list[int]:
    """All positive divisors of ``number`` in ascending order; none of a number below 1."""
    if number < 1:
        return []
    small = [factor for factor in range(1, isqrt(number) + 1) if number % factor == 0]
    return sorted({*small, *(number // factor for factor in small)})


def nearest(values: Iterable[int], target: int, most: int = MOST_LISTED) -> list[int]:
    """At most ``most`` of ``values``, those closest to ``target``, in ascending order."""
    return sorted(sorted(values, key=lambda value: (abs(value - target), value))[:most])


def multiples_around(target: int, step: int) -> list[int]:
    """The multiples of ``step`` on either side of ``target`` that are at least ``step``."""
    below = target // step * step
    return [value for value in (below, below + step) if value >= step]


def listed(values: Sequence[object]) -> str:
    """``1, 2, 4 or 8``."""
    words = [str(value) for value in values]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} or {words[-1]}"


def use(values: Iterable[int], target: int) -> str:
    """The remedy ``use 1, 2 or 4``, or nothing where no value works."""
    chosen = nearest(values, target)
    return f"use {listed(chosen)}" if chosen else ""
