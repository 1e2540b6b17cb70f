"""A checkpoint from somebody else runs no code: each attack first shows that it works, on torch's readers.

Every attack leaves a folder, the canary, where it was run.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_checkpoints import facts, save_by_megatron_alone, small_checkpoint
from small_gpts import session
from snapshots import differences, message_of, snapshot
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)

from mixle_megatron.checkpoint.common_state import load_plain, read_common
from mixle_megatron.checkpoint.completeness import damage, lacking
from mixle_megatron.checkpoint.inspection import inspect
from mixle_megatron.checkpoint.manifest import write_manifest
from mixle_megatron.checkpoint.safe_loading import safe_loading
from mixle_megatron.checkpoint.safe_metadata import read_metadata
from mixle_megatron.errors import CheckpointError


@pytest.fixture(scope="module")
def saved(run_on, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real checkpoint, which attacks are put into copies of."""
    folder = tmp_path_factory.mktemp("saved") / "iter_0000002"
    small_checkpoint(run_on, folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / saved.name))


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


class Attack:
    """Makes the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self._canary = str(canary)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self._canary,)


def runs(canary: Path) -> bool:
    """Whether the attack was run, and if so, made ready again."""
    ran = canary.exists()
    if ran:
        canary.rmdir()
    return ran


def unpickled(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())


def write(folder: Path, metadata: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


# The attacks


def in_place_of_the_metadata(folder: Path, canary: Path) -> None:
    write(folder, Attack(canary))


def inside_the_metadata(folder: Path, canary: Path) -> None:
    metadata = unpickled(folder)
    metadata.planner_data = {"a": [Attack(canary)]}
    write(folder, metadata)


def in_the_plans_of_the_metadata(folder: Path, canary: Path) -> None:
    metadata = unpickled(folder)
    metadata.all_local_plans = Attack(canary)
    write(folder, metadata)


def in_a_common_file(folder: Path, canary: Path) -> None:
    torch.save({"session": {"step": Attack(canary)}}, folder / "common.pt")


def saved_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def replace_object(folder: Path, name: str, value: Any) -> None:
    """Let the object ``name`` of a checkpoint be ``value``, as Megatron saves it."""
    shard, content = folder / "__0_0.distcp", saved_bytes([value])
    metadata = unpickled(folder)
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex(name)] = _StorageInfo(shard.name, shard.stat().st_size, len(content))
    shard.write_bytes(shard.read_bytes() + content)
    write(folder, metadata)


def in_the_common_object(folder: Path, canary: Path) -> None:
    (folder / "common.pt").unlink(missing_ok=True)
    replace_object(folder, "common_state/shard_0_1", {"session": Attack(canary)})


def in_an_object_of_a_rank(folder: Path, canary: Path) -> None:
    replace_object(folder, "random/shard_0_2", Attack(canary))


METADATA_ATTACKS = [in_place_of_the_metadata, inside_the_metadata, in_the_plans_of_the_metadata]
ATTACKS = [*METADATA_ATTACKS, in_a_common_file, in_the_common_object, in_an_object_of_a_rank]


@pytest.mark.parametrize("attack", METADATA_ATTACKS)
def test_torchs_own_reader_runs_what_the_metadata_says(
    copy: Path, canary: Path, attack: Callable[[Path, Path], None]
) -> None:
    attack(copy, canary)
    with suppress(AttributeError):  # what comes out may be no metadata, but by then the attack has been run
        FileSystemReader(copy).read_metadata()
    assert runs(canary)


@pytest.mark.parametrize("attack", ATTACKS)
def test_inspecting_and_verifying_run_nothing(
    copy: Path, canary: Path, attack: Callable[[Path, Path], None]
) -> None:
    attack(copy, canary)
    if attack in METADATA_ATTACKS:
        for reader in (lambda: read_metadata(copy / ".metadata"), lambda: inspect(copy)):
            assert f"names {os.name}.mkdir" in message_of(reader, CheckpointError)
    else:
        inspect(copy)
    assert damage(copy, checksums=True, needs_manifest=True) != []
    (copy / "manifest.json").unlink()
    if attack in METADATA_ATTACKS:
        assert [one.file for one in lacking(copy)] == [".metadata"]
    else:
        notes = inspect(copy).notes
        # an object of a rank is of no interest to who looks
        assert any(f"{os.name}.mkdir" in note for note in notes) == (attack is not in_an_object_of_a_rank)
        (found,) = lacking(copy)
        assert found.file == ("common.pt" if attack is in_a_common_file else "__0_0.distcp")
        assert f"{os.name}.mkdir" in found.detail
    assert not runs(canary)


def load_each(folders: list[str]) -> list[str]:
    """What a session says that loads checkpoints of unknown origin, one after the other."""
    with session("gpt2", "adam", dp_shard=2) as opened:
        before = snapshot(opened)
        said = [
            message_of(lambda folder=folder: opened.load_checkpoint(folder), CheckpointError)
            for folder in folders
        ]
        assert differences(before, snapshot(opened)) == []
    return said


def attacked(saved: Path, target: Path, canary: Path) -> dict[Callable[[Path, Path], None], str]:
    """A copy of the checkpoint for each attack, as whoever attacks would hand it on."""
    folders = {}
    for attack in ATTACKS:
        folder = Path(shutil.copytree(saved, target / attack.__name__))
        attack(folder, canary)
        write_manifest(folder, facts())
        folders[attack] = str(folder)
    return folders


def test_loading_into_a_session_runs_nothing(run_on, saved: Path, tmp_path: Path, canary: Path) -> None:
    folders = attacked(saved, tmp_path, canary)
    first, second = run_on(2, load_each, list(folders.values()))
    assert first == second
    assert all(f"{os.name}.mkdir" in said for said in first)
    assert not runs(canary)


def load_unguarded(folder: str) -> str:
    """What Megatron says that loads an object of a checkpoint by itself."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    state = {"random": ShardedObject("random", None, (2,), (0,))}
    try:
        dist_checkpointing.load(state, folder, validate_access_integrity=False)
    except BaseException as error:  # torch's CheckpointException is no Exception
        return repr(error)
    return "loaded"


@pytest.mark.parametrize("attack", [*METADATA_ATTACKS, in_an_object_of_a_rank])
def test_megatron_alone_runs_what_a_checkpoint_says(
    run_on, copy: Path, canary: Path, attack: Callable[[Path, Path], None]
) -> None:
    attack(copy, canary)
    run_on(1, load_unguarded, str(copy))
    assert runs(canary)


def load_guarded(folder: str) -> str:
    """The same, with the safe readers."""
    with safe_loading():
        return load_unguarded(folder)


@pytest.mark.parametrize("attack", ATTACKS)
def test_megatron_with_safe_readers_runs_nothing(
    run_on, copy: Path, canary: Path, attack: Callable[[Path, Path], None]
) -> None:
    looks_for_the_object = not (copy / "common.pt").exists()  # as Megatron-Core 0.19 does, and 0.16 does not
    attack(copy, canary)
    (said,) = run_on(1, load_guarded, str(copy))
    assert f"{os.name}.mkdir" in said or (attack is in_the_common_object and not looks_for_the_object)
    assert not runs(canary)


def load_where_torch_is_told_to_run_all(folder: str) -> tuple[str, str | None]:
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        with safe_loading():
            said = load_unguarded(folder)
        return said, os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    finally:
        del os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"]


def test_a_variable_that_switches_torchs_care_off_has_no_effect(run_on, copy: Path, canary: Path) -> None:
    in_a_common_file(copy, canary)
    ((said, variable),) = run_on(1, load_where_torch_is_told_to_run_all, str(copy))
    assert "mkdir" in said
    assert variable == "1"
    assert not runs(canary)


# What is sound still reads, and says the same


def load_both_ways(folder: str) -> None:
    """A session comes to the same, to the last bit, with torch's readers and with the safe ones."""
    readers = FileSystemReader.read_metadata
    with session("gpt2", "adam", dp_shard=2, seed=99) as opened:
        with safe_loading():
            assert FileSystemReader.read_metadata is not readers
            payload = opened.load_checkpoint(folder)
        safely = snapshot(opened)
    assert FileSystemReader.read_metadata is readers
    with session("gpt2", "adam", dp_shard=2, seed=77) as opened:
        again = opened.load_checkpoint(folder)
        assert again.keys() == payload.keys()
        assert all(again[key] == payload[key] for key in payload.keys() - {"rng"})
        assert differences(safely, snapshot(opened)) == []
        assert payload["step"] == opened.step == 2


def test_a_sound_checkpoint_loads_as_it_does_without(run_on, saved: Path) -> None:
    run_on(2, load_both_ways, str(saved))


def test_the_metadata_is_what_torch_reads(saved: Path) -> None:
    ours, theirs = read_metadata(saved / ".metadata"), unpickled(saved)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert (ours.planner_data, ours.version) == (theirs.planner_data, theirs.version)


def load_common_of_megatron(folder: str) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    return dist_checkpointing.load_common_state_dict(folder)


def test_the_common_state_is_what_megatron_reads(run_on, saved: Path) -> None:
    (theirs,) = run_on(1, load_common_of_megatron, str(saved))
    ours = read_common(saved, read_metadata(saved / ".metadata"))
    assert ours == theirs
    assert ours["session"]["loader_state"] == {"position": 24}


def test_what_torch_saves_by_itself_reads(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"model": {"weight": torch.ones(3, 4, dtype=torch.bfloat16)}, "step": 5}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    ours, theirs = read_metadata(tmp_path / ".metadata"), unpickled(tmp_path)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data


# What older versions wrote


def rewritten(folder: Path, change: Callable[[bytes], bytes]) -> Metadata:
    (folder / ".metadata").write_bytes(change((folder / ".metadata").read_bytes()))
    return read_metadata(folder / ".metadata")


def test_metadata_of_older_versions_reads(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as Older

    expected, metadata = read_metadata(copy / ".metadata"), unpickled(copy)
    for entry in metadata.state_dict_metadata.values():
        if not isinstance(entry, BytesStorageMetadata):
            entry.properties = Older(dtype=entry.properties.dtype)
    del metadata.version, metadata.storage_meta
    metadata.storage_meta = None
    monkeypatch.setattr(Metadata, "__module__", "megatron.core.dist_checkpointing.strategies.torch")
    assert pickle.dumps(metadata).count(b"sharded_tensor.metadata") == 1
    metadata.mcore_data = {"decoder.weight": {"nd_reformulated_orig_global_shape": (2, 3)}}
    monkeypatch.undo()
    write(copy, metadata)
    found = read_metadata(copy / ".metadata")
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.mcore_data == metadata.mcore_data


def test_members_of_an_enum_read_as_early_python_3_11_pickled_them(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    metadata = unpickled(copy)
    by_name = lambda member, _protocol: (getattr, (type(member), member.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    write(copy, metadata)
    monkeypatch.undo()
    assert b"getattr" in (copy / ".metadata").read_bytes()
    assert read_metadata(copy / ".metadata").state_dict_metadata == metadata.state_dict_metadata


# What cannot be


def say_nonsense(folder: Path, change: Callable[[Metadata], None]) -> str:
    metadata = unpickled(folder)
    change(metadata)
    write(folder, metadata)
    return message_of(lambda: read_metadata(folder / ".metadata"), CheckpointError)


WEIGHT = "decoder.final_layernorm.weight"


def first_place(metadata: Metadata) -> _StorageInfo:
    return next(iter(metadata.storage_data.values()))


@pytest.mark.parametrize("name", ["../other/__0_0.distcp", "/etc/passwd", "", "a/../../b"])
def test_files_outside_of_the_checkpoint_are_refused(copy: Path, name: str) -> None:
    said = say_nonsense(copy, lambda metadata: setattr(first_place(metadata), "relative_path", name))
    assert "which is not in the checkpoint's folder" in said


def test_pieces_that_cannot_be_are_refused(copy: Path) -> None:
    def weight(metadata: Metadata) -> Any:
        return metadata.state_dict_metadata[WEIGHT]

    changes: dict[str, Callable[[Metadata], None]] = {
        "ends at [64]": lambda metadata: setattr(weight(metadata).chunks[0], "sizes", torch.Size([64])),
        "ends at [33]": lambda metadata: setattr(weight(metadata).chunks[0], "offsets", torch.Size([1])),
        "ends at [32, 1]": lambda metadata: setattr(
            weight(metadata), "chunks", [chunk_of(weight(metadata), (0, 0), (32, 1))]
        ),
        "[-1] where a shape": lambda metadata: setattr(weight(metadata), "size", torch.Size([-1])),
        "has a str where": lambda metadata: setattr(weight(metadata), "chunks", "all"),
        "bytes -1 to": lambda metadata: setattr(first_place(metadata), "offset", -1),
        "where its tensors lie": lambda metadata: setattr(metadata, "storage_data", None),
    }
    original = (copy / ".metadata").read_bytes()
    for words, change in changes.items():
        assert words in say_nonsense(copy, change)
        (copy / ".metadata").write_bytes(original)


def chunk_of(entry: Any, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    return type(entry.chunks[0])(torch.Size(offsets), torch.Size(sizes))


def test_what_lies_nowhere_is_named(copy: Path) -> None:
    metadata = unpickled(copy)
    (copy / "manifest.json").unlink()
    del metadata.storage_data[MetadataIndex(WEIGHT, (0,))]
    metadata.state_dict_metadata["decoder.layers.mlp.linear_fc1.bias"].chunks.pop()
    write(copy, metadata)
    details = [one.detail for one in lacking(copy)]
    assert f"says of 0 of the 1 pieces of {WEIGHT} where they lie" in details
    assert "has 128 of the 256 numbers of decoder.layers.mlp.linear_fc1.bias" in details


def test_a_pickle_cannot_change_torchs_classes(copy: Path) -> None:
    """BUILD with a state of slots sets attributes of whatever lies on the stack, a class too."""
    operations = (
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93"
        b"N}\x8c\x07version\x8c\x08poisoned\x73\x86b."
    )
    (copy / ".metadata").write_bytes(operations)
    pickle.loads(operations)
    assert Metadata.version == "poisoned"
    Metadata.version = None
    with pytest.raises(CheckpointError):
        read_metadata(copy / ".metadata")
    assert Metadata.version is None
    assert TensorProperties().dtype == torch.float32


@given(place=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_byte_of_the_metadata_is_an_error_of_the_checkpoint_or_none(
    saved: Path, tmp_path: Path, place: float, value: int
) -> None:
    content = bytearray((saved / ".metadata").read_bytes())
    content[int(place * len(content))] = value
    (tmp_path / ".metadata").write_bytes(content)
    with suppress(CheckpointError):
        read_metadata(tmp_path / ".metadata")


# Plain values


def test_a_checkpoint_of_megatron_alone_is_read(run_on, tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000007"
    run_on(2, save_by_megatron_alone, str(folder))
    assert lacking(folder) == []
    admitted = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()  # as where Megatron was not imported
    try:
        common = read_common(folder, read_metadata(folder / ".metadata"))
    finally:
        torch.serialization.add_safe_globals(admitted)
    assert common["iteration"] == 7
    assert isinstance(common["args"], Namespace)
    assert common["args"].tensor_model_parallel_size == 2
    assert set(torch.serialization.get_safe_globals()) == set(admitted)


def test_what_is_admitted_stays_admitted(saved: Path) -> None:
    before = set(torch.serialization.get_safe_globals())
    read_common(saved, read_metadata(saved / ".metadata"))
    assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.parametrize("content", [b"", b"no archive", saved_bytes({"step": 1})[:-40]])
def test_what_is_no_saved_object_is_said(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="the file x cannot be read"):
        load_plain(io.BytesIO(content), "the file x")
