"""Topology against Megatron's own rank generator, its real groups, and mixle's attestation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import gcd

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle_megatron.errors import Refused
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules.nearest import divisors
from mixle_megatron.topology import GROUP_AXES, MESH_AXES, Grid, Topology

LARGEST_WORLD = 512
DENSE_TOKENS = {
    "tp": "tp",
    "cp": "cp",
    "dp": "dp",
    "pp": "pp",
    "mp": "tp-pp",
    "tp_cp": "tp-cp",
    "tp_dp": "tp-dp",
    "tp_dp_cp": "tp-dp-cp",
    "dp_cp": "dp-cp",
}
EXPERT_TOKENS = {"ep": "ep", "expt_tp": "tp", "tp_ep": "tp-ep", "tp_ep_pp": "tp-ep-pp", "expt_dp": "dp"}


@st.composite
def plans(draw: st.DrawFn) -> PlanRecord:
    """Plans of at most 512 ranks whose two grids both exist."""
    sizes = {}
    left = LARGEST_WORLD
    for axis in draw(st.permutations(MESH_AXES)):
        sizes[axis] = draw(st.integers(1, min(left, 8)))
        left //= sizes[axis]
    dp = sizes["dp_replicate"] * sizes["dp_shard"]
    ep = draw(st.sampled_from(divisors(dp)))
    etp = draw(st.sampled_from(divisors(sizes["tp"] * sizes["cp"] * dp // ep)))
    return PlanRecord(**sizes, ep=ep, etp=etp)


def generators(topology: Topology):
    """Megatron's generators of the dense and the expert grid."""
    from megatron.core.parallel_state import RankGenerator

    dense, expert = topology.dense_sizes, topology.expert_sizes
    return (
        RankGenerator(ep=1, order="tp-cp-ep-dp-pp", **dense),
        RankGenerator(
            tp=expert["etp"],
            ep=expert["ep"],
            dp=expert["edp"],
            pp=expert["pp"],
            cp=1,
            order="tp-cp-ep-dp-pp",
        ),
    )


@settings(max_examples=300, deadline=None)
@given(plans())
def test_groups_are_those_of_megatrons_rank_generator(plan: PlanRecord) -> None:
    topology = Topology(plan)
    dense, expert = generators(topology)
    for name, token in DENSE_TOKENS.items():
        assert [list(group) for group in topology.groups(name)] == dense.get_ranks(token), name
    for name, token in EXPERT_TOKENS.items():
        assert [list(group) for group in topology.groups(name)] == expert.get_ranks(token), name


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 2), (8, 1), (4, 4), (8, 2), (1, 4)])
def test_groups_of_sixteen_thousand_ranks_are_megatrons(tp: int, cp: int) -> None:
    """Plans like that of DeepSeek-V3: pp=16 and ep=64 (arXiv:2412.19437, section 3.2)."""
    plan = PlanRecord(tp=tp, cp=cp, pp=16, ep=64, dp_shard=16_384 // (16 * tp * cp))
    topology = Topology(plan)
    assert topology.world_size == 16_384
    dense, expert = generators(topology)
    for name, token in DENSE_TOKENS.items():
        assert [list(group) for group in topology.groups(name)] == dense.get_ranks(token), name
    for name, token in EXPERT_TOKENS.items():
        assert [list(group) for group in topology.groups(name)] == expert.get_ranks(token), name


@settings(max_examples=200, deadline=None)
@given(plans())
def test_partial_groups_are_contiguous_parts_of_megatrons_data_parallel_groups(plan: PlanRecord) -> None:
    topology = Topology(plan)
    dense, expert = generators(topology)
    instances = topology.num_distributed_optimizer_instances
    whole = {"intra_dp_cp": dense.get_ranks("dp-cp"), "intra_expt_dp": expert.get_ranks("dp")}
    for name, groups in whole.items():
        size = len(groups[0]) // instances
        parts = {tuple(group[i * size : (i + 1) * size]) for group in groups for i in range(instances)}
        assert set(topology.groups(name)) == parts
    size = topology.expert_optimizer_shards
    across = {tuple(group[i::size]) for group in expert.get_ranks("dp") for i in range(size)}
    assert set(topology.groups("inter_dist_opt")) == across
    models = expert.get_ranks("tp-ep-pp")
    within = {
        tuple(sorted(rank for model in models[i : i + size] for rank in model))
        for i in range(0, len(models), size)
    }
    assert set(topology.groups("intra_dist_opt")) == within


@settings(max_examples=200, deadline=None)
@given(plans())
def test_coordinates_invert_and_agree_with_groups(plan: PlanRecord) -> None:
    topology = Topology(plan)
    ranks = range(topology.world_size)
    assert [topology.rank_of(**topology.mixle_coordinate(rank)) for rank in ranks] == list(ranks)
    dense = generators(topology)[0]
    for name in ("tp", "cp", "dp", "pp"):
        for group in dense.get_ranks(name):
            assert [getattr(topology.coordinate(rank), name) for rank in group] == list(range(len(group)))


@settings(max_examples=100, deadline=None)
@given(plans(), st.data())
def test_a_ranks_group_is_the_one_that_lists_it(plan: PlanRecord, data: st.DataObject) -> None:
    topology = Topology(plan)
    rank = data.draw(st.integers(0, topology.world_size - 1))
    for name in GROUP_AXES:
        listed = [tuple(sorted(group)) for group in topology.groups(name) if rank in group]
        group = topology.group(name, rank)
        assert listed == ([group] if group else [])
        size, first, last = topology.extent(name, rank)
        assert (size, first, last) == ((len(group), group[0], group[-1]) if group else (0, rank, rank))


@settings(max_examples=50, deadline=None)
@given(plans())
def test_group_index_agrees_with_groups(plan: PlanRecord) -> None:
    topology = Topology(plan)
    for name in ("tp", "embd", "expt_dp"):
        groups = topology.groups(name)
        for rank, number in enumerate(topology.group_index(name)):
            assert topology.group(name, rank) == (() if number is None else groups[number])


@settings(max_examples=50, deadline=None)
@given(plans(), st.data())
def test_attested_coordinates_are_mixles(plan: PlanRecord, data: st.DataObject) -> None:
    from mixle.utils.parallel.training_launchers import attest_worker_coordinate

    topology = Topology(plan)
    rank = data.draw(st.integers(0, topology.world_size - 1))
    attested = attest_worker_coordinate(
        plan.to_parallel_plan(), actual_world_size=topology.world_size, rank=rank
    )
    assert topology.attested_coordinate(rank) == dict(attested.coordinate)


@given(plans())
def test_both_grids_cover_the_world(plan: PlanRecord) -> None:
    topology = Topology(plan)
    for sizes in (topology.dense_sizes, topology.expert_sizes):
        assert Grid(sizes).rank({axis: size - 1 for axis, size in sizes.items()}) == plan.world_size - 1


def test_shards_are_the_inner_dimension_of_data_parallelism() -> None:
    topology = Topology(PlanRecord(dp_replicate=2, dp_shard=3, tp=2))
    assert topology.group("intra_dp_cp", 0) == (0, 2, 4)
    assert topology.group("inter_dist_opt", 0) == (0, 6)
    assert topology.mixle_coordinate(8) == {"dp_replicate": 1, "dp_shard": 1, "tp": 0, "pp": 0, "cp": 0}


def test_experts_that_take_ranks_from_replicas_leave_fewer_optimizer_instances() -> None:
    plan = PlanRecord(dp_replicate=4, dp_shard=1, ep=2)
    topology = Topology(plan)
    assert topology.expert_data_parallel_size == 2
    assert topology.num_distributed_optimizer_instances == gcd(4, 2)
    assert topology.optimizer_shards == 2


def test_plan_that_is_no_grid_is_refused() -> None:
    with pytest.raises(Refused, match="ep=3 does not divide"):
        Topology(PlanRecord(dp_shard=2, ep=3))
    with pytest.raises(Refused, match="rank=4 is not a rank"):
        Topology(PlanRecord(dp_shard=4)).coordinate(4)
    with pytest.raises(Refused, match="tp=2 is not on the axis of size 2"):
        Topology(PlanRecord(tp=2)).rank_of(tp=2)


REAL_PLANS = [
    PlanRecord(dp_replicate=2, dp_shard=2),
    PlanRecord(dp_shard=2, tp=2),
    PlanRecord(tp=2, pp=2),
    PlanRecord(dp_shard=2, pp=2),
    PlanRecord(cp=2, dp_shard=2),
    PlanRecord(dp_shard=4, ep=2),
    PlanRecord(dp_replicate=4, ep=2),
    PlanRecord(tp=2, dp_shard=2, ep=2, etp=2),
]


@contextmanager
def parallel_state(plan: PlanRecord, rank: int) -> Iterator[object]:
    """Megatron's parallel_state as one rank of the plan sees it, over torch's fake process groups."""
    import torch.distributed as dist
    from megatron.core import parallel_state as state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from mixle_megatron.megatron_names import parallel_state_arguments

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    try:
        state.initialize_model_parallel(**parallel_state_arguments(plan), create_gloo_process_groups=False)
        yield state
    finally:
        state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.mark.parametrize("plan", REAL_PLANS, ids=str)
def test_groups_are_those_that_megatron_initialises(plan: PlanRecord) -> None:
    import torch.distributed as dist
    from megatron.core.process_groups_config import ProcessGroupCollection

    topology = Topology(plan)
    for rank in range(plan.world_size):
        with parallel_state(plan, rank) as state:
            collection = ProcessGroupCollection.use_mpu_process_groups()
            for name in GROUP_AXES:
                group = getattr(collection, name, None)
                if group is not None and rank in dist.get_process_group_ranks(group):
                    assert topology.group(name, rank) == tuple(dist.get_process_group_ranks(group)), name
            place = topology.coordinate(rank)
            assert place.tp == state.get_tensor_model_parallel_rank()
            assert place.dp == state.get_data_parallel_rank()
            assert place.pp == state.get_pipeline_model_parallel_rank()
            assert place.cp == state.get_context_parallel_rank()
            assert place.ep == state.get_expert_model_parallel_rank()
            assert place.etp == state.get_expert_tensor_parallel_rank()
            assert place.edp == state.get_expert_data_parallel_rank()
