"""One node of several, as Kubeflow describes it to a container: its ranks have yet to be started.

The variables are those that torchrun reads its options from (``PET_*``). Kubeflow's TrainJob and PyTorchJob
set them in every pod, and the JobSet that ``launch kubernetes`` prints does too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mixle_megatron.errors import Fault, refuse_if_any

DEFAULT_PORT = 29_500
"""Where torchrun's ranks meet when nothing else is said."""

_DESCRIBES = ("PET_NNODES", "PET_NODE_RANK")
_OF_ONE_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_RANK")


@dataclass(frozen=True)
class Node:
    """A node among those of a job.

    Attributes:
        index: which one it is, counted from 0.
        nodes: how many there are.
        ranks: how many ranks each of them has.
        address: host of the first node.
        port: where the ranks meet there.
    """

    index: int
    nodes: int
    ranks: int
    address: str
    port: int

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.ranks

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        """What torchrun would set for one of the node's ranks."""
        return {
            "RANK": str(self.index * self.ranks + local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def node_of(environment: Mapping[str, str]) -> Node | None:
    """The node that a container's environment describes; None where it describes none, or one rank of it.

    What is missing is completed where it has one meaning: an Indexed Job's own index stands for the node's,
    one node for a host, torchrun's defaults for one rank a node and for the port.

    Raises:
        Refused: what else is missing, or is no number, by its name.
    """
    if any(name in environment for name in _OF_ONE_RANK) or not any(map(environment.get, _DESCRIBES)):
        return None
    nodes = environment.get("PET_NNODES")
    alone = nodes == "1"
    index = _first(environment, "PET_NODE_RANK", "JOB_COMPLETION_INDEX") or ("0" if alone else None)
    address = _first(environment, "PET_MASTER_ADDR", "MASTER_ADDR") or ("localhost" if alone else None)
    stated = {
        "PET_NNODES": nodes,
        "PET_NODE_RANK": index,
        "PET_NPROC_PER_NODE": environment.get("PET_NPROC_PER_NODE") or "1",
        "PET_MASTER_PORT": _first(environment, "PET_MASTER_PORT", "MASTER_PORT") or str(DEFAULT_PORT),
    }
    refuse_if_any(_faults(stated | {"PET_MASTER_ADDR": address}, numbers=tuple(stated)))
    return Node(
        index=int(stated["PET_NODE_RANK"] or 0),
        nodes=int(stated["PET_NNODES"] or 0),
        ranks=int(stated["PET_NPROC_PER_NODE"] or 0),
        address=address or "",
        port=int(stated["PET_MASTER_PORT"] or 0),
    )


def _first(environment: Mapping[str, str], *names: str) -> str | None:
    """The first of several variables that is set to something."""
    return next((environment[name] for name in names if environment.get(name)), None)


def _faults(values: Mapping[str, str | None], numbers: tuple[str, ...]) -> list[Fault]:
    missing = [
        Fault(name, None, "is not set, but other variables of a node of several are", _REMEDY)
        for name, value in values.items()
        if not value
    ]
    wrong = [
        Fault(name, values[name], "is no whole number", _REMEDIES.get(name, _REMEDY))
        for name in numbers
        if values[name] and not str(values[name]).isdigit()
    ]
    if missing or wrong:
        return missing + wrong
    nodes, index = int(values["PET_NNODES"] or 0), int(values["PET_NODE_RANK"] or 0)
    if index >= nodes:
        return [Fault("PET_NODE_RANK", index, f"is none of PET_NNODES={nodes} nodes, counted from 0")]
    if not int(values["PET_NPROC_PER_NODE"] or 0):
        return [Fault("PET_NPROC_PER_NODE", 0, "starts no rank", "use 1 or more")]
    return []


_REMEDY = "start it as a TrainJob, PyTorchJob or JobSet that launch kubernetes prints, or with torchrun"
_REMEDIES = {
    "PET_NNODES": "state one number of nodes",
    "PET_NPROC_PER_NODE": "state the number: numProcPerNode of a TrainJob, nprocPerNode of a PyTorchJob",
}
