"""Kills a run at random moments, starts it again, and says what was lost: nothing may be.

What a kill leaves is judged from outside, with JSON and SHA-256 alone: every folder that has a checkpoint's
name must be whole, the announced one must be among them, and the next start must go on from the newest.
In the end the run is let finish, and compared with one that nobody has disturbed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import statistics
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tiny_run import overrides
from trainer_jobs import CHECKPOINT, TRACKER, Announced, Job, Resumed, steps_of, temporary_names

NAME = "killed"
STARTING, TRAINING = "starting", "training"
INSIDE = ("writing", "deleting", "not announced")
"""Moments inside a save: its files are written; it has its name and is not announced; older ones go."""

CYCLES = 3.0
"""How many times an update and its save last, is the time after a start in which a kill falls."""

EARLY = 0.1
"""The share of kills that fall into the start itself."""

_SETTINGS = (
    f"run.name={NAME}",
    "model.num_layers=1",
    "evaluation.every=0",
    "checkpoint.keep=2",
    "logging.progress=off",
    "optimizer.decay_steps=1000",
)
_ENDLESS = 1_000_000


@dataclass(frozen=True)
class Left:
    """What lies in a run's folder of checkpoints when all of its processes have ended.

    Attributes:
        announced: the step that the tracker file names; None where there is none.
        whole: the steps of whole checkpoints.
        broken: names of checkpoints that are not whole.
    """

    announced: int | None = None
    whole: tuple[int, ...] = ()
    broken: tuple[str, ...] = ()

    @property
    def newest(self) -> int | None:
        """The step to go on from."""
        return max(self.whole, default=None)


def left_in(checkpoints: Path) -> Left:
    """Look at every checkpoint."""
    if not checkpoints.is_dir():
        return Left()
    names = sorted(name for name in os.listdir(checkpoints) if CHECKPOINT.fullmatch(name))
    broken = [name for name in names if not _is_whole(checkpoints / name)]
    tracker = checkpoints / TRACKER
    return Left(
        int(tracker.read_text()) if tracker.exists() else None,
        tuple(_step(name) for name in names if name not in broken),
        tuple(broken),
    )


def _step(name: str) -> int:
    return int(name.removeprefix("iter_"))


def _is_whole(folder: Path) -> bool:
    """Whether exactly the files of its manifest are there, with their checksums."""
    try:
        files = json.loads((folder / "manifest.json").read_text())["files"]
    except (OSError, ValueError):
        return False
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    del found["manifest.json"]
    return found == {name: record["checksum"] for name, record in files.items()}


@dataclass(frozen=True)
class Kill:
    """One kill, and what was wrong until the next one.

    Attributes:
        moment: what the run was doing: :data:`STARTING`, :data:`TRAINING` or one of :data:`INSIDE`.
        victim: ``all``, or the one rank.
        survivors_ended: ranks that did not end by themselves when another was killed.
        restart: seconds from the start before to training, where it got so far.
        faults: what should not be, one sentence each.
    """

    moment: str
    victim: str
    survivors_ended: int
    restart: float | None
    faults: tuple[str, ...]


@dataclass
class KilledRun:
    """A run of some ranks that saves after each update, and is killed and started again.

    Attributes:
        folder: holds the run and what the engine itself writes.
        ranks: of the run, data parallel.
        asynchronous: ``checkpoint.asynchronous``.
        seed: of the moments and the victims.
        kills: so far.
        steps: that it reached by the end.
    """

    folder: Path
    ranks: int
    asynchronous: bool
    seed: int
    kills: list[Kill] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(f"{self.seed} {self.ranks} {self.asynchronous}")
        self._run = self.folder / NAME
        self._checkpoints = self._run / "checkpoints"
        self._left = Left()
        self._starts: deque[float] = deque(maxlen=15)
        self._cycles: deque[float] = deque(maxlen=15)
        self.folder.mkdir(parents=True, exist_ok=True)

    def kill(self) -> Kill:
        """Start the run, kill it at a random moment, and judge what it did and what it leaves."""
        if not self._cycles:
            self._measure()
        rank, early = self._random.choice([None, None, *range(self.ranks)]), self._random.random() < EARLY
        share, job = self._random.random(), self._job(_ENDLESS)
        lives = job.goes_on(share * statistics.median(self._starts)) if early else self._trains(job, share)
        faults = [] if lives else [f"a rank ended before it was killed:\n{job.output()}"]
        job.kill(rank)
        moment = self._moment()
        survivors_ended = job.stop_survivors()
        if not any(isinstance(report, Resumed) for report in job.heard):
            moment = STARTING
        faults += self._judge(job)
        victim = "all" if rank is None else f"rank {rank}"
        self.kills.append(Kill(moment, victim, survivors_ended, self._clock(job), tuple(faults)))
        return self.kills[-1]

    def finish(self) -> list[str]:
        """Let the run end three updates later; what is wrong with its end, and with its whole curve."""
        self.steps = (self._left.newest or 0) + 3
        job = self._job(self.steps)
        codes = job.join()
        faults = self._judge(job)
        if codes != [0] * self.ranks:
            faults.append(f"the run ended with exit codes {codes}:\n{job.output()}")
        if self._left.announced != self.steps or temporary_names(self._checkpoints):
            faults.append(f"after its end there are {os.listdir(self._checkpoints)}, for {self.steps} steps")
        if _losses(self._run) != self._undisturbed_losses():
            faults.append("its losses are not those of an undisturbed run")
        return faults

    def _undisturbed_losses(self) -> list[float]:
        run = self.folder / "undisturbed" / NAME
        job = Job(self.ranks, run, self._overrides("undisturbed", self.steps, every=0), self.folder)
        if job.join() != [0] * self.ranks:
            raise RuntimeError(f"the undisturbed run failed:\n{job.output()}")
        return _losses(run)

    def _measure(self) -> None:
        """Learn how long a start lasts, and an update with its save."""
        job = self._job(_ENDLESS)
        while len(job.heard) < 6:
            if job.listen() is None:
                job.stop_survivors()
                raise RuntimeError(f"the run ended before anybody killed it:\n{job.output()}")
        job.kill(None)
        job.join()
        self._clock(job)
        self._left = left_in(self._checkpoints)

    def _trains(self, job: Job, share: float) -> bool:
        """Let it train for a share of the time in which kills fall; False where it ends before."""
        if job.listen() is None:
            return False
        return job.goes_on(share * CYCLES * statistics.median(self._cycles))

    def _clock(self, job: Job) -> float | None:
        """Remember how long a start and its saves lasted; the first, if it got so far."""
        times = [report.at for report in job.heard]
        self._cycles.extend(after - before for before, after in pairwise(times))
        if not times:
            return None
        self._starts.append(times[0] - job.began)
        return self._starts[-1]

    def _moment(self) -> str:
        """What a run was doing that has just been killed, by the names that lie there."""
        temporary = temporary_names(self._checkpoints)
        if any(name.endswith((".deleting", ".previous")) for name in temporary):
            return "deleting"
        if temporary:
            return "writing"
        left = left_in(self._checkpoints)
        return TRAINING if left.newest == left.announced else "not announced"

    def _judge(self, job: Job) -> list[str]:
        """What should not be, in what a start told and in what it leaves."""
        before, self._left = self._left, left_in(self._checkpoints)
        faults = [fault for report in job.heard for fault in _faults(report, before)]
        announced = [report.step for report in job.heard if isinstance(report, Announced)]
        first = (before.newest or 0) + 1
        if announced != list(range(first, first + len(announced))):
            faults.append(f"from step {before.newest} on it announced {announced}")
        if self._left.broken:
            faults.append(f"{', '.join(self._left.broken)} bear a checkpoint's name and are not whole")
        floor = max([before.announced or 0, *announced])
        if (self._left.announced or 0) < floor:
            faults.append(f"{TRACKER} went back from {floor} to {self._left.announced}")
        if self._left.announced is not None and self._left.announced not in self._left.whole:
            faults.append(f"checkpoint {self._left.announced} was announced and is lost")
        return faults

    def _job(self, steps: int) -> Job:
        return Job(self.ranks, self._run, self._overrides("", steps, every=1), self.folder)

    def _overrides(self, below: str, steps: int, *, every: int) -> list[str]:
        return overrides(
            self.folder / below,
            *_SETTINGS,
            f"plan.dp_shard={self.ranks}",
            f"run.steps={steps}",
            f"checkpoint.every={every}",
            f"checkpoint.asynchronous={str(self.asynchronous).lower()}",
        )


def _faults(report: Resumed | Announced, before: Left) -> list[str]:
    """What is wrong with what a start tells, which found ``before``."""
    faults = []
    if report.temporary:
        faults.append(f"{', '.join(report.temporary)} stayed when step {report.step} was reached")
    if isinstance(report, Announced):
        return faults
    if report.step != before.newest:
        faults.append(f"it went on from step {report.step}, and not from {before.newest}")
    if (report.step or 0) < (before.announced or 0):
        faults.append(f"it went on from step {report.step}, and {before.announced} had been announced")
    if report.receipts != list(range(1, (report.step or 0) + 1)):
        faults.append(f"its receipts at step {report.step} are of the steps {report.receipts}")
    return faults


def _losses(run: Path) -> list[float]:
    receipts = run / "receipts.jsonl"
    assert steps_of(receipts)
    return [json.loads(line)["loss"] for line in receipts.read_text().splitlines()]


def summary(runs: list[KilledRun], faults: list[str]) -> dict[str, Any]:
    """Counts over all kills of some runs."""
    kills = [kill for run in runs for kill in run.kills]
    moments = [kill.moment for kill in kills]
    victims = [kill.victim for kill in kills]
    restarts = [kill.restart for kill in kills if kill.restart is not None]
    violations = [fault for kill in kills for fault in kill.faults] + faults
    return {
        "kills": len(kills),
        "violations": len(violations),
        "first_violations": violations[:5],
        "share_inside_saves": round(sum(moment in INSIDE for moment in moments) / len(kills), 3),
        "moments": {name: moments.count(name) for name in (STARTING, TRAINING, *INSIDE)},
        "victims": {name: victims.count(name) for name in sorted(set(victims))},
        "survivors_that_had_to_be_ended": sum(kill.survivors_ended for kill in kills),
        "seconds_to_training": round(statistics.median(restarts), 2),
    }
