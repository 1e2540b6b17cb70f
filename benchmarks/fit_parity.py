"""LM.fit on real text, mixle's own backend beside this one under five plans; prints one JSON object.

    OMP_NUM_THREADS=1 python benchmarks/fit_parity.py                # takes minutes
    OMP_NUM_THREADS=1 python benchmarks/fit_parity.py --bytes 20000  # less text

Every run starts from the same weights and sees the same rows in the same updates: the first bytes of
this Python's library sources, two epochs. Training amplifies rounding, so one run is mixle's backend
against itself with every weight moved by one unit in the last place: no two correct programs can be
held to less. Biases of keys are left out, as attention does not see them and their gradient is rounding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mixle.models.language_model import LM

import mixle_megatron  # noqa: F401  registers the backend
from mixle_megatron.training.quiet import quieten

SIZES = {"vocab": 256, "d_model": 128, "n_layer": 4, "n_head": 4, "block": 128}
GLOBAL_BATCH, LEARNING_RATE, SEED, EPOCHS = 8, 3e-3, 0, 2


@dataclass(frozen=True)
class Run:
    """One LM.fit.

    Attributes:
        backend: mixle's name of it.
        axes: sizes of the plan, by LM.fit's names.
        moved: whether every weight starts one unit in the last place away.
    """

    backend: str
    axes: dict[str, int]
    moved: bool = False

    @property
    def ranks(self) -> int:
        """How many processes it takes."""
        count = 1
        for size in self.axes.values():
            count *= size
        return count

    @property
    def replicas(self) -> int:
        """How many of them read rows of their own."""
        return self.axes.get("dp_replicate", 1) * self.axes.get("dp_shard", 1)


REFERENCE = "torch_native, one rank"
RUNS = {
    REFERENCE: Run("torch_native", {}),
    "torch_native, weights moved by one unit in the last place": Run("torch_native", {}, moved=True),
    "megatron, one rank": Run("megatron", {}),
    "megatron, dp_replicate=2": Run("megatron", {"dp_replicate": 2}),
    "megatron, dp_shard=2": Run("megatron", {"dp_shard": 2}),
    "megatron, tp=2": Run("megatron", {"tp_size": 2}),
    "megatron, tp=2 pp=2": Run("megatron", {"tp_size": 2, "pp_size": 2}),
}


def library_sources(count: int) -> bytes:
    """The first ``count`` bytes of the sorted top-level modules of this Python's standard library."""
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= count:
            return text[:count]
    raise ValueError(f"the standard library's top-level modules have {len(text)} bytes, fewer than {count}")


def fit(run: Run, text: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The epochs' losses and the time of one fit, and the parameters that it leaves."""
    torch.manual_seed(SEED)
    lm = LM(**SIZES, device="cpu")
    if run.moved:
        with torch.no_grad():
            for parameter in lm.module.parameters():
                parameter.copy_(torch.nextafter(parameter, torch.tensor(torch.inf)))
    losses: list[float] = []
    started = time.perf_counter()
    lm.fit(
        list(text),
        dense=True,
        distributed=True,
        distributed_backend=run.backend,
        epochs=EPOCHS,
        batch_size=GLOBAL_BATCH // run.replicas,
        lr=LEARNING_RATE,
        seed=SEED,
        optimizer="adam",
        log=lambda _epoch, loss: losses.append(loss),
        **run.axes,
    )
    found = {"losses": losses, "seconds": round(time.perf_counter() - started, 1)}
    return found, {name: parameter.detach() for name, parameter in lm.module.named_parameters()}


def rank_main(rank: int, run: Run, text: bytes, folder: str) -> None:
    """One rank of a fit; rank 0 writes what came of it into ``folder``."""
    quieten()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=run.ranks
    )
    found, parameters = fit(run, text)
    if rank == 0:
        torch.save({"found": found, "parameters": parameters}, f"{folder}/found.pt")
    dist.destroy_process_group()


def fit_on_own_ranks(run: Run, text: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Start the ranks of a fit and give what it came to."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (run, text, folder), nprocs=run.ranks)
        saved = torch.load(f"{folder}/found.pt")
    return saved["found"], saved["parameters"]


def without_keys_bias(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """All of a parameter, but of a qkv bias only the queries' and the values' thirds."""
    return parameter.view(3, -1)[[0, 2]] if name.endswith("attn.qkv.bias") else parameter


def differences(
    found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], initial: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """The largest difference of a parameter, where it is, and all of them beside what training moved."""
    largest, where, apart, moved = 0.0, "", 0.0, 0.0
    for name, parameter in reference.items():
        expected = without_keys_bias(name, parameter).double()
        difference = without_keys_bias(name, found[name]).double() - expected
        apart += float(difference.square().sum())
        moved += float((expected - without_keys_bias(name, initial[name]).double()).square().sum())
        if float(difference.abs().max()) > largest:
            largest, where = float(difference.abs().max()), name
    return {
        "largest_parameter_difference": largest,
        "of_parameter": where,
        "distance_to_reference_over_distance_trained": (apart / moved) ** 0.5,
    }


def initial_parameters() -> dict[str, torch.Tensor]:
    """The weights that every fit but the moved one starts from."""
    torch.manual_seed(SEED)
    return {name: parameter.detach() for name, parameter in LM(**SIZES).module.named_parameters()}


def main() -> None:
    """Fit under every plan and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=int, default=200_000)
    text = library_sources(parser.parse_args().bytes)
    fits = {name: fit_on_own_ranks(run, text) for name, run in RUNS.items()}
    reference, expected = fits[REFERENCE]
    initial, runs = initial_parameters(), {}
    for name, (found, parameters) in fits.items():
        apart = [own / other - 1 for own, other in zip(found["losses"], reference["losses"], strict=True)]
        runs[name] = {
            **found,
            "relative_loss_differences": apart,
            **differences(parameters, expected, initial),
        }
    result = {
        "benchmark": "fit_parity",
        "runs": runs,
        "text": {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()},
        "sizes": SIZES | {"global_batch": GLOBAL_BATCH, "lr": LEARNING_RATE, "epochs": EPOCHS, "seed": SEED},
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("mixle", "megatron-core", "torch")},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
