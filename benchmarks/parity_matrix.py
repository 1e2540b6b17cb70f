"""Trains a dense model and a mixture of experts under every plan of 8 ranks, against one rank.

Prints one JSON object; with ``--write`` the same as a table goes to docs/parity.md. The ranks share
this machine's cores, so a run takes about an hour on two of them. ``--ranks 4`` takes fewer.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
TABLE = Path(__file__).resolve().parents[1] / "docs" / "parity.md"
LIMITS = {"dense": 1e-5, "mixture": 1e-4}


def main() -> None:
    """Run every plan and print what differed."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--ranks", type=int, default=8, help="ranks of the plans")
    arguments.add_argument("--write", action="store_true", help="write the table to docs/parity.md")
    chosen = arguments.parse_args()
    sys.path.insert(0, str(TESTS))
    import conftest  # noqa: F401  sets one thread a rank
    from plan_matrix import MODELS, every_plan, train
    from ranks import RankPool
    from rich.progress import track

    pool, rows = RankPool(), []
    for name, model in MODELS.items():
        (reference,) = pool.run_on(1, train, model, {})
        plans = list(every_plan(chosen.ranks, experts=name == "mixture"))
        for plan in track(plans, description=name):
            rows.append(compared(name, plan, pool.run_on(chosen.ranks, train, model, plan), reference))
    pool.close()
    result = summary(rows, chosen.ranks)
    print(json.dumps(result))
    if chosen.write:
        TABLE.write_text(as_page(result, rows))


def compared(
    model: str, plan: dict[str, int], results: list[list[dict[str, Any]]], reference: list[dict[str, Any]]
) -> dict[str, Any]:
    """How far a plan's updates are from those of one rank."""
    from plan_matrix import plan_name

    own = results[0]
    pairs = list(zip(own, reference, strict=True))
    return {
        "model": model,
        "plan": plan_name(plan),
        "loss": max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in pairs),
        "first_norm": abs(own[0]["grad_norm"] - reference[0]["grad_norm"]) / reference[0]["grad_norm"],
        "same_routing": all(a["routing"] == b["routing"] for a, b in pairs),
        "same_on_all_ranks": all(result == own for result in results),
        "same_tokens": all(a["tokens"] == b["tokens"] for a, b in pairs),
    }


def summary(rows: list[dict[str, Any]], ranks: int) -> dict[str, Any]:
    """The worst of each model, and what was run."""
    import megatron.core
    import torch
    from plan_matrix import UPDATES

    models = {}
    for name, limit in LIMITS.items():
        own = [row for row in rows if row["model"] == name]
        models[name] = {
            "plans": len(own),
            "largest_relative_loss_difference": max(row["loss"] for row in own),
            "limit": limit,
            "largest_relative_difference_of_the_first_norm": max(row["first_norm"] for row in own),
            "same_routing": all(row["same_routing"] for row in own),
            "same_tokens": all(row["same_tokens"] for row in own),
            "same_on_all_ranks": all(row["same_on_all_ranks"] for row in own),
        }
    return {
        "ranks": ranks,
        "updates": UPDATES,
        "date": datetime.date.today().isoformat(),
        "python": sys.version.split()[0],
        "torch": torch.__version__.split("+")[0],
        "megatron_core": megatron.core.__version__.split("+")[0],
        "models": models,
    }


def as_page(result: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The page of the documentation."""
    lines = [
        "# Every plan against one rank",
        "",
        f"The last result of `benchmarks/parity_matrix.py`, {result['date']}: every plan of "
        f"{result['ranks']} ranks that the models can be cut into, {result['updates']} updates in fp32 on "
        f"the CPU, against one rank (Python {result['python']}, torch {result['torch']}, Megatron-Core "
        f"{result['megatron_core']}).",
        "Losses are compared after every update, gradient norms after the first; *routing* says whether",
        "every expert of every layer got the same number of tokens in every update.",
        "The suite does the same for every plan of 2 and 4 ranks.",
        "",
        "| model | plans | largest loss difference | allowed | first norm | routing |",
        "|---|---|---|---|---|---|",
    ]
    for name, model in result["models"].items():
        cells = (
            name,
            model["plans"],
            f"{model['largest_relative_loss_difference']:.1e}",
            f"{model['limit']:.0e}",
            f"{model['largest_relative_difference_of_the_first_norm']:.1e}",
            "same" if model["same_routing"] else "differs",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| model | plan | loss | first norm | routing |", "|---|---|---|---|---|"]
    for row in rows:
        routing = "same" if row["same_routing"] else "differs"
        lines.append(
            f"| {row['model']} | {row['plan']} | {row['loss']:.1e} | {row['first_norm']:.1e} | {routing} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
