"""Finding out which rank this process is, from what started it."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

from mixle_megatron.errors import Fault, Refused, refuse_if_any
from mixle_megatron.launch_environment import environment_faults

_BASE_PORT, _PORTS = 20_000, 10_000


def is_one_of_many(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process as a rank."""
    return "RANK" in environment


def join(environment: MutableMapping[str, str] = os.environ) -> None:
    """Give srun's ranks the environment that torchrun's have; leave every other process as it is.

    srun's own variables are those of a step (``SLURM_STEP_*``), which a batch script does not have.

    Raises:
        Refused: the environment lacks a variable that its launcher sets.
    """
    refuse_if_any(environment_faults(environment))
    if "RANK" in environment or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) <= 1:
        return
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        raise Refused([Fault(name, None, "is not set, but SLURM_STEP_NUM_TASKS is") for name in missing])
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    environment.setdefault("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
    environment.setdefault("MASTER_PORT", str(_BASE_PORT + int(environment["SLURM_JOB_ID"]) % _PORTS))


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list, such as ``gpu[07-09,12],login1``."""
    match = re.match(r"(?P<prefix>[^,\[]+)(?:\[(?P<first>\d+)[^\]]*\](?P<suffix>[^,\[]*))?", nodes)
    if match is None:
        raise Refused([Fault("SLURM_STEP_NODELIST", nodes, "is not a list of hosts")])
    return match["prefix"] + (match["first"] or "") + (match["suffix"] or "")
