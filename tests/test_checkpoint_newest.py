"""A run goes on from its newest whole checkpoint, loses nothing on the way, and is one job's at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_checkpoints import facts, small_checkpoint

from mixle_megatron.checkpoint.damage import Damage
from mixle_megatron.checkpoint.iterations import TRACKER, iteration_name, step_of, steps_in
from mixle_megatron.checkpoint.manifest import write_manifest
from mixle_megatron.checkpoint.newest import Choice, choose, find_newest, settle
from mixle_megatron.checkpoint.run_lock import LOCK, run_lock
from mixle_megatron.errors import CheckpointError, Refused

# The choice, as a function

STEPS = st.sets(st.integers(0, 40), max_size=8)
TRACKERS = (
    st.none() | st.integers(0, 40).map(str) | st.sampled_from(["", "release", "-1", "1.5", "²", "7" * 99])
)


def damages(broken: bool) -> list[Damage]:
    return [Damage("__0_0.distcp", "truncated", "has 1 byte")] if broken else []


@given(steps=STEPS, broken=STEPS, named=TRACKERS)
def test_the_choice_is_the_newest_whole_one(steps: set[int], broken: set[int], named: str | None) -> None:
    judged: list[int] = []

    def damage_of(step: int) -> list[Damage]:
        judged.append(step)
        return damages(step in broken)

    whole = steps - broken
    if not whole and (steps or named is not None):
        with pytest.raises(CheckpointError) as error:
            choose(steps, named, damage_of)
        assert all(f"step {step}: __0_0.distcp: has 1 byte" in str(error.value) for step in steps)
        return
    choice = choose(steps, named, damage_of)
    assert choice.step == max(whole, default=None)
    if choice.step is not None:
        newer = sorted((step for step in steps if step > choice.step), reverse=True)
        assert [step for step, _ in choice.damaged] == newer
        assert judged == [*newer, choice.step]
        names_a_newer_one = named is not None and named.isdecimal() and int(named) in [choice.step, *newer]
        assert bool(choice.warnings) != names_a_newer_one


def test_nothing_there_is_no_fault() -> None:
    assert choose([], None, lambda step: damages(True)) == Choice(None)


def test_a_stray_file_is_said_and_is_no_reason_to_go_back() -> None:
    stray = [Damage("notes.txt", "unexpected", "is not of this checkpoint")]
    choice = choose([1, 2], "2", lambda step: stray if step == 2 else [])
    assert choice == Choice(2, (), ("checkpoint 2: notes.txt: is not of this checkpoint",))
    swapped = [Damage("common.pt", "unexpected", "is not of this checkpoint")]
    assert choose([1, 2], "2", lambda step: swapped if step == 2 else []).step == 1


@pytest.mark.parametrize(
    ("named", "words"),
    [
        (None, "is missing; going on from step 20, the newest whole checkpoint"),
        ("release", "holds 'release', which is no step; going on from step 20"),
        ("30", "names step 30, which has no checkpoint; going on from step 20"),
        ("10", "names step 10; going on from step 20, which is newer and whole"),
    ],
)
def test_a_tracker_that_says_otherwise_is_a_warning(named: str | None, words: str) -> None:
    (warning,) = choose([10, 20], named, lambda step: []).warnings
    assert warning == f"{TRACKER} {words}"


@given(st.integers(0, 10**9))
def test_names_of_steps(step: int) -> None:
    assert step_of(iteration_name(step)) == step
    assert iteration_name(100) == "iter_0000100"


@pytest.mark.parametrize(
    "name", ["iter_100", "iter_00000100", "iter_0000100.writing", "iter_0000100.damaged", "release", "iter_"]
)
def test_other_names_are_of_no_step(name: str) -> None:
    assert step_of(name) is None


# The choice, among real checkpoints


@pytest.fixture(scope="module")
def saved(run_on, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / iteration_name(2)
    small_checkpoint(run_on, folder)
    return folder


@pytest.fixture
def checkpoints(saved: Path, tmp_path: Path) -> Path:
    """Three whole checkpoints, of which the tracker file names the newest."""
    import shutil

    for step in (2, 4, 6):
        shutil.copytree(saved, tmp_path / iteration_name(step))
    (tmp_path / TRACKER).write_text("6")
    return tmp_path


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_whole_checkpoints_are_left_alone(checkpoints: Path) -> None:
    before = listed(checkpoints)
    choice = find_newest(checkpoints)
    assert choice == Choice(6)
    assert settle(checkpoints, choice) == []
    assert listed(checkpoints) == before
    assert find_newest(checkpoints / "absent") == Choice(None)


def test_damaged_ones_are_set_aside_and_not_deleted(checkpoints: Path) -> None:
    flip(checkpoints / "iter_0000006" / "__0_0.distcp")
    (checkpoints / "iter_0000004" / "__1_0.distcp").unlink()
    damaged = {step: listed(checkpoints / iteration_name(step)) for step in (4, 6)}
    choice = find_newest(checkpoints)
    assert choice.step == 2
    said = settle(checkpoints, choice)
    for step, line in zip((6, 4), said, strict=True):
        aside = checkpoints / f"{iteration_name(step)}.damaged"
        assert line.startswith(f"checkpoint {step} is damaged and was set aside as {aside}: __")
        assert listed(aside) == damaged[step]
        reason = (checkpoints / f"{aside.name}.txt").read_text()
        assert reason.strip() == dict(choice.damaged)[step]
    assert "__0_0.distcp: was changed" in said[0]
    assert "__1_0.distcp: is missing" in said[1]
    assert steps_in(checkpoints) == [2]
    assert (checkpoints / TRACKER).read_text() == "2"
    assert find_newest(checkpoints) == Choice(2)


def test_the_same_step_can_be_set_aside_again(checkpoints: Path, saved: Path) -> None:
    import shutil

    for name in ("iter_0000006.damaged", "iter_0000006.damaged.2"):
        flip(checkpoints / "iter_0000006" / "__0_0.distcp")
        settle(checkpoints, find_newest(checkpoints))
        assert (checkpoints / name).is_dir()
        shutil.copytree(saved, checkpoints / "iter_0000006")
    assert find_newest(checkpoints).step == 6


def test_nothing_is_set_aside_where_none_is_whole(checkpoints: Path) -> None:
    for step in (2, 4, 6):
        flip(checkpoints / iteration_name(step) / "__0_0.distcp")
    before = listed(checkpoints)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint is whole(.|\n)*step 6(.|\n)*step 4(.|\n)*step 2"
    ):
        find_newest(checkpoints)
    assert listed(checkpoints) == before


def test_a_tracker_that_names_what_is_gone_is_put_right(checkpoints: Path) -> None:
    (checkpoints / TRACKER).write_text("8\n")
    choice = find_newest(checkpoints, checksums=False)
    (said,) = settle(checkpoints, choice)
    assert "names step 8, which has no checkpoint" in said
    assert (checkpoints / TRACKER).read_text() == "6"


def test_a_tracker_alone_is_no_place_to_begin_anew(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("8")
    with pytest.raises(CheckpointError, match="names '8', but there is no checkpoint"):
        find_newest(tmp_path)


def test_without_checksums_only_sizes_count(checkpoints: Path) -> None:
    flip(checkpoints / "iter_0000006" / "__0_0.distcp")
    assert find_newest(checkpoints, checksums=False).step == 6
    assert find_newest(checkpoints, checksums=True).step == 4


def test_a_checkpoint_without_a_manifest_is_judged_by_its_completeness(checkpoints: Path) -> None:
    newest = checkpoints / "iter_0000006"
    (newest / "manifest.json").unlink()
    assert find_newest(checkpoints).step == 6
    (newest / "__1_0.distcp").unlink()
    assert find_newest(checkpoints).step == 4
    write_manifest(newest, facts())  # a manifest of what was never complete
    assert find_newest(checkpoints).step == 4


# One job at a time

HOLDER = """
import json, os, sys
from pathlib import Path
from mixle_megatron.checkpoint.run_lock import run_lock

with run_lock(Path(sys.argv[1])):
    child = os.fork()
    if child == 0:
        print(json.dumps({"child": os.getpid()}), flush=True)
        sys.stdin.read()
        os._exit(0)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen, int]]:
    """A job that holds the lock of ``tmp_path / "run"``, with a child that outlives it."""
    command = [sys.executable, "-W", "ignore", "-c", HOLDER, str(tmp_path / "run")]
    job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child = json.loads(job.stdout.readline())["child"]
    yield job, child
    job.stdin.close()
    job.wait()


def test_a_second_job_is_refused_until_the_first_is_dead(
    holder: tuple[subprocess.Popen, int], tmp_path: Path
) -> None:
    job, child = holder
    with pytest.raises(Refused) as refusal, run_lock(tmp_path / "run"):
        pass
    (fault,) = refusal.value.faults
    assert (fault.field, fault.value) == ("run.name", "run")
    assert f"is in use by process {job.pid} on {os.uname().nodename} since 20" in fault.rule
    job.send_signal(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    os.kill(child, 0)  # the child is alive, and holds nothing
    with run_lock(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / LOCK).read_text())["pid"] == os.getpid()


def test_a_lock_ends_with_its_context(tmp_path: Path) -> None:
    for _ in range(2):
        with run_lock(tmp_path / "run"), pytest.raises(Refused), run_lock(tmp_path / "run"):
            pass
        assert (tmp_path / "run" / LOCK).read_text() == ""
    with pytest.raises(ZeroDivisionError), run_lock(tmp_path / "run"):
        raise ZeroDivisionError
    with run_lock(tmp_path / "run"), run_lock(tmp_path / "other"):
        pass


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Refused, match="cannot be written"), run_lock(tmp_path / "file" / "run"):
        pass


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def failing(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", failing)
    with pytest.raises(Refused, match="No locks available"), run_lock(tmp_path / "run"):
        pass
