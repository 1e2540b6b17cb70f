"""Saves that training does not wait for: what they hold, when they are there, and what goes wrong."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from small_gpts import session, train_update
from snapshots import differences, message_of, snapshot

from mixle_megatron.errors import CheckpointError

PLANS = [{}, {"dp_shard": 2}, {"tp": 2}, {"pp": 2}]


def children() -> set[int]:
    """Processes that this one has started and that are still there."""
    import psutil

    return {child.pid for child in psutil.Process().children(recursive=True)}


def held_writer() -> Callable[[], None]:
    """Keep the writers that are forked from now on from writing; give what lets them."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    original = FileSystemWriterAsync.write_preloaded_data
    reads, writes = os.pipe()

    def waiting(*arguments: Any) -> Any:
        FileSystemWriterAsync.write_preloaded_data = staticmethod(original)
        os.close(writes)
        os.read(reads, 1)  # until the trainer has closed its end
        return original(*arguments)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(waiting)

    def let_write() -> None:
        FileSystemWriterAsync.write_preloaded_data = staticmethod(original)
        os.close(writes)
        os.close(reads)

    return let_write


def train_while_saving(folder: str, optimizer_format: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Save, train on while the writer is held, and let it write; what was saved, and what is then there."""
    before = children()
    with session("gpt2", "adam_scheduled", precision="bf16", **sizes) as opened:
        opened.optimizer_format = optimizer_format
        train_update(opened, 0)
        expected = snapshot(opened)
        let_write = held_writer()
        saving = opened.save_checkpoint(folder, loader_state={"position": 1}, asynchronous=True)
        for update in range(1, 4):
            train_update(opened, update)
        early = saving.done or Path(folder).exists()
        changed = differences(expected, snapshot(opened))
        let_write()
        saving.wait()
        done = saving.done and Path(folder).is_dir()
        payload = opened.load_checkpoint(folder)
        found = differences(expected, snapshot(opened))
        position = payload["loader_state"]["position"]
        left = children() - before
    return {
        "early": early,
        "changed": len(changed),
        "done": done,
        "found": found,
        "position": position,
        "left": left,
    }


@pytest.mark.parametrize("optimizer_format", ["fully_reshardable", "dp_reshardable"])
@pytest.mark.parametrize("sizes", PLANS, ids=str)
def test_it_holds_the_state_of_the_call_to_the_last_bit(
    run_on: Any, tmp_path: Path, sizes: dict[str, int], optimizer_format: str
) -> None:
    ranks = 2 if sizes else 1
    folder = str(tmp_path / "checkpoint")
    for told in run_on(ranks, train_while_saving, folder, optimizer_format, sizes):
        assert not told["early"]
        assert told["changed"] > 10
        assert told["done"]
        assert told["found"] == []
        assert told["position"] == 1
        assert told["left"] == set()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def save_three(folder: str) -> list[tuple[bool, bool, bool]]:
    """Three saves at once; which of them were there after each call."""
    seen = []
    with session(dp_shard=2) as opened:
        savings = []
        for update in range(3):
            train_update(opened, update)
            savings.append(opened.save_checkpoint(f"{folder}/{update}", asynchronous=True))
            seen.append(tuple(Path(folder, str(number)).is_dir() for number in range(3)))
        assert [saving.done for saving in savings] == [True, True, False]
    assert all(saving.done for saving in savings)
    return seen


def test_the_next_save_and_close_wait_for_the_last(run_on: Any, tmp_path: Path) -> None:
    expected = [(False, False, False), (True, False, False), (True, True, False)]
    assert run_on(2, save_three, str(tmp_path)) == [expected, expected]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


def train_until_done(folder: str) -> tuple[int, list[int]]:
    """Train on until the save is done, which no call of its own asks for; bytes that receipts count."""
    with session(dp_shard=2) as opened:
        train_update(opened, 0)  # the first one sends a little more
        expected = train_update(opened, 1).collective_bytes
        saving = opened.save_checkpoint(folder, asynchronous=True)
        counted = []
        while not saving.done:
            counted.append(train_update(opened, len(counted) + 2).collective_bytes)
        assert Path(folder).is_dir()
    return expected, counted


def test_updates_finish_it_and_do_not_count_what_that_sends(run_on: Any, tmp_path: Path) -> None:
    for expected, counted in run_on(2, train_until_done, str(tmp_path / "checkpoint")):
        assert set(counted) == {expected}


def replace_and_open(folder: str) -> int:
    """Save over an older checkpoint, and open it before it can be there."""
    with session(dp_shard=2) as opened:
        opened.save_checkpoint(folder)
        train_update(opened, 0)
        opened.save_checkpoint(folder, asynchronous=True)
        return opened.load_checkpoint(folder)["step"]


def test_loading_waits_for_it_and_it_replaces_an_older_one(run_on: Any, tmp_path: Path) -> None:
    assert run_on(2, replace_and_open, str(tmp_path / "checkpoint")) == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


# What goes wrong


@contextmanager
def no_file_longer_than(size: int, *, on_rank: int) -> Any:
    """Let the kernel refuse longer files to one rank and what it forks, as a full disk would."""
    import torch.distributed as dist

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == on_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def kill_writer(on_rank: int) -> None:
    """End the writer of one rank as the kernel does where memory is short."""
    import psutil
    import torch.distributed as dist

    if dist.get_rank() == on_rank:
        (writer,) = psutil.Process().children()
        writer.kill()


def fail_and_go_on(folder: str, fault: str, culprit: int) -> dict[str, Any]:
    """A save that cannot be written on one rank, after one that could; what is said, and what goes on."""
    broken, later = f"{folder}/broken", f"{folder}/later"
    said = {}
    with session(dp_shard=2) as opened:
        opened.save_checkpoint(f"{folder}/whole")
        train_update(opened, 0)
        if fault == "full":
            with no_file_longer_than(20_000, on_rank=culprit):
                saving = opened.save_checkpoint(broken, asynchronous=True)
        elif fault == "killed":
            let_write = held_writer()
            saving = opened.save_checkpoint(broken, asynchronous=True)
            kill_writer(on_rank=culprit)
            let_write()
        receipt = None
        try:
            for update in range(1, 1000):
                receipt = train_update(opened, update)
        except CheckpointError as error:
            said["training"] = str(error)
        # Every committed update gave its receipt before the failure was raised.
        assert receipt is None or receipt.step == opened.step
        assert not saving.done
        said["wait"] = message_of(saving.wait, CheckpointError)
        said["room"] = sorted(path.name for path in Path(folder).iterdir())
        train_update(opened, 5)
        saving = opened.save_checkpoint(later, asynchronous=True)
        saving.wait()
        expected = snapshot(opened)
        opened.load_checkpoint(later)
        assert differences(expected, snapshot(opened)) == []
        opened.load_checkpoint(f"{folder}/whole")
    return said


@pytest.mark.parametrize(
    ("fault", "culprit", "reason"),
    [
        ("full", 0, "rank 0: [Errno 27] File too large"),
        ("full", 1, "rank 1: [Errno 27] File too large"),
        ("killed", 1, "rank 1: the process that wrote its files was killed by SIGKILL"),
    ],
)
def test_a_writers_failure_is_raised_on_every_rank_and_training_can_go_on(
    run_on: Any, tmp_path: Path, fault: str, culprit: int, reason: str
) -> None:
    for said in run_on(2, fail_and_go_on, str(tmp_path), fault, culprit):
        expected = f"cannot write the checkpoint {tmp_path}/broken: {reason}"
        assert said["training"] == said["wait"] == expected
        assert said["room"] == ["whole"]


def fail_on_first_rank(folder: str, asynchronous: bool) -> tuple[str, str]:
    """The first rank can write its shard, but nothing that it writes when all have written theirs."""
    with session(dp_shard=2) as opened:
        opened.save_checkpoint(f"{folder}/whole")
        saved = partial(opened.save_checkpoint, f"{folder}/broken", asynchronous=asynchronous)
        if asynchronous:
            saving = saved()
            with no_file_longer_than(100, on_rank=0):
                said = message_of(saving.wait, CheckpointError)
        else:
            with no_file_longer_than(20_000, on_rank=1):
                said = message_of(saved, CheckpointError)
        train_update(opened, 0)
        names = ", ".join(sorted(path.name for path in Path(folder).iterdir()))
    return said, names


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_only_one_rank_cannot_write_keeps_no_rank_waiting(
    run_on: Any, tmp_path: Path, asynchronous: bool
) -> None:
    culprit = "" if asynchronous else "rank 1: "
    for said, names in run_on(2, fail_on_first_rank, str(tmp_path), asynchronous):
        assert said == f"cannot write the checkpoint {tmp_path}/broken: {culprit}[Errno 27] File too large"
        assert names == "whole"


def close_with_failure(folder: str) -> tuple[str, bool, set[int]]:
    """Close a session whose last checkpoint fails; its module is given back, and nothing is left."""
    before = children()

    def close() -> None:
        with session(dp_shard=2) as opened, no_file_longer_than(20_000, on_rank=1):
            opened.save_checkpoint(folder, asynchronous=True)

    said = message_of(close, CheckpointError)
    from mixle_megatron import host

    return said, host.installed(), children() - before


def test_close_says_that_the_last_checkpoint_failed_and_closes(run_on: Any, tmp_path: Path) -> None:
    for said, redirected, left in run_on(2, close_with_failure, str(tmp_path / "checkpoint")):
        assert "rank 1: [Errno 27]" in said
        assert not redirected
        assert left == set()


def leave_by_exception(folder: str) -> tuple[str, set[int], list[str]]:
    """An exception on each rank while a writer is held: nothing is waited for, and no writer is left."""
    before = children()
    let_write = held_writer()
    try:
        with session(dp_shard=2) as opened:
            saving = opened.save_checkpoint(f"{folder}/checkpoint", asynchronous=True)
            raise KeyError("the user's own")
    except KeyError:
        left = children() - before
    let_write()
    names = [path.name for path in Path(folder).iterdir()]
    said = message_of(saving.wait, CheckpointError)
    with session(dp_shard=2) as opened:
        opened.save_checkpoint(f"{folder}/checkpoint", asynchronous=True)
    return said, left, names


def test_an_exception_gives_an_unfinished_checkpoint_up(run_on: Any, tmp_path: Path) -> None:
    for said, left, names in run_on(2, leave_by_exception, str(tmp_path)):
        assert "was given up: an exception closed its session" in said
        assert left == set()
        assert names == ["checkpoint.writing"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def run_out_of_data_while_saving(folder: str, broken: bool) -> str:
    """One replica has no more batches; the other trains on until the save has ended, and both with it."""
    said = "finished"
    with session(dp_shard=2) as opened:
        train_update(opened, 0)
        with no_file_longer_than(20_000 if broken else 1 << 30, on_rank=1):
            saving = opened.save_checkpoint(folder, asynchronous=True)
        try:
            while opened.data_parallel_rank == 0 and not saving.done:
                train_update(opened, 1)
            opened.finish_accumulation()
        except CheckpointError as error:
            said = str(error)
        train_update(opened, 2)
    return f"{said} at {opened.step}"


@pytest.mark.parametrize("broken", [False, True])
def test_replicas_of_unequal_data_finish_it_together(run_on: Any, tmp_path: Path, broken: bool) -> None:
    said, also_said = run_on(2, run_out_of_data_while_saving, str(tmp_path / "checkpoint"), broken)
    assert said == also_said
    assert ("rank 1: [Errno 27]" if broken else "finished") in said
    assert (tmp_path / "checkpoint").exists() is not broken


def save_and_then(folder: str, asynchronous: bool) -> tuple[list[bool], str, bool]:
    """What the first rank found when the checkpoint had its name; what a failure of that says, and leaves."""
    import torch.distributed as dist

    called = []

    def look() -> None:
        assert dist.get_rank() == 0
        called.append(Path(folder, "first").is_dir())

    def fail() -> None:
        raise CheckpointError("no, thank you")

    with session(dp_shard=2) as opened:

        def save(name: str, afterwards: Callable[[], None]) -> None:
            path = f"{folder}/{name}"
            saving = opened.save_checkpoint(path, asynchronous=asynchronous, afterwards=afterwards)
            if saving is not None:
                saving.wait()

        save("first", look)
        said = message_of(lambda: save("second", fail), CheckpointError)
        train_update(opened, 0)
        return called, said, Path(folder, "second").is_dir()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_the_first_rank_does_afterwards_is_part_of_the_save(
    run_on: Any, tmp_path: Path, asynchronous: bool
) -> None:
    first, second = run_on(2, save_and_then, str(tmp_path), asynchronous)
    assert first == ([True], "no, thank you", True)
    assert second == ([], "no, thank you", True)
