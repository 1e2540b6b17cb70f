"""Reducing gradients during the backward pass, which CUDA sessions do, gives what reducing after it gives."""

from __future__ import annotations

from typing import Any

import pytest
from small_gpts import global_batch, session, train_update


def losses(overlaps: bool, accumulate: bool, sizes: dict[str, int]) -> list[tuple[float, float]]:
    """Loss and gradient norm of four updates, the last of which is committed before it is full."""
    from mixle_megatron import backend, translate

    original = translate.Host.of
    backend.Host.of = classmethod(lambda cls, device: cls(device, False, overlaps_reduction=overlaps))
    try:
        with session(**sizes, uneven_batches=False) as opened:
            receipts = [train_update(opened, update) for update in range(3)]
            if accumulate:
                inputs, targets = global_batch(3)
                rank, size = opened.data_parallel_rank, opened.data_parallel_size
                opened.train_batch(inputs[:8].chunk(size)[rank], targets[:8].chunk(size)[rank])
                receipts.append(opened.finish_accumulation())
    finally:
        backend.Host.of = original
    return [(receipt.loss, receipt.extra["grad_norm"]) for receipt in receipts]


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp_shard": 2, "microbatches": 3},
        {"dp_shard": 2, "microbatches": 2, "gradient_accumulation_steps": 3},
        {"dp_replicate": 2, "gradient_accumulation_steps": 2},
        {"dp_shard": 2, "pp": 2, "microbatches": 2, "gradient_accumulation_steps": 2},
        {"dp_shard": 2, "tp": 2},
    ],
    ids=str,
)
def test_overlapping_the_reduction_changes_nothing(run_on: Any, sizes: dict[str, int]) -> None:
    ranks = 4 if len({"pp", "tp"} & sizes.keys()) else 2
    accumulates = sizes.get("gradient_accumulation_steps", 1) > 1
    during, after = (run_on(ranks, losses, overlaps, accumulates, sizes)[0] for overlaps in (True, False))
    assert [loss for loss, _ in during] == pytest.approx([loss for loss, _ in after], rel=1e-6)
    assert [norm for _, norm in during] == pytest.approx([norm for _, norm in after], rel=1e-5)
