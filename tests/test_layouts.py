"""Layouts and updates against what the ranks really hold and really communicate."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mixle.utils.parallel.torch_training import describe_parameter_layouts
from mixle.utils.parallel.training_contracts import CollectiveKind, ParallelPlan, StateLayout
from test_causal_lm import VOCABULARY, causal_lm, open_session, tokens

PLANS: dict[str, tuple[int, dict[str, int]]] = {
    "one rank": (1, {}),
    "dp_replicate=2": (2, {"dp_replicate": 2}),
    "dp_shard=2": (2, {"dp_shard": 2}),
    "tp=2": (2, {"tp": 2}),
    "pp=2": (2, {"pp": 2}),
    "tp=2 pp=2": (4, {"tp": 2, "pp": 2}),
    "tp=2 dp_shard=2": (4, {"tp": 2, "dp_shard": 2}),
    "pp=2 dp_shard=2": (4, {"pp": 2, "dp_shard": 2}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}),
    "tp=2 dp_replicate=2": (4, {"tp": 2, "dp_replicate": 2}),
    "cp=2": (2, {"cp": 2}),
    "cp=2 tp=2": (4, {"cp": 2, "tp": 2}),
    "cp=2 dp_shard=2": (4, {"cp": 2, "dp_shard": 2}),
}


def layouts(sizes: dict[str, int]) -> list[Any]:
    session = open_session(causal_lm(), sizes)
    session.close()
    return list(session.parameter_layouts)


@pytest.mark.parametrize("plan", PLANS)
def test_every_parameter_of_the_callers_module_has_one_layout(run_on: Any, plan: str) -> None:
    ranks, sizes = PLANS[plan]
    results = run_on(ranks, layouts, sizes)
    assert all(result == results[0] for result in results)
    mixles = describe_parameter_layouts(causal_lm(), ParallelPlan(**sizes))

    def identity(layout: Any) -> tuple[Any, ...]:
        return (layout.logical_id, layout.global_shape, layout.shared_group)

    assert sorted(map(identity, results[0]), key=str) == sorted(map(identity, mixles), key=str)


def misplaced(sizes: dict[str, int]) -> tuple[int, list[str]]:
    """How many layouts this rank has a part of, and those that do not say what it holds."""
    from mixle_megatron.models.causal_lm_names import mixle_name
    from mixle_megatron.models.naming import logical_name
    from mixle_megatron.optimizer_shards import model_parameters, own_value

    whole = dict(causal_lm().named_parameters())
    session = open_session(causal_lm(), sizes)
    held = {
        mixle_name(logical_name(session.module, name)): parameter
        for name, parameter in session.module.named_parameters()
    }
    optimizers = {id(parameter): part for part, parameter in model_parameters(session.optimizer)}
    wrong, seen = [], 0
    for layout in session.parameter_layouts:
        placements = dict(layout.placements)
        stages = numbers(placements.get("pp", "Stage(0)"))
        parameter = held.pop(layout.logical_id, None)
        if (session.coordinate["pp"] in stages) != (parameter is not None):
            wrong.append(f"{layout.logical_id}: stage {session.coordinate['pp']} is not as in {stages}")
        if parameter is None:
            continue
        seen += 1
        expected = cut(whole[layout.logical_id], placements.get("tp", ""), session.coordinate["tp"], sizes)
        # Within a shard Megatron keeps the rows of queries, keys and values in another order.
        if not torch.equal(expected.flatten().sort()[0], parameter.flatten().sort()[0]):
            wrong.append(f"{layout.logical_id}: {placements.get('tp')} is not what is held")
        own = own_value(optimizers[id(parameter)], parameter)
        shard = session.coordinate["dp_shard"] * sizes.get("cp", 1) + session.coordinate["cp"]
        start, stop = optimizer_range(placements, shard, parameter)
        if not torch.equal(parameter.flatten()[start:stop], torch.empty(0) if own is None else own):
            wrong.append(f"{layout.logical_id}: {placements} is not what the optimizer holds")
        whole_state = sizes.get("dp_shard", 1) * sizes.get("cp", 1) == 1
        everything = whole_state and "Shard" not in placements.get("tp", "")
        if (layout.optimizer_state is StateLayout.SHARDED) == everything:
            wrong.append(f"{layout.logical_id}: {layout.optimizer_state}")
    session.close()
    return seen, wrong + list(held)


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def cut(whole: torch.Tensor, placement: str, rank: int, sizes: dict[str, int]) -> torch.Tensor:
    """The part of ``whole`` that a ``tp`` placement gives to a rank, from its words alone."""
    found = re.fullmatch(r"Shard\(dim=(\d)(?:, stride=(\d+))?(?:, padded=(\d+))?\)", placement)
    if found is None:
        assert placement in ("", "Replicate()")
        return whole
    dim, stride = int(found[1]), int(found[2] or 1)
    if found[3]:
        whole = torch.cat([whole, torch.zeros(int(found[3]) - len(whole), *whole.shape[1:])])
    parts = [part.chunk(sizes["tp"], dim)[rank] for part in whole.chunk(stride, dim)]
    return torch.cat(parts, dim)


def optimizer_range(placements: dict[str, str], shard: int, parameter: torch.Tensor) -> tuple[int, int]:
    ranges = next((value for value in placements.values() if value.startswith("OptimizerRange")), None)
    if ranges is None:
        return 0, parameter.numel()
    found = re.findall(r"(\d+):\[(\d+),(\d+)\)", ranges)
    return next(((int(a), int(b)) for each, a, b in found if int(each) == shard), (0, 0))


@pytest.mark.parametrize("plan", PLANS)
def test_layouts_say_what_the_ranks_hold(run_on: Any, plan: str) -> None:
    ranks, sizes = PLANS[plan]
    for seen, wrong in run_on(ranks, misplaced, sizes):
        assert wrong == []
        assert seen > 10 // sizes.get("pp", 1)


def test_a_vocabulary_that_tp_does_not_divide_is_padded_in_its_layout_alone(run_on: Any) -> None:
    embedding = next(
        layout for layout in run_on(2, layouts, {"tp": 2})[0] if layout.logical_id == "tok.weight"
    )
    assert embedding.global_shape[0] == VOCABULARY == 57
    assert dict(embedding.placements)["tp"] == "Shard(dim=0, padded=58)"
    assert embedding.shared_group == "tok.weight=head.weight"


# Updates

_KINDS = {
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "reduce_scatter_tensor": CollectiveKind.REDUCE_SCATTER,
    "all_gather_into_tensor": CollectiveKind.ALL_GATHER,
    "all_gather": CollectiveKind.ALL_GATHER,
    "all_to_all_single": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.BROADCAST,
    "batch_isend_irecv": CollectiveKind.P2P,
}


@contextmanager
def recorded(seen: set[tuple[str, tuple[int, ...]]]) -> Iterator[None]:
    """Every collective that torch runs within the block: its kind, and the ranks that take part."""
    from torch.distributed import distributed_c10d as c10d

    from mixle_megatron.traffic import _owners

    replaced = []

    def recording(original: Any, kind: CollectiveKind) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            if kind is CollectiveKind.P2P:
                group = args[0][0].group
            group = group or next((each for each in args if isinstance(each, dist.ProcessGroup)), None)
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            if len(ranks) > 1:
                seen.add((kind.value, tuple(ranks)))
            return original(*args, **kwargs)

        return call

    names = [*_KINDS, "_reduce_scatter_base", "_all_gather_base"]
    kinds = _KINDS | {
        "_reduce_scatter_base": CollectiveKind.REDUCE_SCATTER,
        "_all_gather_base": CollectiveKind.ALL_GATHER,
    }
    for name in names:
        original = getattr(dist, name)
        for owner in (*_owners(), c10d):
            for attribute, value in list(vars(owner).items()):
                if value is original:
                    setattr(owner, attribute, recording(original, kinds[name]))
                    replaced.append((owner, attribute, original))
    try:
        yield
    finally:
        for owner, attribute, original in reversed(replaced):
            setattr(owner, attribute, original)


def collectives_of_a_step(sizes: dict[str, int]) -> tuple[list[Any], set[tuple[str, tuple[int, ...]]]]:
    """The declarations, and what this rank took part in during one update."""
    session = open_session(causal_lm(), sizes)
    seen: set[tuple[str, tuple[int, ...]]] = set()
    rows = tokens(4)[session.data_parallel_rank :: session.data_parallel_size]
    with recorded(seen):
        session.train_batch(rows[:, :-1], rows[:, 1:])
    session.close()
    return list(session.updates), seen


def peers(sizes: dict[str, int], rank: int, update: Any) -> tuple[int, ...]:
    """The ranks that an update's axes join, by a hand-written unravelling of Megatron's order of ranks."""
    order = [(axis, sizes.get(axis, 1)) for axis in ("tp", "cp", "dp_shard", "dp_replicate", "pp")]

    def place(number: int) -> dict[str, int]:
        found = {}
        for axis, size in order:
            number, found[axis] = divmod(number, size)
        return found

    along = {axis.value for axis in update.mesh_axes}
    here = place(rank)
    world = range(prod(size for _, size in order))
    return tuple(
        other
        for other in world
        if all(place(other)[axis] == here[axis] for axis, _ in order if axis not in along)
    )


@pytest.mark.parametrize("plan", PLANS)
def test_updates_are_what_a_step_communicates(run_on: Any, plan: str) -> None:
    ranks, sizes = PLANS[plan]
    for rank, (updates, seen) in enumerate(run_on(ranks, collectives_of_a_step, sizes)):
        assert len({update.node_id for update in updates}) == len(updates)
        communicating = [update for update in updates if update.collective is not CollectiveKind.NONE]
        declared = {(update.collective.value, peers(sizes, rank, update)) for update in communicating}
        assert seen == declared
        assert all(update.contract_exact for update in updates)
        assert {update.exact for update in communicating} <= {False}


# Experts

EXPERT_PLANS: dict[str, dict[str, int]] = {
    "dp_shard=2 ep=2": {"dp_shard": 2, "ep": 2},
    "dp_replicate=2 ep=2": {"dp_replicate": 2, "ep": 2},
    "tp=2": {"tp": 2},
    "tp=2 etp=2": {"tp": 2, "etp": 2},
    "tp=2 dp_shard=2 ep=2 etp=2": {"tp": 2, "dp_shard": 2, "ep": 2, "etp": 2},
    "cp=2 dp_shard=2 ep=2": {"cp": 2, "dp_shard": 2, "ep": 2},
    "pp=2 dp_shard=2 ep=2": {"pp": 2, "dp_shard": 2, "ep": 2},
}


def mixture(sizes: dict[str, int], **changes: Any) -> Any:
    from plan_matrix import MIXTURE

    from mixle_megatron.models.gpt import GPT

    return open_session(GPT.of(seed=7, **(MIXTURE | changes)), sizes, optimizer="adam")


def whole_mixture() -> dict[str, torch.Tensor]:
    session = mixture({})
    whole = {name: parameter.detach().clone() for name, parameter in session.stage.named_parameters()}
    session.close()
    return whole


def misplaced_experts(sizes: dict[str, int], whole: dict[str, torch.Tensor]) -> tuple[list[Any], list[str]]:
    """The layouts, and those of experts that do not say what this rank holds."""
    from mixle_megatron.optimizer_shards import model_parameters, own_value

    session = mixture(sizes)
    groups = session.stage.groups.collection
    held = dict(session.stage.named_parameters())
    optimizers = {id(parameter): part for part, parameter in model_parameters(session.optimizer)}
    wrong = []
    for layout in session.parameter_layouts:
        if ".experts." not in layout.logical_id:
            continue
        placements = dict(layout.placements)
        here = session.coordinate["pp"] in numbers(placements.get("pp", "Stage(0)"))
        here = here and groups.ep.rank() in numbers(placements.get("ep", "Rank(0)"))
        parameter = held.get(layout.logical_id)
        if here != (parameter is not None):
            wrong.append(f"{layout.logical_id}: {placements}")
        if parameter is None:
            continue
        etp = {"tp": sizes.get("etp", 1)}
        expected = cut(whole[layout.logical_id], placements.get("etp", ""), groups.expt_tp.rank(), etp)
        own = own_value(optimizers[id(parameter)], parameter)
        start, stop = optimizer_range(placements, groups.intra_expt_dp.rank(), parameter)
        kept = parameter.flatten()[start:stop]
        if not torch.equal(expected, parameter) or not torch.equal(kept, kept[:0] if own is None else own):
            wrong.append(f"{layout.logical_id}: {placements}")
        if (layout.optimizer_state is StateLayout.EXPERT_LOCAL) != (sizes.get("ep", 1) > 1):
            wrong.append(f"{layout.logical_id}: {layout.optimizer_state}")
    result = list(session.parameter_layouts)
    session.close()
    return result, wrong


@pytest.mark.parametrize("plan", EXPERT_PLANS)
def test_layouts_of_experts_say_what_the_ranks_hold(run_on: Any, plan: str) -> None:
    sizes = EXPERT_PLANS[plan]
    (whole,) = run_on(1, whole_mixture)
    results = run_on(ParallelPlan(**sizes).world_size, misplaced_experts, sizes, whole)
    for found, wrong in results:
        assert wrong == []
        assert found == results[0][0]
        assert {layout.logical_id for layout in found} == set(whole)


def expert_collectives(
    sizes: dict[str, int], changes: dict[str, Any]
) -> tuple[list[Any], set[tuple[str, tuple[int, ...]]], dict[str, tuple[int, ...]]]:
    """The declarations, what this rank took part in, and the ranks of its groups of experts."""
    session = mixture(sizes, **changes)
    collection = session.stage.groups.collection
    names = {"ep": "ep", "etp": "expt_tp", "ep*etp": "tp_ep", "edp": "expt_dp"}
    groups = {
        name: tuple(dist.get_process_group_ranks(getattr(collection, own))) for name, own in names.items()
    }
    seen: set[tuple[str, tuple[int, ...]]] = set()
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 257, (2, 17), generator=generator)
    with recorded(seen):
        session.train_batch(rows[:, :-1], rows[:, 1:])
    session.close()
    return list(session.updates), seen, groups


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("plan", EXPERT_PLANS)
def test_updates_of_a_mixture_are_what_a_step_communicates(run_on: Any, plan: str, dispatcher: str) -> None:
    sizes = EXPERT_PLANS[plan]
    changes = {
        "moe_token_dispatcher_type": dispatcher,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
    results = run_on(ParallelPlan(**sizes).world_size, expert_collectives, sizes, changes)
    for rank, (updates, seen, groups) in enumerate(results):
        declared = set()
        for update in updates:
            axes = "*".join(axis.value for axis in update.mesh_axes)
            if update.node_id.endswith(":experts"):
                axes = "edp"
            ranks = groups[axes] if axes in groups else peers(sizes, rank, update)
            kind = update.collective
            if update.node_id == "token:reduce_scatter" and dispatcher == "alltoall":
                kind = CollectiveKind.ALL_TO_ALL  # unequal parts, which gloo cannot scatter (host/)
            if kind is not CollectiveKind.NONE:
                declared.add((kind.value, ranks))
        assert seen == declared
