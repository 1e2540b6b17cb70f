"""The states of the generators that a run draws from: dropout, and what the caller's own code uses."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel


def random_state() -> dict[str, Any]:
    """torch's generators, those of Megatron's tracker, Python's and numpy's, by name; plain values."""
    kind, keys, *rest = np.random.get_state()
    return {
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Put back what :func:`random_state` gave."""
    torch.cuda.set_rng_state(state["device"])
    torch.set_rng_state(state["cpu"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


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
