"""Sizes and foreign text as a terminal shows them; no torch, which ``doctor`` may find to be broken."""

from __future__ import annotations


def byte_count(number: int) -> str:
    """A byte count in binary units."""
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:,.2f} TiB"


def printable(text: str) -> str:
    """``text`` in one line, with what would steer a terminal written out: it may come from anywhere."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
