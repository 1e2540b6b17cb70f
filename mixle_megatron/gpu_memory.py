"""Memory that GPUs are sold with, by name, and sizes of memory as people write them. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mixle_megatron.errors import Fault, Refused

GIGABYTE = 10**9

# NVIDIA's data sheets: "V100" (2020), "A100 80GB" (2021), "L40S" (2023), "H100" (2023), "H200" (2024); and
# "DGX B200" (2024), whose eight GPUs have 1,440 GB. They count in powers of ten.
GPUS: dict[str, int] = {
    "v100": 32 * GIGABYTE,
    "a100-40gb": 40 * GIGABYTE,
    "a100": 80 * GIGABYTE,
    "l40s": 48 * GIGABYTE,
    "h100": 80 * GIGABYTE,
    "h200": 141 * GIGABYTE,
    "b200": 180 * GIGABYTE,
}
"""Bytes of memory of each GPU, as published: what a driver reports differs a little."""

_UNITS = {"mb": 10**6, "gb": 10**9, "tb": 10**12, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]+)")


@dataclass(frozen=True)
class GpuMemory:
    """The memory that a plan is to fit in.

    Attributes:
        name: as it was asked for.
        bytes: of one GPU.
    """

    name: str
    bytes: int


def gpu_memory(asked: str, *, field: str = "--gpu-memory") -> GpuMemory:
    """The memory of a GPU by its name (``h100``), or a size with its unit (``80GiB``, ``141 GB``).

    Raises:
        Refused: it is neither.
    """
    name = asked.strip().lower()
    if name in GPUS:
        return GpuMemory(name, GPUS[name])
    match = _SIZE.fullmatch(name)
    size = int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if size <= 0:
        rule = "is neither a GPU whose memory is known nor a size"
        remedy = f"use {', '.join(GPUS)}, or a size such as 80GB or 80GiB"
        raise Refused([Fault(field, asked, rule, remedy)])
    return GpuMemory(asked.strip(), size)
