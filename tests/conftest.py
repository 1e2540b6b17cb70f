"""Fixtures that the tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

# Ranks share the cores, so each computes with one thread; and the server that they fork from has one.
for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")


@pytest.fixture(scope="session")
def run_on() -> Iterator[Any]:
    """``run_on(ranks, function, *args)``: call a module-level function on that many real ranks.

    Gives the list of results, one for each rank; see :class:`ranks.RankPool`.
    """
    from ranks import RankPool

    pool = RankPool()
    yield pool.run_on
    pool.close()
