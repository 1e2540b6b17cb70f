"""Kills trainers at random moments, starts them again, and counts what was lost; prints one JSON object.

    OMP_NUM_THREADS=1 python benchmarks/kill_saves.py
    OMP_NUM_THREADS=1 python benchmarks/kill_saves.py --asynchronous --kills 100 --ranks 2 --seed 7

Each run saves after every update. SIGKILL comes to one rank alone, or to all of them with whatever they
have forked, at a moment that is uniform over a few updates with their saves, and now and then during the
start. ``violations`` has to be 0: the next start goes on from the newest whole checkpoint, nothing that
was announced is lost, ``receipts.jsonl`` holds each step once, nothing temporary stays, and in the end
the whole curve is, to the last bit, that of a run that nobody has disturbed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"


def main() -> None:
    """Kill the runs one after the other, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=300, help="in all, shared out over the runs")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="of each run")
    parser.add_argument("--asynchronous", action="store_true", help="save with checkpoint.asynchronous")
    parser.add_argument("--folder", help="where the runs are written; by default the system's own")
    given = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    import conftest  # noqa: F401  sets one thread a rank

    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = killed(given, Path(folder))
    versions = {name: version(name) for name in ("megatron-core", "torch")}
    print(json.dumps({"benchmark": "kill_saves", **found, "versions": versions}))
    sys.exit(found["violations"] > 0)


def killed(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What came of all kills."""
    from killed_runs import KilledRun, summary
    from rich.console import Console
    from rich.progress import Progress

    runs, faults = [], []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("kills", total=given.kills)
        for number, ranks in enumerate(given.ranks):
            run = KilledRun(folder / str(number), ranks, given.asynchronous, given.seed)
            runs.append(run)
            for _ in range(number, given.kills, len(given.ranks)):
                told = run.kill()
                progress.update(task, advance=1, description=f"{ranks} ranks, {told.moment}")
            faults += run.finish()
    return {
        "ranks": given.ranks,
        "asynchronous": given.asynchronous,
        "seed": given.seed,
        "steps": [run.steps for run in runs],
        **summary(runs, faults),
    }


if __name__ == "__main__":
    main()
