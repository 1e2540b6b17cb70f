"""The default process group of a rank, Megatron's groups for one plan, and their end.

A session holds a :class:`MegatronGroups`: a snapshot of the groups that Megatron made for its
plan. Everything above passes that snapshot on and never reads ``parallel_state`` again.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from mixle_megatron.callers_groups import parallel_state_faults
from mixle_megatron.errors import Fault, Refused, refuse_if_any
from mixle_megatron.megatron_names import parallel_state_arguments
from mixle_megatron.pipeline_split import EVEN, PipelineSplit
from mixle_megatron.plan_record import PlanRecord


@dataclass(frozen=True)
class MegatronGroups:
    """Megatron's process groups for one plan, and which of them this process has to destroy.

    Attributes:
        collection: what GPTModel, DistributedDataParallel, the optimizer and the schedules take.
        made: groups that :func:`make_groups` created and :func:`destroy_groups` destroys.
        owns_parallel_state: False where the caller had initialised ``parallel_state`` already.
        chunk: the chunk of the stage's layers that is meant, under virtual pipeline stages.
        chunks: how many chunks each stage has.
    """

    collection: ProcessGroupCollection
    made: tuple[Any, ...]
    owns_parallel_state: bool
    chunk: int = 0
    chunks: int = 1

    def of_chunk(self, chunk: int, chunks: int) -> MegatronGroups:
        """The same groups, seen from one of a stage's ``chunks``."""
        return replace(self, chunk=chunk, chunks=chunks)

    @property
    def virtual_stage(self) -> int | None:
        """The chunk as Megatron's ``vp_stage`` takes it: None where stages are not divided."""
        return self.chunk if self.chunks > 1 else None

    @property
    def is_first_stage(self) -> bool:
        """Whether this is the first pipeline stage, and of that the first chunk (the embedding)."""
        return self.collection.pp.rank() == 0 and self.chunk == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this is the last pipeline stage, and of that the last chunk (the loss)."""
        return self.collection.pp.rank() == self.collection.pp.size() - 1 and self.chunk == self.chunks - 1

    @property
    def adds_loss(self) -> bool:
        """Whether this rank's loss is part of its replica's: each cp rank of the last stage has some."""
        return self.is_last_stage and self.collection.tp.rank() == 0

    @property
    def speaks_for_replica(self) -> bool:
        """Whether this rank counts its replica's batch in a world-wide sum: exactly one rank does."""
        return self.adds_loss and self.collection.cp.rank() == 0

    def cuts(self, parameter: torch.Tensor) -> Any:
        """The tensor-parallel group over which ``parameter`` is cut: that of experts is their own."""
        return self.collection.tp if getattr(parameter, "allreduce", True) else self.collection.expt_tp


def choose_device(requested: Any = None) -> torch.device:
    """The device of this rank: what was asked for, else this node's CUDA device, else the CPU."""
    if requested is not None:
        device = torch.device(requested)
        if device.type not in ("cpu", "cuda"):
            raise Refused([Fault("device", str(requested), "is neither 'cpu' nor 'cuda'")])
        if device.type == "cuda" and not torch.cuda.is_available():
            raise Refused(
                [Fault("device", str(requested), "needs CUDA, which torch does not find here", "use cpu")]
            )
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        rule = f"is not one of this host's {torch.cuda.device_count()} CUDA devices"
        raise Refused([Fault("LOCAL_RANK", device.index, rule, "start one rank a device")])
    return device


def available_world_size() -> int:
    """How many ranks there are: those of the running group, else those that the environment names."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def start_default_group(device: torch.device, *, timeout_minutes: float = 30.0) -> bool:
    """Start torch's default group if there is none: NCCL on CUDA, gloo on a CPU.

    Without a launcher's environment this is a group of one rank, which opens no port.

    Returns:
        Whether this call started it.
    """
    if dist.is_initialized():
        return False
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=timeout_minutes)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return True


def make_groups(plan: Any, *, split: PipelineSplit = EVEN, timeout_minutes: float = 30.0) -> MegatronGroups:
    """Initialise Megatron's ``parallel_state`` for ``plan`` and take the snapshot of its groups.

    Where the caller has initialised it already, its groups have to be those of the plan.

    Raises:
        Refused: if ``parallel_state`` is initialised with other groups.
    """
    if parallel_state.model_parallel_is_initialized():
        refuse_if_any(parallel_state_faults(PlanRecord.from_plan(plan), experts=plan.ep * plan.etp > 1))
        return MegatronGroups(ProcessGroupCollection.use_mpu_process_groups(), (), False)
    # A closed session is a cycle, and its groups keep their threads (gloo: three each) until it is collected.
    gc.collect()
    before = set(_all_groups())
    parallel_state.initialize_model_parallel(
        **parallel_state_arguments(plan, split),
        distributed_timeout_minutes=timeout_minutes,
        create_gloo_process_groups=False,
    )
    made = tuple(group for group in _all_groups() if group not in before)
    return MegatronGroups(ProcessGroupCollection.use_mpu_process_groups(), made, True)


def destroy_groups(groups: MegatronGroups) -> None:
    """Destroy the groups that :func:`make_groups` made; the default group stays, as mixle's does."""
    if not groups.owns_parallel_state:
        return
    for group in groups.made:
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    parallel_state._global_process_group_list = None


def _all_groups() -> list[Any]:
    # torch has no public list of its groups, and Megatron forgets its own without destroying them.
    return list(dist.distributed_c10d._world.pg_map)
