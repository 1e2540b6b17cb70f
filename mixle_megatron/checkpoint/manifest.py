"""What a checkpoint should consist of: every file's size and checksum, and what it was saved from.

``manifest.json`` is written into the folder last, before the folder gets its name. Its text has one
form only, and it carries a checksum of itself, so that a damaged manifest is found out as any other
file is. Checksums are SHA-256: ``sha256sum`` can compare them, and of Python's own functions it is the
fastest on processors that compute it in hardware. Nothing here needs torch or Megatron.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from mixle_megatron.checkpoint.damage import Damage
from mixle_megatron.checkpoint.durable import write_text
from mixle_megatron.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
"""Counts up when an older reader could misunderstand the file."""

_ALGORITHM = "sha256"
_THREADS = 8
_PACKAGES = ("torch", "megatron-core", "mixle-megatron", "mixle", "transformer-engine")
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")


@dataclass(frozen=True)
class FileRecord:
    """One file as it was written.

    Attributes:
        size: in bytes.
        checksum: SHA-256, in hexadecimal.
    """

    size: int
    checksum: str


Table = dict[str, FileRecord]
"""Files by their name in the checkpoint's folder."""


@dataclass(frozen=True)
class Facts:
    """What a checkpoint was saved from, in plain values that JSON has.

    Attributes:
        step: committed updates.
        plan: the parallel plan, as ``ParallelPlan.as_dict()``.
        model: the model's config; None where the caller built the model.
        optimizer_format: how the optimizer's state is cut: ``fully_reshardable`` loads under every
            plan, ``dp_reshardable`` where only data parallelism changes; None if there is none.
        precision: name of the precision.
    """

    step: int
    plan: Mapping[str, Any]
    model: Mapping[str, Any] | None
    optimizer_format: str | None
    precision: str


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's ``manifest.json``.

    Attributes:
        facts: what was saved.
        versions: what it was saved by: Python and packages, by name; None for one that is not installed.
        files: every file of the folder but the manifest itself.
    """

    facts: Facts
    versions: Mapping[str, str | None]
    files: Table


# Writing


def files_of_rank(folder: Path, rank: int) -> list[str]:
    """The files that ``rank`` checksums: the shards that it wrote, and all else for rank 0.

    Every file that one of the saving ranks wrote belongs to exactly one of them, so that they share
    the work; what a rank has just written, it reads back from its own host's memory.
    """
    shards = {name: _SHARD.fullmatch(name) for name in _files(folder) - {MANIFEST}}
    return sorted(name for name, shard in shards.items() if (int(shard[1]) if shard else 0) == rank)


def checksum_files(folder: Path, names: Iterable[str]) -> Table:
    """The table of these files of ``folder``, several at a time."""
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: _record(folder / name), names), strict=True))


def write_manifest(folder: Path, facts: Facts, tables: Iterable[Table] | None = None) -> Manifest:
    """Write the manifest of ``folder``, in which everything else is written; one process calls it.

    Args:
        folder: the checkpoint.
        facts: what was saved.
        tables: :func:`checksum_files` of each rank's :func:`files_of_rank`, collected; None to compute
            them all here.

    Raises:
        CheckpointError: the tables are not those of the files that are there.
    """
    names = _files(folder) - {MANIFEST}
    if tables is None:
        tables = [checksum_files(folder, names)]
    files = {name: record for table in tables for name, record in table.items()}
    differing = sorted(files.keys() ^ names)
    if differing:
        raise CheckpointError(
            f"{folder} cannot be given a manifest: its files and those that were checksummed differ in "
            + ", ".join(differing)
        )
    manifest = Manifest(facts, versions(), files)
    write_text(folder / MANIFEST, _text(manifest))
    return manifest


@cache
def versions() -> Mapping[str, str | None]:
    """The versions that write a checkpoint here."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


# Reading


def read_manifest(folder: Path) -> Manifest:
    """The manifest of ``folder``.

    Raises:
        CheckpointError: there is none, it is not as it was written, or a later version wrote it.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: {error}") from error
    manifest = _parsed(folder, text)
    if _text(manifest) != text:
        raise CheckpointError(f"{folder / MANIFEST} is not as it was written")
    return manifest


def verify(folder: Path, *, checksums: bool) -> list[Damage]:
    """Everything in ``folder`` that is not as its manifest has it, by file name.

    Args:
        folder: the checkpoint.
        checksums: whether to read every file; otherwise only names and sizes are compared.
    """
    path = folder / MANIFEST
    if not path.exists():
        return [Damage(MANIFEST, "missing", "is missing, so that nothing can be compared with it")]
    try:
        expected = read_manifest(folder).files
    except CheckpointError as error:
        return [Damage(MANIFEST, "changed", str(error).removeprefix(f"{path} "))]
    found = [*_differences(folder, expected)]
    if checksums:
        sound = [name for name in expected if name not in {damage.file for damage in found}]
        with ThreadPoolExecutor(_THREADS) as pool:
            found += filter(None, pool.map(lambda name: _changed(folder, name, expected[name]), sound))
    return sorted(found, key=lambda damage: damage.file)


def _differences(folder: Path, expected: Table) -> Iterable[Damage]:
    """What names and sizes tell."""
    there = _files(folder)
    for name in sorted(there - expected.keys() - {MANIFEST}):
        yield Damage(name, "unexpected", "is not of this checkpoint")
    for name, record in expected.items():
        path = folder / name
        if name not in there or not path.is_file():
            yield Damage(name, "missing", f"is missing ({record.size:,} bytes)")
        elif (size := path.stat().st_size) != record.size:
            kind = "truncated" if size < record.size else "longer"
            yield Damage(name, kind, f"has {size:,} bytes, and was written with {record.size:,}")


def _changed(folder: Path, name: str, expected: FileRecord) -> Damage | None:
    """What the content of a file of the right size tells."""
    try:
        actual = _record(folder / name)
    except OSError as error:
        return Damage(name, "unreadable", f"cannot be read: {error}")
    if actual == expected:
        return None
    detail = f"was changed: its checksum is {actual.checksum}, and was {expected.checksum}"
    return Damage(name, "changed", detail)


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, _ALGORITHM).hexdigest()
        return FileRecord(os.fstat(file.fileno()).st_size, checksum)


def _files(folder: Path) -> set[str]:
    """Everything below ``folder`` that is no folder, by its name with forward slashes."""
    return {
        Path(below, name).relative_to(folder).as_posix()
        for below, _, names in os.walk(folder)
        for name in names
    }


# The text


def _text(manifest: Manifest) -> str:
    content = {
        "format": FORMAT,
        "algorithm": _ALGORITHM,
        **asdict(manifest.facts),
        "versions": dict(manifest.versions),
        "files": {name: asdict(record) for name, record in manifest.files.items()},
    }
    checksum = hashlib.new(_ALGORITHM, _json(content).encode()).hexdigest()
    return _json(content | {"checksum": checksum})


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _parsed(folder: Path, text: str) -> Manifest:
    try:
        content = json.loads(text)
        if content["format"] > FORMAT:
            raise CheckpointError(
                f"{folder / MANIFEST} has format {content['format']}, and this version reads {FORMAT}; "
                "use the mixle-megatron that wrote it, or a later one"
            )
        facts = Facts(**{name: content[name] for name in Facts.__dataclass_fields__})
        files = {_inside(name): FileRecord(**record) for name, record in content["files"].items()}
        return Manifest(facts, content["versions"], files)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is not as it was written: {error!r}") from error


def _inside(name: str) -> str:
    """A file's name that cannot lead out of the checkpoint's folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} is no file of the checkpoint")
    return name
