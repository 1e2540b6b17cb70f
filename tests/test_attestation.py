"""Whether each rank is where the plan has it: by mixle's attestations, and in real groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from small_gpts import SIZES, parallel_plan

PLAN = {"dp_shard": 2, "tp": 2}


def attested_here(launched: str, plans: list[dict[str, int]]) -> dict[str, Any] | list[str]:
    """What a session attests on this rank, or why there is none; with an attestation of mixle's launcher."""
    from mixle.utils.parallel.training_launchers import attest_worker_coordinate

    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.errors import Refused
    from mixle_megatron.models.gpt import GPT

    rank, ranks = dist.get_rank(), dist.get_world_size()
    plan = parallel_plan(**plans[rank % len(plans)])
    given = {"none": None, "own": rank, "reversed": ranks - 1 - rank}[launched]
    attestation = (
        given if given is None else attest_worker_coordinate(plan, actual_world_size=ranks, rank=given)
    )
    try:
        with MegatronBackend().prepare(
            GPT.of(**SIZES),
            plan=plan,
            device="cpu",
            attestation=attestation.as_dict() if attestation and rank else attestation,
        ) as session:
            return session.attest().as_dict()
    except Refused as refused:
        return [str(fault) for fault in refused.faults]


def test_a_launchers_attestation_is_accepted_and_relabelled(run_on: Any) -> None:
    """mixle counts cp fastest and Megatron tp: what its launcher calls cp=1 is tp=1 here."""
    from mixle.utils.parallel.training_launchers import attest_worker_coordinate

    told = run_on(4, attested_here, "own", [{"cp": 2, "tp": 2}])
    launcher = attest_worker_coordinate(parallel_plan(cp=2, tp=2), actual_world_size=4, rank=1)
    assert dict(launcher.coordinate) == {"dp_replicate": 0, "dp_shard": 0, "tp": 0, "pp": 0, "cp": 1}
    assert [each["rank"] for each in told] == [0, 1, 2, 3]
    assert [(each["coordinate"]["cp"], each["coordinate"]["tp"]) for each in told] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_ranks_in_another_order_than_their_launchers_are_refused_with_both_coordinates(run_on: Any) -> None:
    told = run_on(4, attested_here, "reversed", [PLAN])
    assert told == [told[0]] * 4
    first = "rank 3, which is at {'dp_replicate': 0, 'dp_shard': 1, 'tp': 1, 'pp': 0, 'cp': 0}"
    assert len(told[0]) == 4
    assert first in told[0][0]
    assert "has it at {'dp_replicate': 0, 'dp_shard': 0, 'tp': 0, 'pp': 0, 'cp': 0}" in told[0][0]


def test_ranks_of_two_plans_are_told_apart_before_they_wait_for_each_other(run_on: Any) -> None:
    told = run_on(2, attested_here, "none", [{"tp": 2}, {"dp_shard": 2}])
    assert told == [told[0]] * 2
    assert "plan=dp_shard=2, tp=1" in told[0][0]
    assert "on rank 1 differs from rank 0's, which has dp_shard=1, tp=2" in told[0][0]


def compared_with_crossed_groups() -> list[str]:
    """Groups of dp and tp, each made as the other: ranks 1 and 2 have changed places."""
    from mixle_megatron.attestation import compare_attestations
    from mixle_megatron.errors import Refused

    rank = dist.get_rank()
    rows, columns = (
        [dist.new_group(ranks) for ranks in groups] for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    )
    alone = [dist.new_group([each]) for each in range(4)][rank]
    collection = SimpleNamespace(dp=rows[rank // 2], tp=columns[rank % 2], pp=alone, cp=alone)
    try:
        compare_attestations(parallel_plan(**PLAN), SimpleNamespace(collection=collection))
    except Refused as refused:
        return [fault.field for fault in refused.faults]
    return []


def test_groups_of_another_order_are_refused_on_every_rank(run_on: Any) -> None:
    told = run_on(4, compared_with_crossed_groups)
    assert told == [["attestation[1].coordinate", "attestation[2].coordinate"]] * 4
