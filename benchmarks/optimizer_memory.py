"""Bytes of optimizer state on each rank under dp_shard=N against a replica; prints one JSON object.

For N ranks it trains one update of the same small GPT twice, with ``dp_replicate=N`` and with
``dp_shard=N``, and compares what Megatron's optimizer then holds: the moments of adam, and the fp32
main parameters where they are no views of the model's own (bf16).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mixle.utils.parallel.training_contracts import ParallelPlan

from mixle_megatron.backend import MegatronBackend
from mixle_megatron.models.gpt import GPT
from mixle_megatron.session import MegatronSession

WORLDS = (1, 2, 4)
PRECISIONS = ("fp32", "bf16")
TOLERANCE = 0.05
MODEL = {"num_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 257}


def optimizer_bytes(session: MegatronSession) -> int:
    """Bytes of the tensors that this rank's optimizer holds beside the model's parameters."""
    model = {parameter.untyped_storage().data_ptr() for parameter in session.module.parameters()}
    held = 0
    for part in session.optimizer.chained_optimizers:
        tensors = [tensor for group in part.optimizer.param_groups for tensor in group["params"]]
        tensors += [value for state in part.optimizer.state.values() for value in state.values()]
        for tensor in filter(torch.is_tensor, tensors):
            if tensor.untyped_storage().data_ptr() not in model:
                held += tensor.numel() * tensor.element_size()
    return held


def bytes_under(plan: ParallelPlan, precision: str) -> list[int]:
    """What each rank's optimizer holds after one update under ``plan``; every rank calls this."""
    session = MegatronBackend().prepare(
        GPT.of(**MODEL), plan=plan, precision=precision, device="cpu", optimizer="adam"
    )
    with session:
        tokens = torch.randint(0, MODEL["vocab_size"], (2, MODEL["seq_length"] + 1))
        session.train_batch(tokens[:, :-1], tokens[:, 1:])
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, optimizer_bytes(session))
    return held


def rank_main(rank: int, world: int, folder: str) -> None:
    """One rank: measure both plans in both precisions; rank 0 writes what it found into ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    found = {
        precision: {
            "replicated": bytes_under(ParallelPlan(dp_replicate=world), precision),
            "sharded": bytes_under(ParallelPlan(dp_shard=world), precision),
        }
        for precision in PRECISIONS
    }
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(world: int) -> dict[str, Any]:
    """Bytes by precision on ``world`` ranks, and the largest shard as a multiple of its fair share."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (world, folder), nprocs=world)
        found = json.loads(Path(folder, "found.json").read_text())
    for held in found.values():
        held["ratio_to_share"] = round(max(held["sharded"]) * world / max(held["replicated"]), 4)
    return found


def main() -> None:
    """Measure on each number of ranks and print."""
    worlds = {f"dp_shard={world}": measure(world) for world in WORLDS}
    ratios = [held["ratio_to_share"] for found in worlds.values() for held in found.values()]
    result = {
        "benchmark": "optimizer_memory",
        "bytes": worlds,
        "ratio": max(ratios, key=lambda ratio: abs(ratio - 1)),
        "limit": [1 - TOLERANCE, 1 + TOLERANCE],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
