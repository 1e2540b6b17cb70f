"""What the length of a sequence must satisfy under a plan."""

from __future__ import annotations

from math import lcm
from typing import Any

from mixle_megatron.errors import Fault
from mixle_megatron.rules.nearest import listed, multiples_around


def sequence_multiple(plan: Any) -> int:
    """What divides every sequence: 2 · cp chunks for context parallelism, each rank's part over tp."""
    return lcm(2 * plan.cp, plan.cp * plan.tp) if plan.cp > 1 else plan.tp


def sequence_faults(plan: Any, sequence: int) -> list[Fault]:
    """Whether a batch's ``sequence`` tokens can be split over cp, in zigzag order, and over tp."""
    multiple = sequence_multiple(plan)
    if sequence % multiple == 0:
        return []
    if plan.cp == 1:
        rule = f"is not divisible by plan.tp={plan.tp}, over which sequences are split"
    else:
        rule = (
            f"is not divisible by {multiple}, the least common multiple of 2 · plan.cp={2 * plan.cp} "
            f"and plan.cp · plan.tp={plan.cp * plan.tp}, over which sequences are split"
        )
    return [Fault("sequence", sequence, rule, f"use {listed(multiples_around(sequence, multiple))}")]
