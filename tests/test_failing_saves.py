"""A disk that fails while a run saves: every rank says so alike, and what was saved before stays.

A full disk is one whose ``fsync`` of one file has no space left, or, for the command, the kernel's limit on
the size of a file. Read-only folders are real ones: root gives up the capability to ignore permissions.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from killed_runs import Left, left_in
from tiny_run import CONFIG, overrides, train_here
from trainer_jobs import TRACKER, steps_of, temporary_names

SHARED = (
    "plan.tp=2",
    "plan.dp_shard=1",
    "evaluation.every=0",
    "checkpoint.every=1",
    "optimizer.decay_steps=30",
)
FULL = os.strerror(errno.ENOSPC)
LONGEST_FILE = 20_000
"""What the kernel lets the command write: more than any file of a run but its shards."""


@contextmanager
def no_space_for(name: str) -> Iterator[None]:
    """Let no file or folder of this name come onto the disk."""
    original = os.fsync

    def failing(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name == name:
            raise OSError(errno.ENOSPC, FULL)
        original(descriptor)

    os.fsync = failing
    try:
        yield
    finally:
        os.fsync = original


def train_without_space(folder: str, name: str, culprit: int) -> str:
    """Train past a checkpoint that one rank cannot bring onto the disk; what is said."""
    import torch.distributed as dist

    with no_space_for(name) if dist.get_rank() == culprit else nullcontext():
        return said_by_training(folder)


def said_by_training(folder: str) -> str:
    from mixle_megatron.errors import CheckpointError

    try:
        train_here(folder, *SHARED, "run.steps=4")
    except CheckpointError as error:
        return str(error)
    return "went on"


@pytest.fixture(scope="module")
def saved_twice(run_on: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two checkpoints."""
    folder = tmp_path_factory.mktemp("saved_twice")
    run_on(2, train_here, str(folder), *SHARED, "run.steps=2")
    return folder


@pytest.fixture
def checkpoints(saved_twice: Path, tmp_path: Path) -> Path:
    """Where a copy of that run has its checkpoints."""
    shutil.copytree(saved_twice, tmp_path, dirs_exist_ok=True)
    return tmp_path / "tiny-gpt" / "checkpoints"


def assert_goes_on(run_on: Any, folder: Path) -> None:
    """The same run goes on to its end, and nothing is left of what failed."""
    run = Path(run_on(2, train_here, str(folder), *SHARED, "run.steps=4")[0]["folder"])
    assert left_in(run / "checkpoints") == Left(4, (3, 4), ())
    assert temporary_names(run / "checkpoints") == []
    assert steps_of(run / "receipts.jsonl") == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "culprit"),
    [
        ("__0_0.distcp", 0),
        ("__1_0.distcp", 1),
        (".metadata", 0),
        ("metadata.json", 0),
        ("manifest.json.writing", 0),
        ("iter_0000003.writing", 0),
        (f"{TRACKER}.writing", 0),
    ],
)
def test_whatever_finds_no_space_is_said_on_every_rank_and_the_last_checkpoint_stays(
    run_on: Any, tmp_path: Path, checkpoints: Path, name: str, culprit: int
) -> None:
    said = run_on(2, train_without_space, str(tmp_path), name, culprit)
    assert said == [said[0]] * 2
    assert str(checkpoints / "iter_0000003") in said[0]
    assert FULL in said[0]
    left = left_in(checkpoints)
    assert left.announced == 2
    assert left.whole[:2] == (1, 2)
    assert left.broken == ()
    assert_goes_on(run_on, tmp_path)


# Permissions


@contextmanager
def permissions_bind() -> Iterator[None]:
    """Let permissions bind root as they bind others: give up the capabilities that override them."""
    libc, data = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 6)()
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    overriding = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    if libc.capget(header, data):
        raise OSError(ctypes.get_errno(), "capget")
    before = data[0]
    data[0] &= ~overriding  # of the first 32 effective ones
    if libc.capset(header, data):
        raise OSError(ctypes.get_errno(), "capset")
    try:
        yield
    finally:
        data[0] = before
        libc.capset(header, data)


def train_under_permissions(folder: str) -> str:
    with permissions_bind():
        return said_by_training(folder)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    before = folder.stat().st_mode
    folder.chmod(0o555)
    try:
        yield
    finally:
        folder.chmod(before)


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_a_read_only_folder_is_said_on_every_rank_and_the_last_checkpoint_stays(
    run_on: Any, tmp_path: Path, checkpoints: Path, below: str
) -> None:
    with read_only(checkpoints.parent / below):
        said = run_on(2, train_under_permissions, str(tmp_path))
    assert said == [said[0]] * 2
    assert str(checkpoints if below else checkpoints.parent) in said[0]
    assert os.strerror(errno.EACCES) in said[0]
    assert left_in(checkpoints) == Left(2, (1, 2), ())
    assert_goes_on(run_on, tmp_path)


# The command


def test_the_command_ends_with_exit_code_1_and_the_run_goes_on(
    run_on: Any, tmp_path: Path, checkpoints: Path
) -> None:
    run = [sys.executable, "-m", "mixle_megatron", "pretrain", str(CONFIG)]
    environment = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    full = subprocess.run(
        [*run, *overrides(tmp_path, *SHARED, "run.steps=4")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LONGEST_FILE, LONGEST_FILE)),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert full.returncode == 1, full.stdout + full.stderr
    assert f"cannot write the checkpoint {checkpoints / 'iter_0000003'}" in full.stderr
    assert os.strerror(errno.EFBIG) in full.stderr
    assert left_in(checkpoints) == Left(2, (1, 2), ())
    assert_goes_on(run_on, tmp_path)
