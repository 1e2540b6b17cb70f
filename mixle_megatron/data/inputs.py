"""The files of a corpus, and how each is read: its format and its compression, told by its name."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import PurePath

from mixle_megatron.data.documents import STDLIB, TEXT_SUFFIXES, find_documents
from mixle_megatron.data.folder_walk import Document
from mixle_megatron.errors import Fault


class Format(StrEnum):
    """What a file holds."""

    TEXT = "text"
    JSON_LINES = "jsonl"
    PARQUET = "parquet"


class Compression(StrEnum):
    """What a file is compressed with."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"


FORMATS = {
    ".jsonl": Format.JSON_LINES,
    ".ndjson": Format.JSON_LINES,
    ".json": Format.JSON_LINES,
    ".parquet": Format.PARQUET,
}
"""Formats by suffix; every other file is text, one document."""

COMPRESSIONS = {".gz": Compression.GZIP, ".zst": Compression.ZSTD}

NOT_READ = (".zip", ".tar", ".tgz", ".bz2", ".xz", ".7z", ".lz4", ".bin", ".idx", ".npy")
"""Suffixes of what is surely no text: it would only be reported as damaged text."""

NEEDED = {
    Compression.ZSTD: ("backports.zstd", "zstd"),
    Format.PARQUET: ("pyarrow", "parquet"),
}
"""The package that reads a format, which may not be installed, and the extra that names it."""

_IN_FOLDERS = (*(ending + packed for ending in (*TEXT_SUFFIXES, *FORMATS) for packed in ("", *COMPRESSIONS)),)


@dataclass(frozen=True)
class Input:
    """One file of a corpus.

    Attributes:
        path: where it lies, absolute.
        size: in bytes, on the disk.
        mtime_ns: when it was last changed, in nanoseconds since the epoch.
        format: what it holds.
        compression: what it is compressed with.
    """

    path: str
    size: int
    mtime_ns: int
    format: Format
    compression: Compression

    @property
    def can_be_cut(self) -> bool:
        """Whether a part of it can be read without what is before it."""
        return self.format is Format.JSON_LINES and self.compression is Compression.NONE


def find_inputs(given: Sequence[str], form: Format | None = None) -> tuple[list[Input], list[Fault]]:
    """All files under what the user gave, in order, and everything that is wrong with them.

    Args:
        given: files, folders, globs or ``stdlib`` (see :mod:`mixle_megatron.data.documents`).
        form: what every file holds; None to tell by its name.

    Returns:
        The files, each once, in the order of ``given`` and by name within each; and the faults, all of
        ``--input``. Where there are faults the list is not complete.
    """
    if not given:
        return [], [Fault("--input", None, "names nothing to read", "give files, folders or globs")]
    documents: dict[tuple[int, int], Document] = {}
    faults: list[Fault] = []
    for each in given:
        suffixes = None if each == STDLIB else _IN_FOLDERS
        found, wrong = find_documents([each], suffixes, keep_empty=True)
        faults += map(_of_input, wrong)
        for document in found:
            documents.setdefault(document.inode, document)
    inputs = [_input(document, form) for document in documents.values()]
    return inputs, faults or [*_unreadable(inputs, named=form is not None), *_lacking(inputs)]


def _of_input(fault: Fault) -> Fault:
    """A fault of a text source, as one of this command."""
    remedy = fault.remedy
    if remedy.startswith("set data.suffixes"):
        remedy = f"name its files by a glob, for instance '{str(fault.value).rstrip('/')}/**/*'"
    return replace(fault, field="--input", remedy=remedy)


def _input(document: Document, form: Format | None) -> Input:
    suffixes = [suffix.lower() for suffix in PurePath(document.path).suffixes]
    compression = COMPRESSIONS.get(suffixes[-1], Compression.NONE) if suffixes else Compression.NONE
    if compression is not Compression.NONE:
        suffixes.pop()
    by_name = FORMATS.get(suffixes[-1], Format.TEXT) if suffixes else Format.TEXT
    return Input(document.path, document.size, document.mtime_ns, form or by_name, compression)


def _unreadable(inputs: Sequence[Input], *, named: bool) -> list[Fault]:
    """What keeps files from being read whatever is installed; of one kind, the first and how many more."""
    faults: dict[str, list[Fault]] = {}
    for each in inputs:
        suffixes = {suffix.lower() for suffix in PurePath(each.path).suffixes}
        packed = each.compression is not Compression.NONE
        if not named and (".tar" in suffixes or PurePath(each.path).suffix.lower() in NOT_READ):
            remedy = "unpack it, or leave it out of the pattern"
            fault = Fault("--input", each.path, "is neither text, JSON lines nor Parquet", remedy)
        elif packed and each.format is Format.PARQUET:
            remedy = "unpack it: Parquet is compressed inside"
            fault = Fault("--input", each.path, "is compressed Parquet", remedy)
        elif packed and each.size == 0:
            fault = truncated(each.path)
        else:
            continue
        faults.setdefault(fault.rule, []).append(fault)
    return [_first(alike) for alike in faults.values()]


def _first(alike: Sequence[Fault]) -> Fault:
    more = f" (and {len(alike) - 1} more files)" if len(alike) > 1 else ""
    return replace(alike[0], rule=alike[0].rule + more)


def _lacking(inputs: Sequence[Input]) -> list[Fault]:
    """A fault for each package that is needed and not installed, with the first file that needs it."""
    faults = []
    for kind, (package, extra) in NEEDED.items():
        needing = [each.path for each in inputs if kind in (each.format, each.compression)]
        if needing and not _installed(package):
            rule = f"is {kind}, which the package {package} reads, and that is not installed"
            remedy = f"pip install {package} (the extra {extra!r} of mixle-megatron)"
            faults.append(Fault("--input", needing[0], rule, remedy))
    return faults


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a package inside one that is missing itself
        return False


def truncated(path: str) -> Fault:
    """The fault of a compressed file that ends too early."""
    return Fault("--input", path, "ends before its end-of-stream marker: it is truncated", "get it anew")
