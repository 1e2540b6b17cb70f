"""Finding out which rank this process is, or for which node it starts ranks, from what started it."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from zlib import crc32

from mixle_megatron.errors import Fault, Refused, refuse_if_any
from mixle_megatron.launch_environment import environment_faults
from mixle_megatron.training.node import Node, node_of

FIRST_PORT, PORTS = 20_000, 10_000
"""Where ranks meet whose launcher names a job and no port: below the ports that Linux hands out by itself."""

_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_OPEN_MPI_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
"""What names one start of mpirun alike on all of its ranks: in Open MPI 5, and in 4."""


def is_one_of_many(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process as a rank."""
    return "RANK" in environment


def is_restarted(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether torchrun, or Slurm after a requeue, has started this job again by itself."""
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(int(environment.get(name) or 0) > 0 for name in counts)


def is_first(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether this process is the first rank, or starts it, and so speaks for all of them."""
    return (environment.get("RANK") or environment.get("PET_NODE_RANK") or "0") == "0"


def join(environment: MutableMapping[str, str] = os.environ) -> Node | None:
    """Give this process the environment that torchrun's ranks have, whatever has started it.

    A node of Kubeflow's jobs, torchrun, Open MPI and srun are looked for in this order: a later one's
    variables may be left over from what has started an earlier one. srun's own are those of a step
    (``SLURM_STEP_*``), which a batch script does not have. Every other process stays as it is.

    Returns:
        The node whose ranks this process has to start; None where it is one rank, or nobody has started it.
        With a node ``WORLD_SIZE`` is that of the job, and ``RANK`` is not set.

    Raises:
        Refused: the environment lacks variables that its launcher sets, each by its name.
    """
    node = node_of(environment)
    if node is not None:
        return _join_node(node, environment)
    index = environment.get("JOB_COMPLETION_INDEX")
    if index and environment.get("WORLD_SIZE") and "RANK" not in environment:
        environment["RANK"] = index
    refuse_if_any(environment_faults(environment))
    if "RANK" in environment:
        return None
    if any(name in environment for name in _OPEN_MPI):
        _join_open_mpi(environment)
    elif environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        _join_slurm(environment)
    return None


def _join_node(node: Node, environment: MutableMapping[str, str]) -> Node | None:
    environment.update(node.rank_environment(0))
    if node.ranks == 1:
        return None
    environment["PET_NODE_RANK"] = str(node.index)
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del environment[name]
    return node


def _join_open_mpi(environment: MutableMapping[str, str]) -> None:
    _refuse_half_set(environment, _OPEN_MPI)
    rank, size, local_rank, local_size = (environment[name] for name in _OPEN_MPI)
    if size == "1":
        return
    if local_size == size:
        environment.setdefault("MASTER_ADDR", "localhost")
    started = next((environment[name] for name in _OPEN_MPI_JOBS if environment.get(name)), None)
    if started:
        environment.setdefault("MASTER_PORT", str(FIRST_PORT + crc32(started.encode()) % PORTS))
    rule = "is not set, and mpirun says nothing that it follows from"
    refuse_if_any(
        Fault(name, None, rule, f"hand it to all ranks: mpirun -x {name}={value}")
        for name, value in (("MASTER_ADDR", "the host of rank 0"), ("MASTER_PORT", "29500"))
        if not environment.get(name)
    )
    environment |= {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank}


def _join_slurm(environment: MutableMapping[str, str]) -> None:
    numbers = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID")
    _refuse_half_set(environment, numbers, "SLURM_STEP_NODELIST")
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    environment.setdefault("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
    environment.setdefault("MASTER_PORT", str(FIRST_PORT + int(environment["SLURM_JOB_ID"]) % PORTS))


def _refuse_half_set(environment: MutableMapping[str, str], numbers: tuple[str, ...], *words: str) -> None:
    """Refuse what of a launcher's variables is missing, or is no number.

    Raises:
        Refused: with one fault for each.
    """
    names = (*numbers, *words)
    there = next((name for name in names if environment.get(name)), names[0])
    absent = [name for name in names if not environment.get(name)]
    missing = [Fault(name, None, f"is not set, but {there} is") for name in absent]
    wrong = [
        Fault(name, environment[name], "is no whole number")
        for name in numbers
        if environment.get(name) and not environment[name].isdigit()
    ]
    refuse_if_any(missing + wrong)


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list, such as ``gpu[07-09,12],login1``."""
    match = re.match(r"(?P<prefix>[^,\[]+)(?:\[(?P<first>\d+)[^\]]*\](?P<suffix>[^,\[]*))?", nodes)
    if match is None:
        raise Refused([Fault("SLURM_STEP_NODELIST", nodes, "is not a list of hosts")])
    return match["prefix"] + (match["first"] or "") + (match["suffix"] or "")
