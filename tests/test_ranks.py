"""The pool of ranks that the other tests stand on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, RanksFailed


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A pool of its own, as these tests end it."""
    pool = RankPool()
    yield pool
    pool.close()


def summed_rank(offset: int) -> tuple[int, int, float]:
    """This rank, its environment's rank, and the sum over ranks of rank plus offset."""
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), int(os.environ["RANK"]), total.item()


def fail_on_the_last_rank() -> None:
    """The other ranks wait for one that never comes."""
    if dist.get_rank() == dist.get_world_size() - 1:
        raise KeyError("the last rank")
    dist.barrier()


def die() -> None:
    """End the process without a word."""
    os._exit(7)


def test_worlds_of_different_sizes_follow_each_other_in_the_same_processes(pool: RankPool) -> None:
    for ranks in (2, 1, 4, 2):
        expected = sum(range(ranks)) + 10 * ranks
        assert pool.run_on(ranks, summed_rank, 10) == [(rank, rank, expected) for rank in range(ranks)]


def test_an_exception_arrives_with_its_rank_and_traceback_and_the_pool_goes_on(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"rank 1:(.|\n)*in fail_on_the_last_rank(.|\n)*the last rank"):
        pool.run_on(2, fail_on_the_last_rank)
    assert pool.run_on(1, summed_rank, 0) == [(0, 0, 0.0)]


def test_a_dead_process_is_reported_with_its_exit_code(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match="exit code 7"):
        pool.run_on(1, die)


def test_a_process_that_died_between_two_calls_is_replaced(pool: RankPool) -> None:
    assert len(pool.run_on(2, summed_rank, 0)) == 2
    gone = pool._workers[1].process
    gone.kill()
    gone.join()
    assert pool.run_on(2, summed_rank, 0) == [(0, 0, 1.0), (1, 1, 1.0)]
