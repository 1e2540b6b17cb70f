"""Receipts: what is counted, on whom, and that every rank is told the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from small_gpts import ROWS, cuts, global_batch, section, session, train_update

SHARED = (
    "step",
    "loss",
    "microbatches",
    "accumulation_steps",
    "data_parallel_size",
    "global_examples",
    "global_tokens",
    "optimizer",
    "precision",
    "skipped",
)


def receipts(sizes: dict[str, int], shape: str, updates: int) -> list[dict[str, Any]]:
    """Receipts of some updates as plain data, with the rank's part of the batch."""
    with session(**sizes) as opened:
        found = [train_update(opened, update, shape).as_dict() for update in range(updates)]
    return [receipt | {"part": opened.data_parallel_rank} for receipt in found]


@pytest.mark.parametrize(
    "sizes",
    [{"dp_shard": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "dp_shard": 2}, {"dp_replicate": 2, "tp": 2}],
    ids=str,
)
def test_receipts_agree_between_ranks_and_count_each_token_once(run_on, sizes: dict[str, int]) -> None:
    ranks = 1
    for size in sizes.values():
        ranks *= size
    first_of_each = [found[0] for found in run_on(ranks, receipts, sizes | {"microbatches": 2}, "uneven", 1)]
    targets = global_batch(0)[1]
    replicas = first_of_each[0]["data_parallel_size"]
    for receipt in first_of_each:
        assert [receipt[key] for key in SHARED] == [first_of_each[0][key] for key in SHARED]
        assert receipt["global_examples"] == ROWS
        assert receipt["global_tokens"] == int((targets != -100).sum())
        mine = targets[cuts(ROWS, replicas, "uneven")[receipt["part"]]]
        assert receipt["local_examples"] == len(mine)
        assert receipt["local_tokens"] == int((mine != -100).sum())
        extra, expected = dict(receipt["extra"]), dict(first_of_each[0]["extra"])
        assert set(extra.pop("seconds")) == {"forward_backward", "reduction", "optimizer"}
        expected.pop("seconds")
        assert extra == expected
        assert {"grad_norm", "learning_rate", "loss_scale", "plan"} <= set(extra)


def buffers_of_a_trained_session() -> tuple[list[int], int, int]:
    """Elements of the gradient buffers, and the bytes of the second and third update."""
    with session(dp_shard=2) as opened:
        train_update(opened, 0)
        sent = [train_update(opened, update).collective_bytes for update in (1, 2)]
        elements = [buffer.grad_data.numel() for buffer in opened.stage._parallel[0].buffers]
    return elements, *sent


def test_collective_bytes_of_data_parallelism_are_those_counted_by_hand(run_on) -> None:
    from mixle_megatron.config.schema import dimensions_of
    from mixle_megatron.parameter_count import total_parameters

    for elements, *sent in run_on(2, buffers_of_a_trained_session):
        assert total_parameters(dimensions_of(section("gpt2"))) <= sum(elements)
        assert sum(elements) <= 1.05 * total_parameters(dimensions_of(section("gpt2")))
        share = (2 - 1) / 2
        reduce_scatter = sum(elements) * 4 * share
        all_gather = sum(elements) * 4 * share
        # in float64: loss, tokens, examples, and how many replicas train, evaluate and wait
        exchanged = 6 * 8 * 2 * share
        squared_norm = 4 * 2 * share
        expected = reduce_scatter + all_gather + exchanged + squared_norm
        assert sent == [expected, expected]


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {"dp_replicate": 2}], ids=str)
def test_every_axis_communicates(run_on, sizes: dict[str, int]) -> None:
    for found in run_on(2, receipts, sizes, "even", 1):
        assert found[0]["collective_bytes"] > 0


def test_one_rank_communicates_nothing(run_on) -> None:
    assert run_on(1, receipts, {}, "even", 1)[0][0]["collective_bytes"] == 0


def counted(call: str, ranks_in_group: int) -> int:
    """Bytes counted for one exchange of eight fp32 numbers, its group given by position."""
    import torch

    from mixle_megatron.traffic import TrafficMeter

    group = dist.new_group(list(range(ranks_in_group)))
    meter = TrafficMeter()
    meter.start()
    if call == "all_reduce":
        dist.all_reduce(torch.ones(8), dist.ReduceOp.SUM, group)
    else:
        dist.broadcast(torch.ones(8), 0, group)
    meter.stop()
    return meter.take()


@pytest.mark.parametrize(("call", "sent"), [("all_reduce", 32), ("broadcast", 16)])
def test_traffic_is_counted_for_the_group_that_exchanges(run_on, call: str, sent: int) -> None:
    assert run_on(4, counted, call, 2) == [sent, sent, 0, 0]
