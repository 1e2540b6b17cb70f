"""How long an asynchronous save keeps training, against a synchronous one; prints one JSON object.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint_stall.py
    OMP_NUM_THREADS=1 python benchmarks/checkpoint_stall.py --plans tp=2 --pairs 11

``stall`` is what a loop waits for: the call of ``save_checkpoint(asynchronous=True)``, every poll
in the updates that follow, and the finishing of the checkpoint in the last of them, as a share of the
synchronous save of the same session, taken in turn. A poll is timed from where every rank has come to it:
what one waits for the other's update it waits without a save too. ``slower_updates`` is by how much longer
than without a save those updates took meanwhile, as a share of the same: on a host whose cores are all
training, the writer shares them, and each page of memory that training changes is copied once. The
figure to reach is for plans that gather nothing for a checkpoint. torch asks for huge pages, as in a run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mixle.utils.parallel.training_contracts import ParallelPlan

from mixle_megatron.backend import MegatronBackend
from mixle_megatron.checkpoint.asynchronous import Saves
from mixle_megatron.config.model import ModelSection
from mixle_megatron.models.gpt import GPT
from mixle_megatron.training.command import HUGE_PAGES
from mixle_megatron.training.quiet import quieten

PLANS: dict[str, tuple[dict[str, int], str]] = {
    "one rank": ({}, "fully_reshardable"),
    "tp=2": ({"tp": 2}, "fully_reshardable"),
    "dp_shard=2, dp_reshardable": ({"dp_shard": 2}, "dp_reshardable"),
    "dp_shard=2, fully_reshardable": ({"dp_shard": 2}, "fully_reshardable"),
}
REPORTED_ONLY = "dp_shard=2, fully_reshardable"
FIGURE = 0.10
MODEL = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 8, "seq_length": 16, "vocab_size": 257}
ROWS = 2
WARM_UP = 3


@dataclass(frozen=True)
class Pair:
    """Seconds of both saves, taken in turn.

    Attributes:
        synchronous: of a synchronous save.
        call: of the call that starts an asynchronous one.
        polls: of every poll after it, the finishing one included.
        slower: by how much longer the updates took that were made until it was done, without the polls.
        updates: how many those were.
    """

    synchronous: float
    call: float
    polls: float
    slower: float
    updates: int

    @property
    def stall(self) -> float:
        """The share of the synchronous save that training waits for an asynchronous one."""
        return (self.call + self.polls) / self.synchronous


class Measured:
    """A session that is trained and saved, with a clock on its polls."""

    def __init__(self, plan: ParallelPlan, optimizer_format: str, folder: Path, hidden_size: int) -> None:
        self.session = MegatronBackend().prepare(
            GPT(ModelSection(**(MODEL | {"hidden_size": hidden_size})), seed=1),
            plan=plan,
            device="cpu",
            optimizer="adam",
            uneven_batches=False,
            optimizer_format=optimizer_format,
        )
        self._folder = folder
        self._tokens = torch.randint(0, MODEL["vocab_size"], (ROWS, MODEL["seq_length"]))
        self._polled = 0.0
        self._clock_polls()
        for _ in range(WARM_UP):
            self.update()

    def _clock_polls(self) -> None:
        poll = Saves.poll

        def clocked(saves: Saves) -> None:
            dist.barrier()
            began = perf_counter()
            poll(saves)
            self._polled += perf_counter() - began

        Saves.poll = clocked

    def update(self) -> None:
        """One update of the same global batch."""
        rows = self._tokens[self.session.data_parallel_rank :: self.session.data_parallel_size]
        self.session.train_batch(rows, rows)

    def updates(self, count: int) -> float:
        """Seconds of so many updates."""
        dist.barrier()
        began = perf_counter()
        for _ in range(count):
            self.update()
        dist.barrier()
        return perf_counter() - began

    def synchronous(self) -> float:
        """Seconds of a synchronous save."""
        path = self._room()
        began = perf_counter()
        self.session.save_checkpoint(path)
        dist.barrier()
        return perf_counter() - began

    def asynchronous(self) -> tuple[float, float, float, int]:
        """Seconds of the call, of the polls, and of the updates until it is done; how many those were."""
        path = self._room()
        self._polled = 0.0
        began = perf_counter()
        saving = self.session.save_checkpoint(path, asynchronous=True)
        call = perf_counter() - began
        dist.barrier()
        began, count = perf_counter(), 0
        while not saving.done:
            self.update()
            count += 1
        dist.barrier()
        return call, self._polled, perf_counter() - began - self._polled, count

    def pair(self, index: int) -> Pair:
        """Both saves, first one and then the other first, and as many updates without any."""
        if index % 2 == 0:
            synchronous, started = self.synchronous(), self.asynchronous()
        else:
            started, synchronous = self.asynchronous(), self.synchronous()
        call, polls, while_writing, count = started
        return Pair(synchronous, call, polls, while_writing - self.updates(count), count)

    def _room(self) -> str:
        """A path for the next checkpoint; deleting the last one is no part of a save."""
        path = self._folder / "checkpoint"
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        return str(path)


def summary(pairs: list[Pair], bytes_saved: int) -> dict[str, Any]:
    """Medians over the pairs."""
    names = ("synchronous", "call", "polls")
    return {
        "stall": round(statistics.median(pair.stall for pair in pairs), 3),
        "stalls": sorted(round(pair.stall, 3) for pair in pairs),
        "slower_updates": round(statistics.median(pair.slower / pair.synchronous for pair in pairs), 2),
        "seconds": {
            name: round(statistics.median(getattr(pair, name) for pair in pairs), 4) for name in names
        },
        "updates_while_writing": statistics.median(pair.updates for pair in pairs),
        "megabytes": round(bytes_saved / 1e6),
    }


def rank_main(rank: int, name: str, given: argparse.Namespace, folder: str) -> None:
    """One rank: measure one plan; rank 0 writes what it found into ``folder``."""
    quieten()
    torch.set_num_threads(given.threads)
    sizes, optimizer_format = PLANS[name]
    plan = ParallelPlan(**sizes)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=plan.world_size
    )
    measured = Measured(plan, optimizer_format, Path(folder), given.hidden_size)
    for index in range(2):
        measured.pair(index)  # memory that later saves find again
    pairs = [measured.pair(index) for index in range(given.pairs)]
    if rank == 0:
        bytes_saved = sum(path.stat().st_size for path in Path(folder, "checkpoint").iterdir())
        Path(folder, "found.json").write_text(json.dumps(summary(pairs, bytes_saved)))
    measured.session.close()
    dist.destroy_process_group()


def measured_on_own_ranks(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks of a plan and give what they measured."""
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        ranks = ParallelPlan(**PLANS[name][0]).world_size
        mp.spawn(rank_main, (name, given, folder), nprocs=ranks)
        return json.loads(Path(folder, "found.json").read_text())


def main() -> None:
    """Measure every plan and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--hidden-size", type=int, default=MODEL["hidden_size"], help="512: 305 MB")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--folder", help="where checkpoints are written; by default the system's own")
    given = parser.parse_args()
    os.environ.setdefault(HUGE_PAGES, "1")
    plans = {name: measured_on_own_ranks(name, given) for name in given.plans}
    result = {
        "benchmark": "checkpoint_stall",
        "stall": {name: found["stall"] for name, found in plans.items()},
        "limit": {name: FIGURE for name in plans if name != REPORTED_ONLY},
        "plans": plans,
        "model": MODEL | {"hidden_size": given.hidden_size, "rows": ROWS, "threads": given.threads},
        "load_average": round(os.getloadavg()[1], 2),
        "versions": {name: version(name) for name in ("megatron-core", "torch")},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
