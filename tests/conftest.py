"""Fixtures that the tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def run_on() -> Iterator[Any]:
    """``run_on(ranks, function, *args)``: call a module-level function on that many real ranks.

    Gives the list of results, one for each rank; see :class:`ranks.RankPool`.
    """
    from ranks import RankPool

    pool = RankPool()
    yield pool.run_on
    pool.close()
