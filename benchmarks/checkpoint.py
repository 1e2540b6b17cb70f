"""Bytes per second of saving and loading against mixle's own torch_native backend; prints one JSON object.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint.py
    OMP_NUM_THREADS=1 python benchmarks/checkpoint.py --plans "one rank" --pairs 11 --no-export

Both save the state of the same ``CausalLM`` after one update, its fp32 parameters and adam's two moments,
in turn and in the same processes; bytes are those of this state, whatever a format adds. Both bring their
files onto the disk and take their SHA-256, and ``bare`` is what is left of a save without the time in which
rank 0 did either. A load reads files that were just written, from memory. ``load`` is ``load_checkpoint``
by itself, in which mixle's compares all checksums; this package's runs do so before they call it, which
``verify_and_load`` counts in. ``export`` is how much memory of its own an export needs, as a multiple of
the largest tensor.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mixle.models.transformer import build_causal_lm
from mixle.utils.parallel import dcp_checkpoint, get_training_backend
from mixle.utils.parallel.training_contracts import ParallelPlan

import mixle_megatron  # noqa: F401  registers the backend
from mixle_megatron.checkpoint.completeness import damage
from mixle_megatron.checkpoint.export import export_checkpoint
from mixle_megatron.training.quiet import quieten

PLANS: dict[str, tuple[dict[str, int], str, str]] = {
    "one rank": ({}, "fp32", "fully_reshardable"),
    "dp_replicate=2, dp_reshardable": ({"dp_replicate": 2}, "fp32", "dp_reshardable"),
    "dp_shard=2, dp_reshardable": ({"dp_shard": 2}, "bf16", "dp_reshardable"),
    "dp_shard=2, fully_reshardable": ({"dp_shard": 2}, "bf16", "fully_reshardable"),
}
"""Sizes, precision and optimizer format. mixle 0.8.2 cannot shard in fp32: torch 2.14 wants a policy."""

REPORTED_ONLY = "dp_shard=2, fully_reshardable"
FIGURES = {"save": 1.0, "load": 1.0, "verify_and_load": 1.0}
OURS, THEIRS = "megatron", "torch_native"
SIZES = {"vocab": 256, "d_model": 512, "n_layer": 8, "n_head": 8, "block": 64}
EXPORTED = {"vocab": 256, "d_model": 512, "n_layer": 8, "n_head": 8, "block": 64}
ROWS = 4
WATCHED = (
    (os, "fsync", "fsync"),
    (hashlib, "file_digest", "sha256"),
    (dcp_checkpoint, "_sha256", "sha256"),
)
"""Functions through which both backends wait for the disk and take checksums."""


class Watch:
    """Times in which this process waited for the disk or took checksums; of several threads, when any did."""

    def __init__(self) -> None:
        self._times: dict[str, list[tuple[float, float]]] = {"fsync": [], "sha256": []}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note them inside."""
        self._times = {name: [] for name in self._times}
        places = (
            (os, "fsync", "fsync"),
            (hashlib, "file_digest", "sha256"),
            (dcp_checkpoint, "_sha256", "sha256"),
        )
        originals = [getattr(owner, name) for owner, name, _ in places]
        for (owner, name, what), original in zip(places, originals, strict=True):
            setattr(owner, name, self._noting(what, original))
        try:
            yield
        finally:
            for (owner, name, _), original in zip(places, originals, strict=True):
                setattr(owner, name, original)

    def _noting(self, what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            began = perf_counter()
            try:
                return original(*arguments)
            finally:
                self._times[what].append((began, perf_counter()))

        return noting

    def seconds(self, *names: str) -> float:
        """How long at least one of these went on."""
        total, reached = 0.0, 0.0
        for began, ended in sorted(time for name in names for time in self._times[name]):
            total += max(0.0, ended - max(began, reached))
            reached = max(reached, ended)
        return total


class Leg:
    """One backend's session on a fresh copy of the model: a save and its loads, after one of each.

    Attributes:
        seconds: of each thing timed, between barriers; parts of it on this rank.
        bytes_written: by all ranks.
        state_bytes: of parameters and moments.
    """

    def __init__(
        self, backend: str, module: torch.nn.Module, plan: ParallelPlan, given: dict[str, Any]
    ) -> None:
        self._backend, self._folder = backend, Path(given["folder"], "checkpoint")
        options = {"precision": given["precision"], "device": "cpu", "optimizer": "adam", "lr": 1e-3}
        if backend == OURS:
            options["optimizer_format"] = given["format"]
        session = get_training_backend(backend).prepare(copy.deepcopy(module), plan=plan, **options)
        tokens = torch.arange(ROWS * SIZES["block"]).view(ROWS, -1) % SIZES["vocab"]
        own = tokens[session.data_parallel_rank :: session.data_parallel_size]
        session.train_batch(own, own)
        self._measure(session)
        self.seconds = self._measure(session)
        self.bytes_written = sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file())
        self.state_bytes = 12 * sum(parameter.numel() for parameter in module.parameters())
        session.close()

    def _measure(self, session: Any) -> dict[str, float]:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        watch = Watch()
        with watch.watching():
            save = timed(lambda: session.save_checkpoint(str(self._folder)))
        parts = {name: watch.seconds(name) for name in ("fsync", "sha256")}
        alone = timed(lambda: session.load_checkpoint(str(self._folder)))
        verified = alone + (timed(self._verify) if self._backend == OURS else 0.0)
        bare = save - watch.seconds("fsync", "sha256")
        return {"save": save, "bare": bare, **parts, "load": alone, "verify_and_load": verified}

    def _verify(self) -> None:
        """What a run does on its first rank before it goes on from a checkpoint."""
        if dist.get_rank() == 0 and damage(self._folder, checksums=True, needs_manifest=True):
            raise RuntimeError(f"{self._folder} is damaged")


def timed(action: Callable[[], Any]) -> float:
    """Seconds until every rank has done it."""
    dist.barrier()
    began = perf_counter()
    action()
    dist.barrier()
    return perf_counter() - began


def measure(plan: ParallelPlan, pairs: int, given: dict[str, Any]) -> dict[str, Any]:
    """Time pairs of legs, first one and then the other first; every rank calls this."""
    torch.manual_seed(0)
    module = build_causal_lm(**SIZES)
    timed_pairs = []
    for index in range(pairs):
        order = (OURS, THEIRS) if index % 2 == 0 else (THEIRS, OURS)
        timed_pairs.append({backend: Leg(backend, module, plan, given) for backend in order})
    return summary(timed_pairs)


def summary(pairs: list[dict[str, Leg]]) -> dict[str, Any]:
    """Medians over the pairs; a ratio above 1 says that ours is faster."""
    state, names = pairs[0][OURS].state_bytes, list(pairs[0][OURS].seconds)

    def ratios(name: str) -> list[float]:
        return sorted(pair[THEIRS].seconds[name] / pair[OURS].seconds[name] for pair in pairs)

    def median(backend: str, name: str) -> float:
        return statistics.median(pair[backend].seconds[name] for pair in pairs)

    timed_names = [name for name in names if name not in ("fsync", "sha256")]
    return {
        "pairs": len(pairs),
        "ratio": {name: round(statistics.median(ratios(name)), 3) for name in timed_names},
        "ratios": {name: [round(ratio, 3) for ratio in ratios(name)] for name in FIGURES},
        "megabytes_per_second": {
            backend: {name: round(state / median(backend, name) / 1e6) for name in timed_names}
            for backend in (OURS, THEIRS)
        },
        "seconds": {
            backend: {name: round(median(backend, name), 4) for name in names} for backend in (OURS, THEIRS)
        },
        "megabytes": {
            "state": round(state / 1e6),
            **{backend: round(pairs[0][backend].bytes_written / 1e6) for backend in (OURS, THEIRS)},
        },
    }


def rank_main(rank: int, name: str, given: argparse.Namespace, folder: str) -> None:
    """One rank: measure one plan; rank 0 writes what it found into ``folder``."""
    quieten()
    torch.set_num_threads(1)
    sizes, precision, optimizer_format = PLANS[name]
    plan = ParallelPlan(**sizes)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=plan.world_size
    )
    options = {"folder": folder, "precision": precision, "format": optimizer_format}
    found = measure(plan, given.pairs, options)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measured_on_own_ranks(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks of a plan and give what they measured."""
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        mp.spawn(rank_main, (name, given, folder), nprocs=ParallelPlan(**PLANS[name][0]).world_size)
        return json.loads(Path(folder, "found.json").read_text())


# Exporting


def save_exported(folder: str) -> dict[str, int]:
    """Save two models that have not been trained; bytes of the larger one, and of its largest tensor."""
    quieten()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name, sizes in (("small", EXPORTED | {"d_model": 64, "n_layer": 1}), ("large", EXPORTED)):
        module = build_causal_lm(**sizes)
        with get_training_backend(OURS).prepare(module, plan=ParallelPlan(), device="cpu") as session:
            session.save_checkpoint(f"{folder}/{name}")
    sizes = [parameter.nbytes for parameter in module.parameters()]
    return {"model": sum(sizes), "largest_tensor": max(sizes)}


def export_within(folder: str, allowed: int) -> None:
    """Export with so many bytes beyond what the process has after a small export, or die of it."""
    heads = EXPORTED["n_head"]
    out = Path(folder, "out")
    out.unlink(missing_ok=True)
    export_checkpoint(Path(folder, "small"), out, to="mixle", heads=heads)  # imports what it needs
    out.unlink()
    status = Path("/proc/self/status").read_text()
    limit = int(re.search(r"VmData:\s+(\d+) kB", status)[1]) * 1024 + allowed
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    export_checkpoint(Path(folder, "large"), out, to="mixle", heads=heads)


def export_memory() -> dict[str, Any]:
    """The least memory with which an export succeeds, to a quarter of the largest tensor."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = in_a_process("save_exported", folder)
        step = sizes["largest_tensor"] // 4
        too_little, enough = 0, sizes["model"] // step
        while enough - too_little > 1:
            middle = (too_little + enough) // 2
            if in_a_process("export_within", folder, middle * step) is None:
                too_little = middle
            else:
                enough = middle
    return {
        "of_largest_tensor": enough / 4,
        "of_model": round(enough * step / sizes["model"], 3),
        "bytes": sizes,
    }


def in_a_process(function: str, *arguments: Any) -> Any:
    """What a function of this module gives in a process of its own; None where that fails."""
    code = f"import json, checkpoint; print(json.dumps([checkpoint.{function}(*{arguments!r})]))"
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1])[0] or {} if done.returncode == 0 else None


def main() -> None:
    """Measure every plan, and the export, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--folder", help="where checkpoints are written; by default the system's own")
    parser.add_argument("--export", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    plans = {name: measured_on_own_ranks(name, given) for name in given.plans}
    result = {
        "benchmark": "checkpoint",
        "ratio": {name: {key: found["ratio"][key] for key in FIGURES} for name, found in plans.items()},
        "limit": {name: FIGURES for name in plans if name != REPORTED_ONLY},
        "plans": plans,
        "export": export_memory() if given.export else None,
        "sizes": SIZES,
        "load_average": round(os.getloadavg()[1], 2),
        "versions": {name: version(name) for name in ("mixle", "megatron-core", "torch")},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
