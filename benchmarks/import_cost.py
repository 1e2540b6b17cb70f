"""Times ``import mixle_megatron`` against ``import mixle.utils.parallel``; prints one JSON object.

Each figure is the median of fresh processes: alternately one that imports mixle's package first, as a
mixle program does, and one that imports this one alone. The second is what has to stay free of torch.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

LIMIT = 0.050
PAIRS = 5

CHILD = """
import json, sys, time

def load(name):
    before = set(sys.modules)
    start = time.perf_counter()
    __import__(name)
    seconds = time.perf_counter() - start
    heavy = {each.partition(".")[0] for each in set(sys.modules) - before} & {"torch", "megatron"}
    return {"seconds": seconds, "newly_loads": sorted(heavy)}

print(json.dumps({name: load(name) for name in sys.argv[1:]}))
"""


def imports(*names: str) -> dict[str, dict]:
    """Import ``names`` in this order in a fresh process; how long each takes, and whether it loads torch."""
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, *names], check=True, capture_output=True, text=True
    )
    return json.loads(child.stdout)


def main() -> None:
    """Measure in turn and print medians."""
    after, alone = [], []
    for _ in range(PAIRS):
        after.append(imports("mixle.utils.parallel", "mixle_megatron"))
        alone.append(imports("mixle_megatron"))
    beyond = statistics.median(each["mixle_megatron"]["seconds"] for each in after)
    mixle = statistics.median(each["mixle.utils.parallel"]["seconds"] for each in after)
    ratios = [each["mixle_megatron"]["seconds"] / each["mixle.utils.parallel"]["seconds"] for each in after]
    result = {
        "benchmark": "import_cost",
        "pairs": PAIRS,
        "mixle_seconds": round(mixle, 4),
        "beyond_mixle_seconds": round(beyond, 4),
        "ratio_to_mixle": round(statistics.median(ratios), 5),
        "alone_seconds": round(statistics.median(each["mixle_megatron"]["seconds"] for each in alone), 4),
        "newly_loads_after_mixle": after[0]["mixle_megatron"]["newly_loads"],
        "newly_loads_alone": alone[0]["mixle_megatron"]["newly_loads"],
        "limit_seconds": LIMIT,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
