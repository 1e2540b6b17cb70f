"""Which coordinate of the plan each rank really has, exchanged and compared before anything trains.

mixle's launchers attest ranks too: Ray's puts an attestation into each worker's config. mixle counts cp
fastest there, and Megatron tp; so of a launcher's attestation rank and world size are binding, and its
coordinate is replaced by the one that the rank has in Megatron's groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from mixle.utils.parallel.training_contracts import ParallelPlan
from mixle.utils.parallel.training_launchers import WorkerTopologyAttestation

from mixle_megatron.errors import Fault, refuse_if_any
from mixle_megatron.process_groups import MegatronGroups
from mixle_megatron.topology import MESH_AXES, Topology

_REORDER = (
    "start the ranks in the order of Megatron's grid, tp fastest, then cp, dp_shard, dp_replicate and pp; "
    "a launcher's own attestation has to be that of the rank that it is given to"
)


def agree_on_launch(
    plan: ParallelPlan, launched: WorkerTopologyAttestation | Mapping[str, Any] | None
) -> None:
    """Make sure that all ranks have one plan, and each the attestation of the rank that it is. Collective.

    Args:
        plan: of this rank; ``prepare`` makes its groups next, which would wait for ever under another plan.
        launched: what this rank's launcher attested, if it did: mixle's object, or the mapping that its
            Ray launcher puts into a worker's config.

    Raises:
        Refused: on every rank alike, with one fault for each rank that is not as the others or as attested.
    """
    attested = None if launched is None else _fields(launched)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (plan.as_dict(), attested))
    faults = []
    for rank, (its_plan, its_attestation) in enumerate(told):
        if its_plan != told[0][0]:
            faults.append(_other_plan(rank, its_plan, told[0][0]))
        elif its_attestation is not None:
            faults += _launch_faults(plan, rank, len(told), its_attestation)
    refuse_if_any(faults)


def attest(plan: ParallelPlan, groups: MegatronGroups) -> WorkerTopologyAttestation:
    """This rank's coordinate in the groups that it is really in.

    Returns:
        mixle's attestation, with the session's coordinate: mixle's axes, laid out as Megatron does.
    """
    own = groups.collection
    replicate, shard = divmod(own.dp.rank(), plan.dp_shard)
    place = (replicate, shard, own.tp.rank(), own.pp.rank(), own.cp.rank())
    return WorkerTopologyAttestation(
        dist.get_rank(), dist.get_world_size(), tuple(zip(MESH_AXES, place, strict=True))
    )


def compare_attestations(plan: ParallelPlan, groups: MegatronGroups) -> None:
    """Make sure that every rank's groups put it where the plan has it. Collective.

    Raises:
        Refused: on every rank alike, with both coordinates of each rank that is elsewhere.
    """
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, attest(plan, groups).as_dict())
    topology = Topology(plan)
    refuse_if_any(
        _elsewhere(rank, attested["coordinate"], topology.mixle_coordinate(rank), "its groups put it at")
        for rank, attested in enumerate(told)
        if attested["coordinate"] != topology.mixle_coordinate(rank)
    )


def _fields(launched: WorkerTopologyAttestation | Mapping[str, Any]) -> dict[str, Any]:
    """The attestation as a mapping; what is none is refused with the others' by :func:`_launch_faults`."""
    if isinstance(launched, WorkerTopologyAttestation):
        return launched.as_dict()
    return dict(launched) if isinstance(launched, Mapping) else {"rank": repr(launched)}


def _launch_faults(plan: ParallelPlan, rank: int, ranks: int, attested: Mapping[str, Any]) -> list[Fault]:
    """What of a launcher's attestation is not of the rank that it was given to."""
    its_rank, its_ranks, coordinate = (attested.get(name) for name in ("rank", "world_size", "coordinate"))
    if its_ranks != ranks:
        rule = f"is not the number of ranks there are, {ranks}"
        return [Fault(f"attestation[{rank}].world_size", its_ranks, rule)]
    if not isinstance(its_rank, int) or not 0 <= its_rank < ranks:
        return [Fault(f"attestation[{rank}].rank", its_rank, f"is none of {ranks} ranks")]
    topology = Topology(plan)
    if its_rank != rank:
        at = topology.mixle_coordinate(its_rank)
        said = f"its launcher attested rank {its_rank}, which is at"
        return [_elsewhere(rank, at, topology.mixle_coordinate(rank), said)]
    if coordinate not in (topology.attested_coordinate(rank), topology.mixle_coordinate(rank)):
        return [_elsewhere(rank, coordinate, topology.attested_coordinate(rank), "its launcher attested")]
    return []


def _elsewhere(rank: int, actual: Any, planned: dict[str, int], said: str) -> Fault:
    rule = f"is not rank {rank}'s place in the plan: {said} {actual}, and the plan has it at {planned}"
    return Fault(f"attestation[{rank}].coordinate", None, rule, _REORDER)


def _other_plan(rank: int, plan: Mapping[str, int], first: Mapping[str, int]) -> Fault:
    differing = {name: value for name, value in plan.items() if value != first.get(name)}
    rule = f"on rank {rank} differs from rank 0's, which has " + ", ".join(
        f"{name}={first.get(name)}" for name in differing
    )
    return Fault("plan", ", ".join(f"{name}={value}" for name, value in differing.items()), rule)
