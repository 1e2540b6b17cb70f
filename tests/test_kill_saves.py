"""Nothing is lost whenever a run is killed; ``benchmarks/kill_saves.py`` does the same 300 times."""

from __future__ import annotations

from pathlib import Path

import pytest
from killed_runs import NAME, KilledRun
from trainer_jobs import TRACKER

SEED = 11


@pytest.mark.parametrize(
    ("ranks", "asynchronous", "kills"), [(1, False, 3), (2, False, 5), (1, True, 3), (2, True, 4)]
)
def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(
    tmp_path: Path, ranks: int, asynchronous: bool, kills: int
) -> None:
    run = KilledRun(tmp_path, ranks, asynchronous, SEED)
    told = [run.kill() for _ in range(kills)]
    assert [fault for kill in told for fault in kill.faults] == []
    assert run.finish() == []


def test_a_checkpoint_that_is_lost_between_two_kills_is_noticed(tmp_path: Path) -> None:
    run = KilledRun(tmp_path, 1, False, SEED)
    assert run.kill().faults == ()
    checkpoints = tmp_path / NAME / "checkpoints"
    announced = checkpoints / f"iter_{int((checkpoints / TRACKER).read_text()):07d}"
    min(announced.glob("*.distcp")).write_bytes(b"")
    assert run.kill().faults != ()
