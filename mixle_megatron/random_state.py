"""The states of the generators that a run draws from (dropout)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel


def random_state() -> dict[str, Any]:
    """The CPU generator, the device's, and those of Megatron's tracker, by name."""
    return {
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Put back what :func:`random_state` gave."""
    torch.cuda.set_rng_state(state["device"])
    torch.set_rng_state(state["cpu"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def seed_generators(seed: int, groups: Any) -> None:
    """Seed the generators of this rank.

    Regions that tensor-parallel ranks compute alike draw alike within a data-parallel replica;
    replicas, pipeline stages and the parts of a sequence draw differently (Megatron-LM's own rule:
    100 per stage, and the data-parallel rank).
    """
    stage_seed = seed + 100 * groups.collection.pp.rank() + 10_000 * groups.collection.dp_cp.rank()
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        stage_seed,
        tp_rank=groups.collection.tp.rank(),
        ep_rank=groups.collection.ep.rank(),
        etp_rank=groups.collection.expt_tp.rank(),
    )
