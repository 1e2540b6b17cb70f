"""Times coordinates and groups of all ranks of a 16,384-rank plan; prints one JSON object.

The same is timed for Megatron's own rank generator where megatron-core is installed.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.topology import GROUP_AXES, Topology

PLAN = PlanRecord(dp_replicate=4, dp_shard=32, tp=8, pp=8, cp=2, ep=8, etp=1)
REPEATS = 5


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def everything() -> None:
    """Coordinates of all ranks, all groups of every name, and which of them each rank is in."""
    topology = Topology(PLAN)
    topology.coordinates()
    for rank in range(topology.world_size):
        topology.mixle_coordinate(rank)
    for name in GROUP_AXES:
        topology.group_index(name)


def megatron_groups() -> None:
    """The dense and expert groups from Megatron's RankGenerator."""
    from megatron.core.parallel_state import RankGenerator

    topology = Topology(PLAN)
    dense, expert = topology.dense_sizes, topology.expert_sizes
    generators = {
        RankGenerator(order="tp-cp-ep-dp-pp", ep=1, **dense): (
            *("tp", "cp", "dp", "pp", "tp-pp", "tp-cp", "tp-dp", "tp-dp-cp", "dp-cp"),
        ),
        RankGenerator(
            tp=expert["etp"], ep=expert["ep"], dp=expert["edp"], pp=expert["pp"], cp=1, order="tp-cp-ep-dp-pp"
        ): ("ep", "tp", "tp-ep", "tp-ep-pp", "dp"),
    }
    for generator, tokens in generators.items():
        for token in tokens:
            generator.get_ranks(token)


def main() -> None:
    """Time ours and Megatron's in turn and print medians."""
    import megatron.core.parallel_state  # noqa: F401  (its import is not what is timed)

    pairs = [(seconds(everything), seconds(megatron_groups)) for _ in range(REPEATS)]
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    result = {
        "benchmark": "topology_speed",
        "world_size": PLAN.world_size,
        "seconds": round(ours, 4),
        "megatron_seconds": round(theirs, 4),
        "ratio_to_megatron": round(ours / theirs, 3),
        "limit_seconds": 2.0,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
