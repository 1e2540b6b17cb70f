"""What is written lasts, and whatever happens to a file of a checkpoint is found and named."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_checkpoints import facts, small_checkpoint

from mixle_megatron.checkpoint import durable
from mixle_megatron.checkpoint.completeness import damage, lacking
from mixle_megatron.checkpoint.damage import Damage
from mixle_megatron.checkpoint.iterations import TRACKER, iteration_name, steps_in
from mixle_megatron.checkpoint.manifest import (
    MANIFEST,
    checksum_files,
    files_of_rank,
    read_manifest,
    verify,
    versions,
    write_manifest,
)
from mixle_megatron.errors import CheckpointError, Refused


@pytest.fixture(scope="module")
def saved(run_on, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real checkpoint, which tests copy before they damage it."""
    folder = tmp_path_factory.mktemp("saved") / iteration_name(2)
    small_checkpoint(run_on, folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / saved.name))


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# The manifest


def test_a_whole_checkpoint_is_whole(saved: Path) -> None:
    assert verify(saved, checksums=True) == []
    assert damage(saved, checksums=True, needs_manifest=True) == []


def test_the_manifest_says_what_was_saved_and_its_checksums_are_those_of_sha256(saved: Path) -> None:
    manifest = read_manifest(saved)
    assert manifest.facts == facts()
    assert manifest.versions == versions()
    assert manifest.versions["torch"] is not None
    assert sorted([*manifest.files, MANIFEST]) == files(saved)
    for name, record in manifest.files.items():
        content = (saved / name).read_bytes()
        assert (record.size, record.checksum) == (len(content), hashlib.sha256(content).hexdigest())


def flip(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "first byte flipped": lambda content: flip(content, 0),
    "middle byte flipped": lambda content: flip(content, len(content) // 2),
    "last byte flipped": lambda content: flip(content, len(content) - 1),
    "last byte cut off": lambda content: content[:-1],
    "halved": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "longer": lambda content: content + b"\0",
}


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damaged_file_is_named(copy: Path, name: str) -> None:
    for file in files(copy):
        original = (copy / file).read_bytes()
        (copy / file).write_bytes(DAMAGES[name](original))
        assert {one.file for one in verify(copy, checksums=True)} == {file}
        found = damage(copy, checksums=True, needs_manifest=True)
        assert file in {one.file for one in found}
        assert all(one.prevents_loading for one in found)
        (copy / file).write_bytes(original)


def test_each_missing_file_is_named(copy: Path) -> None:
    for file in files(copy):
        (copy / file).rename(copy.parent / "away")
        for checksums in (True, False):
            (found,) = verify(copy, checksums=checksums)
            assert (found.file, found.kind) == (file, "missing")
        (copy.parent / "away").rename(copy / file)


def test_sizes_alone_find_what_is_cut_short_and_not_what_was_changed(copy: Path) -> None:
    shard = copy / "__0_0.distcp"
    original = shard.read_bytes()
    shard.write_bytes(original[:-1])
    (found,) = verify(copy, checksums=False)
    assert (found.file, found.kind) == ("__0_0.distcp", "truncated")
    assert f"{len(original) - 1:,}" in found.detail
    assert f"{len(original):,}" in found.detail
    shard.write_bytes(flip(original, 100))
    assert verify(copy, checksums=False) == []
    assert [one.kind for one in verify(copy, checksums=True)] == ["changed"]


def test_all_damages_are_named_at_once(copy: Path) -> None:
    (copy / "__0_0.distcp").write_bytes(b"")
    (copy / "__1_0.distcp").unlink()
    (copy / "notes.txt").write_text("mine")
    (copy / "common_2.pt").write_text("not mine")
    found = {one.file: one for one in verify(copy, checksums=True)}
    kinds = {name: one.kind for name, one in found.items()}
    assert kinds == {
        "__0_0.distcp": "truncated",
        "__1_0.distcp": "missing",
        "notes.txt": "unexpected",
        "common_2.pt": "unexpected",
    }
    assert not found["notes.txt"].prevents_loading
    assert found["common_2.pt"].prevents_loading


def test_a_file_that_cannot_be_read_is_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.file_digest

    def failing(file: Any, algorithm: str) -> Any:
        if file.name.endswith("metadata.json"):
            raise OSError(5, "Input/output error")
        return digest(file, algorithm)

    monkeypatch.setattr(hashlib, "file_digest", failing)
    (found,) = verify(copy, checksums=True)
    assert (found.file, found.kind) == ("metadata.json", "unreadable")
    assert "Input/output error" in found.detail


@pytest.mark.parametrize("place", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_manifest_that_still_reads_but_says_something_else_is_found(copy: Path, place: float) -> None:
    text = (copy / MANIFEST).read_text()
    digits = [index for index, char in enumerate(text) if char in "12345678"]
    index = digits[int(place * len(digits))]
    (copy / MANIFEST).write_text(text[:index] + str(int(text[index]) + 1) + text[index + 1 :])
    with pytest.raises(CheckpointError):
        read_manifest(copy)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", ".", "a/../../b"])
def test_a_manifest_cannot_name_a_file_outside_of_the_checkpoint(copy: Path, name: str) -> None:
    content = json.loads((copy / MANIFEST).read_text())
    content["files"][name] = {"size": 1, "checksum": "0"}
    (copy / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="is no file of the checkpoint"):
        read_manifest(copy)


def test_a_later_format_is_refused_with_that_reason(copy: Path) -> None:
    content = json.loads((copy / MANIFEST).read_text()) | {"format": 2}
    (copy / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="has format 2, and this version reads 1"):
        read_manifest(copy)


# What the ranks share


def checksum_own_files(folder: str) -> list[Any] | None:
    """Each rank checksums what it wrote; the first collects the tables."""
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    tables = [None] * ranks if rank == 0 else None
    dist.gather_object(checksum_files(Path(folder), files_of_rank(Path(folder), rank)), tables)
    return tables


def test_ranks_share_the_checksums(run_on, copy: Path) -> None:
    written = (copy / MANIFEST).read_text()
    tables = run_on(2, checksum_own_files, str(copy))[0]
    assert set(tables[1]) == {"__1_0.distcp"}
    assert {".metadata", "__0_0.distcp", "metadata.json"} <= set(tables[0])
    (copy / MANIFEST).unlink()
    write_manifest(copy, facts(), tables)
    assert (copy / MANIFEST).read_text() == written
    with pytest.raises(CheckpointError, match=r"differ in __1_0\.distcp"):
        write_manifest(copy, facts(), tables[:1])


def test_a_file_of_no_rank_gets_no_manifest(copy: Path) -> None:
    (copy / "__7_0.distcp").write_bytes(b"of a larger world")
    tables = [checksum_files(copy, files_of_rank(copy, rank)) for rank in range(2)]
    with pytest.raises(CheckpointError, match=r"differ in __7_0\.distcp"):
        write_manifest(copy, facts(), tables)


# Completeness, without a manifest


def test_what_a_checkpoint_without_a_manifest_lacks_is_named(copy: Path) -> None:
    (copy / MANIFEST).unlink()
    assert lacking(copy) == []
    assert damage(copy, checksums=True, needs_manifest=False) == []
    assert [one.file for one in damage(copy, checksums=True, needs_manifest=True)] == [MANIFEST]
    for file in files(copy):
        original = (copy / file).read_bytes()
        for content in (b"", original[: len(original) // 2]):
            (copy / file).write_bytes(content)
            assert [one.file for one in lacking(copy)] == [file]
        (copy / file).unlink()
        assert file in {one.file for one in lacking(copy)}
        (copy / file).write_bytes(original)


def test_another_format_is_named(copy: Path) -> None:
    (copy / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    (found,) = lacking(copy)
    assert "'zarr'" in found.detail


# Onto the disk, and at once


class Crashed(BaseException):
    """The machine stopped here."""


class Disk:
    """Counts what changes names or waits for the disk, and stops at one of them.

    Attributes:
        events: what was done, and the name of the file or folder that it was done to.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stops_at: int = -1) -> None:
        self._left = stops_at
        self.events: list[tuple[str, str]] = []
        for owner, name in ((os, "replace"), (os, "fsync"), (shutil, "rmtree")):
            monkeypatch.setattr(owner, name, self._counting(name, getattr(owner, name)))

    def _counting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counting(first: Any, *rest: Any, **named: Any) -> Any:
            if self._left == 0:
                if name == "rmtree":  # stopped half-way
                    next(Path(first).iterdir()).unlink()
                raise Crashed
            self._left -= 1
            path = os.readlink(f"/proc/self/fd/{first}") if name == "fsync" else str(first)
            self.events.append((name, Path(path).name))
            return original(first, *rest, **named)

        return counting


def content_of(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def folder_of(path: Path, text: str) -> Path:
    path.mkdir(parents=True)
    for name in ("a", "b"):
        (path / name).write_text(text)
    return path


def until_it_ends(monkeypatch: pytest.MonkeyPatch, action: Callable[[int], None]) -> int:
    """Run ``action`` with a crash at its first, second, ... step, until it ends without one."""
    for stops_at in range(100):
        with monkeypatch.context() as patched:
            Disk(patched, stops_at)
            try:
                action(stops_at)
            except Crashed:
                continue
            return stops_at
    raise AssertionError("it never ended")


def test_a_crash_while_publishing_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(attempt: int) -> None:
        final = folder_of(tmp_path / str(attempt) / "iter_0000001", "old")
        durable.publish(folder_of(final.with_name("iter_0000001.writing"), "new"), final)

    steps = until_it_ends(monkeypatch, publish)
    assert steps >= 5
    for attempt in range(steps + 1):
        final = tmp_path / str(attempt) / "iter_0000001"
        durable.recover_all(final.parent)
        assert [path.name for path in final.parent.iterdir()] == [final.name]
        assert content_of(final) in ({"a": "old", "b": "old"}, {"a": "new", "b": "new"})
    assert content_of(final) == {"a": "new", "b": "new"}


def test_a_crash_while_deleting_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def delete(attempt: int) -> None:
        durable.delete(folder_of(tmp_path / str(attempt) / "iter_0000001", "old"))

    for attempt in range(until_it_ends(monkeypatch, delete) + 1):
        parent = tmp_path / str(attempt)
        durable.recover_all(parent)
        for left in parent.iterdir():
            assert left.name == "iter_0000001"
            assert content_of(left) == {"a": "old", "b": "old"}


def test_a_crash_while_writing_leaves_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(attempt: int) -> None:
        (tmp_path / str(attempt)).mkdir()
        (tmp_path / str(attempt) / TRACKER).write_text("100")
        durable.write_text(tmp_path / str(attempt) / TRACKER, "200")

    steps = until_it_ends(monkeypatch, write)
    for attempt in range(steps + 1):
        durable.recover_all(tmp_path / str(attempt))
        (left,) = (tmp_path / str(attempt)).iterdir()
        assert left.read_text() in ("100", "200")
    assert left.read_text() == "200"


def test_text_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    durable.write_text(tmp_path / "tracker", "1")
    assert disk.events == [
        ("fsync", "tracker.writing"),
        ("replace", "tracker.writing"),
        ("fsync", tmp_path.name),
    ]


def test_a_full_disk_leaves_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    durable.write_text(tmp_path / "tracker", "100")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            durable.write_text(tmp_path / "tracker", "200")
    assert (tmp_path / "tracker").read_text() == "100"
    durable.write_text(tmp_path / "tracker", "300")
    assert content_of(tmp_path) == {"tracker": "300"}


def test_a_tree_is_waited_for_from_its_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path / "outer" / "inner", "x")
    (tmp_path / "outer" / "c").write_text("x")
    disk = Disk(monkeypatch)
    durable.sync_tree(tmp_path / "outer")
    names = [name for _, name in disk.events]
    assert sorted(names) == ["a", "b", "c", "inner", "outer"]
    assert names.index("inner") > max(names.index("a"), names.index("b"))
    assert names[-1] == "outer"


def test_recovery_touches_nothing_else(tmp_path: Path) -> None:
    kept = ["mine.writing", "iter_1.previous", "iter_0000003", "iter_0000004.damaged"]
    for name in [*kept, "iter_0000003.previous", "iter_0000005.writing"]:
        folder_of(tmp_path / name, name)
    (tmp_path / f"{TRACKER}.writing").write_text("3")
    durable.recover_all(tmp_path)
    assert files(tmp_path) == sorted(kept)
    durable.recover_all(tmp_path / "absent")


# Retention

STEPS = st.sets(st.integers(0, 300), max_size=20)


@given(STEPS, st.integers(1, 25), st.integers(0, 12))
def test_what_may_be_deleted(steps: set[int], keep: int, keep_every: int) -> None:
    deleted = durable.deletable(steps, keep, keep_every)
    newest = set(sorted(steps, reverse=True)[:keep])
    regular = {step for step in steps if keep_every and step % keep_every == 0}
    assert set(deleted) == steps - newest - regular
    assert deleted == sorted(set(deleted))
    assert durable.deletable(steps - set(deleted), keep, keep_every) == []


@pytest.mark.parametrize(("keep", "keep_every", "field"), [(0, 0, "keep"), (1, -1, "keep_every")])
def test_keeping_less_than_the_newest_is_refused(keep: int, keep_every: int, field: str) -> None:
    with pytest.raises(Refused) as refusal:
        durable.deletable([1, 2], keep, keep_every)
    assert [fault.field for fault in refusal.value.faults] == [f"checkpoint.{field}"]


def test_only_whole_older_ones_are_deleted(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50, 60):
        folder_of(tmp_path / iteration_name(step), "x")
    damaged = tmp_path / iteration_name(20)
    deleted = durable.delete_old(tmp_path, 50, lambda folder: folder != damaged, keep=2, keep_every=30)
    assert deleted == [10]
    assert steps_in(tmp_path) == [20, 30, 40, 50, 60]


def test_a_stray_file_that_is_read_by_name_is_no_harmless_one() -> None:
    harmless = [Damage(name, "unexpected", "") for name in ("notes.txt", ".nfs0000001", "README.md")]
    read = [Damage(name, "unexpected", "") for name in ("common.pt", "__0.metadata", "__9_0.distcp")]
    assert not any(one.prevents_loading for one in harmless)
    assert all(one.prevents_loading for one in read)
