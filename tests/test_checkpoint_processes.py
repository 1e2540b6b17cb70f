"""Saving leaves no process behind: a killed rank would orphan it, and each holds half a gigabyte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from small_gpts import session, train_update


def children_around_a_save(folder: str) -> tuple[list[int], list[int]]:
    import psutil

    with session(dp_shard=2) as opened:
        train_update(opened, 0)
        before = sorted(child.pid for child in psutil.Process().children())
        opened.save_checkpoint(f"{folder}/checkpoint")
        after = sorted(child.pid for child in psutil.Process().children())
    return before, after


def test_saving_starts_no_process_that_stays(run_on: Any, tmp_path: Path) -> None:
    for before, after in run_on(2, children_around_a_save, str(tmp_path)):
        assert after == before
