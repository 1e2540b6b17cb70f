"""Real checkpoints for tests of what reads them: one of a session, and one of Megatron-Core alone."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from small_gpts import SIZES, session, train_update

from mixle_megatron.checkpoint.manifest import Facts, write_manifest

STEP = 2


def save_small(folder: str) -> dict[str, tuple[int, ...]]:
    """A checkpoint of a session after two updates; the shapes of the module's parameters."""
    with session("gpt2", "adam", dp_shard=2) as opened:
        for update in range(STEP):
            train_update(opened, update)
        opened.save_checkpoint(folder, loader_state={"position": 24})
        return {name: tuple(parameter.shape) for name, parameter in opened.module.named_parameters()}


def facts() -> Facts:
    """What :func:`save_small` saves, as a manifest has it."""
    return Facts(
        step=STEP,
        plan={"dp_replicate": 1, "dp_shard": 2, "tp": 1, "world_size": 2},
        model={"family": "gpt", **SIZES},
        optimizer_format="fully_reshardable",
        precision="fp32",
    )


def small_checkpoint(run_on: Any, folder: Path) -> dict[str, tuple[int, ...]]:
    """:func:`save_small` on two ranks, with a manifest."""
    shapes = run_on(2, save_small, str(folder))[0]
    write_manifest(folder, facts())
    return shapes


def save_by_megatron_alone(folder: str) -> None:
    """What Megatron-LM would write: arguments in the common state, and a tensor cut over the ranks."""
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.transformer.enums import AttnBackend

    from mixle_megatron.checkpoint.write_results import kept_in_process
    from mixle_megatron.host.runtime import cpu_runtime

    rank, ranks = dist.get_rank(), dist.get_world_size()
    arguments = Namespace(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=1,
        world_size=2,
        bf16=True,
        fp16=False,
        attention_backend=AttnBackend.auto,
    )
    rows = torch.arange(12.0).view(4, 3) + 12 * rank
    state = {
        "args": arguments,
        "iteration": 7,
        "weight": ShardedTensor.from_rank_offsets("decoder.weight", rows, (0, rank, ranks)),
        "random": ShardedObject("rng_state", {"rank": rank}, (ranks,), (rank,)),
    }
    if rank == 0:
        Path(folder).mkdir(parents=True)
    dist.barrier()
    with cpu_runtime(), kept_in_process():
        dist_checkpointing.save(state, folder)
    dist.barrier()
