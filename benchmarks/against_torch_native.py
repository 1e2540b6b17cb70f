"""Tokens per second of one update against mixle's own torch_native backend; prints one JSON object.

    OMP_NUM_THREADS=1 python benchmarks/against_torch_native.py
    OMP_NUM_THREADS=1 python benchmarks/against_torch_native.py --plans tp=2 --pairs 21

Both train the same ``CausalLM`` from the same weights on the same batches, in fp32 on the CPU, in turn
and in the same processes. A leg opens a session, warms it up, times committed ``train_batch`` calls and
closes it, so that neither backend runs under what the other has open. Their losses have to agree.
Where other programs use the cores too, ``cpu_ratio`` says more than ``ratio``: it is of the CPU time of
rank 0, which leaves out what a rank waits.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mixle.models.transformer import build_causal_lm
from mixle.utils.parallel import get_training_backend
from mixle.utils.parallel.training_contracts import ParallelPlan

import mixle_megatron  # noqa: F401  registers the backend
from mixle_megatron.training.quiet import quieten

PLANS: dict[str, dict[str, int]] = {"one rank": {}, "dp_replicate=2": {"dp_replicate": 2}, "tp=2": {"tp": 2}}
FIGURES = {"one rank": 1.0, "dp_replicate=2": 1.0, "tp=2": 1.3}
OURS, THEIRS = "megatron", "torch_native"
SIZES = {"vocab": 256, "d_model": 128, "n_layer": 4, "n_head": 4, "block": 128}
ROWS, LEARNING_RATE = 8, 3e-3
WARM_UP = 3
COMPARED = 10
TOLERANCE = 1e-5
LEG_SECONDS = 1.2


class Leg:
    """One backend's session on a fresh copy of the model, and what it took.

    Attributes:
        seconds: wall clock of an update, between two barriers.
        cpu_seconds: CPU time of this process for an update.
        losses: of every update, warm-up included.
    """

    def __init__(self, backend: str, module: torch.nn.Module, plan: ParallelPlan, updates: int) -> None:
        session = get_training_backend(backend).prepare(
            copy.deepcopy(module), plan=plan, device="cpu", optimizer="adam", lr=LEARNING_RATE
        )
        batches = batches_of(session, WARM_UP + updates)
        self.losses = [session.train_batch(*batch).loss for batch in batches[:WARM_UP]]
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        self.losses += [session.train_batch(*batch).loss for batch in batches[WARM_UP:]]
        self.cpu_seconds = (time.process_time() - cpu) / updates
        dist.barrier()
        self.seconds = (time.perf_counter() - wall) / updates
        session.close()


def batches_of(session: Any, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This replica's rows of ``count`` global batches of text with something to learn."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 3, (count, ROWS, SIZES["block"] + 1), generator=generator)
    tokens = (torch.arange(noise.numel()).view_as(noise) * 7 + noise) % SIZES["vocab"]
    own = tokens[:, session.data_parallel_rank :: session.data_parallel_size]
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in own]


def largest_difference(ours: Leg, theirs: Leg) -> float:
    """Of the losses of the first updates, relative."""
    both = zip(ours.losses[:COMPARED], theirs.losses[:COMPARED], strict=True)
    return max(abs(own / other - 1) for own, other in both)


def measure(plan: ParallelPlan, pairs: int) -> dict[str, Any]:
    """Time pairs of legs, first one and then the other first; every rank calls this."""
    torch.manual_seed(0)
    module = build_causal_lm(**SIZES)
    trial = {backend: Leg(backend, module, plan, COMPARED) for backend in (OURS, THEIRS)}
    drift = largest_difference(trial[OURS], trial[THEIRS])
    if drift > TOLERANCE:
        raise RuntimeError(f"the two backends do different updates: their losses differ by {drift:.1e}")
    fastest = torch.tensor(min(leg.seconds for leg in trial.values()))
    dist.broadcast(fastest, src=0)
    updates = max(COMPARED, math.ceil(LEG_SECONDS / float(fastest)))
    timed = []
    for index in range(pairs):
        order = (OURS, THEIRS) if index % 2 == 0 else (THEIRS, OURS)
        timed.append({backend: Leg(backend, module, plan, updates) for backend in order})
    return {"updates_a_leg": updates, "largest_loss_difference": drift, **summary(timed)}


def summary(timed: list[dict[str, Leg]]) -> dict[str, Any]:
    """Medians over the pairs; a ratio above 1 says that ours is faster."""
    tokens = ROWS * SIZES["block"]
    ratios = [pair[THEIRS].seconds / pair[OURS].seconds for pair in timed]
    return {
        "pairs": len(timed),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in sorted(ratios)],
        "cpu_ratio": round(
            statistics.median(pair[THEIRS].cpu_seconds / pair[OURS].cpu_seconds for pair in timed), 3
        ),
        "tokens_per_second": {
            backend: round(tokens / statistics.median(pair[backend].seconds for pair in timed))
            for backend in (OURS, THEIRS)
        },
    }


def rank_main(rank: int, sizes: dict[str, int], given: argparse.Namespace, folder: str) -> None:
    """One rank: measure one plan; rank 0 writes what it found into ``folder``."""
    quieten()
    torch.set_num_threads(given.threads)
    plan = ParallelPlan(**sizes)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=plan.world_size
    )
    found = measure(plan, given.pairs)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measured_on_own_ranks(sizes: dict[str, int], given: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks of a plan and give what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (sizes, given, folder), nprocs=ParallelPlan(**sizes).world_size)
        return json.loads(Path(folder, "found.json").read_text())


def main() -> None:
    """Measure every plan and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    given = parser.parse_args()
    plans = {name: measured_on_own_ranks(PLANS[name], given) for name in given.plans}
    result = {
        "benchmark": "against_torch_native",
        "ratio": {name: found["ratio"] for name, found in plans.items()},
        "limit": {name: FIGURES[name] for name in plans},
        "plans": plans,
        "sizes": SIZES | {"rows": ROWS, "threads": given.threads},
        "load_average": round(os.getloadavg()[1], 2),
        "versions": {name: version(name) for name in ("mixle", "megatron-core", "torch")},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
