"""Topology against the groups that Megatron makes in a real world of four ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from small_gpts import parallel_plan

from mixle_megatron.topology import GROUP_AXES, PIPELINE_ENDS, Coordinate, Topology

PLANS = [
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_replicate": 4},
    {"dp_shard": 4},
    {"tp": 2, "pp": 2},
    {"tp": 2, "dp_shard": 2},
    {"pp": 2, "dp_replicate": 2},
    {"pp": 4},
    {"tp": 4},
    {"cp": 2, "dp_shard": 2},
    {"dp_shard": 4, "ep": 2},
    {"tp": 2, "dp_shard": 2, "ep": 2, "etp": 2},
]


def groups_and_place(sizes: dict[str, int]) -> tuple[dict[str, tuple[int, ...]], Coordinate]:
    """The ranks of each of this rank's groups, and its place as ``parallel_state`` tells it."""
    from megatron.core import parallel_state as state

    from mixle_megatron.process_groups import destroy_groups, make_groups

    made = make_groups(parallel_plan(**sizes))
    groups: dict[str, tuple[int, ...]] = dict.fromkeys(PIPELINE_ENDS, ())
    for name in GROUP_AXES:
        group = getattr(made.collection, name, None)
        if group not in (None, dist.GroupMember.NON_GROUP_MEMBER):
            ranks = tuple(dist.get_process_group_ranks(group))
            groups[name] = ranks if dist.get_rank() in ranks else ()
    place = Coordinate(
        tp=state.get_tensor_model_parallel_rank(),
        cp=state.get_context_parallel_rank(),
        dp=state.get_data_parallel_rank(),
        pp=state.get_pipeline_model_parallel_rank(),
        etp=state.get_expert_tensor_parallel_rank(),
        ep=state.get_expert_model_parallel_rank(),
        edp=state.get_expert_data_parallel_rank(),
    )
    destroy_groups(made)
    return groups, place


@pytest.mark.parametrize("sizes", PLANS, ids=str)
def test_groups_and_places_are_those_of_a_real_world(run_on, sizes: dict[str, int]) -> None:
    topology = Topology(parallel_plan(**sizes))
    for rank, (groups, place) in enumerate(run_on(4, groups_and_place, sizes)):
        assert {"tp", "cp", "pp", "dp", "dp_cp", "mp", "ep", "expt_tp"} <= set(groups)
        assert place == topology.coordinate(rank)
        for name, ranks in groups.items():
            assert topology.group(name, rank) == ranks, name
