"""Bytes that attention keeps on each rank under cp=N against one rank; prints one JSON object.

N ranks share one sequence and run some attention layers forward and backward. ``kept`` is what the C
library has allocated between the two passes, inputs and outputs included, in all layers; ``formula``
is what :mod:`mixle_megatron.layers.context_parallel` says.
"""

from __future__ import annotations

import ctypes
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from mixle.utils.parallel.training_contracts import ParallelPlan

from mixle_megatron.host import cpu_runtime
from mixle_megatron.layers.attention import TorchAttention
from mixle_megatron.process_groups import make_groups

WORLDS = (1, 2, 4)
LAYERS = 4
SEQUENCE, BATCH, HEADS, GROUPS, CHANNELS = 2048, 4, 8, 8, 32
PASSES = 3
TOLERANCE = 0.05


class MallocInfo(ctypes.Structure):
    """The GNU C library's ``struct mallinfo2``."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def bytes_in_use() -> int:
    """What this process has allocated and not freed."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallocInfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def formula(cp: int) -> int:
    """Bytes that all layers keep on one rank in fp32; one rank alone works on copies of what is held here."""
    own = (HEADS + 2 * GROUPS) * CHANNELS
    channels = own * (2 if cp == 1 else 1) + 2 * HEADS * CHANNELS
    masks = 0 if cp == 1 else (2 * cp + 3) * SEQUENCE // (2 * cp)
    return LAYERS * 4 * (SEQUENCE // cp * BATCH * (channels + HEADS) + masks)


def attention_layers(groups: Any) -> list[TorchAttention]:
    """The layers of one rank."""
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HEADS * CHANNELS,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=0.0,
        context_parallel_size=groups.cp.size(),
    )
    return [
        TorchAttention(config, number + 1, AttnMaskType.causal, "self", pg_collection=groups)
        for number in range(LAYERS)
    ]


def one_pass(layers: list[TorchAttention], cp: int) -> int:
    """Run all layers forward and backward; give what is allocated between the two."""
    shapes = [(SEQUENCE // cp, BATCH, heads, CHANNELS) for heads in (HEADS, GROUPS, GROUPS)]
    inputs = [[torch.randn(shape, requires_grad=True) for shape in shapes] for _ in layers]
    outputs = [layer(*given) for layer, given in zip(layers, inputs, strict=True)]
    dist.barrier()
    between = bytes_in_use()
    torch.autograd.backward(outputs, [torch.ones(()).expand_as(output) for output in outputs])
    return between


def rank_main(rank: int, world: int, folder: str) -> None:
    """One rank: measure; rank 0 writes what all of them found into ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    with cpu_runtime():
        layers = attention_layers(make_groups(ParallelPlan(cp=world)).collection)
        before = bytes_in_use()
        # The least: what communicates frees what it sent a little later.
        kept = min(one_pass(layers, world) for _ in range(PASSES)) - before
    found: list[Any] = [None] * world
    dist.all_gather_object(found, kept)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(world: int) -> dict[str, int]:
    """The most that any of ``world`` ranks held, and what the formula says."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (world, folder), nprocs=world)
        found = json.loads(Path(folder, "found.json").read_text())
    return {"kept": max(found), "formula": formula(world)}


def main() -> None:
    """Measure on each number of ranks and print."""
    worlds = {f"cp={world}": measure(world) for world in WORLDS}
    ratios = [found["kept"] / found["formula"] for found in worlds.values()]
    result = {
        "benchmark": "context_parallel_memory",
        "bytes": worlds,
        "kept_of_one_rank": {
            name: round(found["kept"] / worlds["cp=1"]["kept"], 4) for name, found in worlds.items()
        },
        "ratio": round(max(ratios, key=lambda ratio: abs(math.log(ratio))), 4),
        "limit": [1 - TOLERANCE, 1 + TOLERANCE],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
