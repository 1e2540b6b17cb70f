"""Names and quantities as Slurm and Kubernetes take them."""

from __future__ import annotations

import re

from mixle_megatron.errors import Fault

_SLURM_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*(,[A-Za-z0-9][A-Za-z0-9._+-]*)*")
_SLURM_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_CLAIM = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?|Ki)?")
LONGEST_LABEL = 63
"""Of a DNS label (RFC 1123), and so of pods that are reached by name."""


def slurm_word_faults(option: str, value: str | None) -> list[Fault]:
    """Whether a value can stand in an ``#SBATCH`` line as it is."""
    if value is None or _SLURM_WORD.fullmatch(value):
        return []
    return [Fault(option, value, "is no name that Slurm takes", "use letters, digits and . _ + -")]


def slurm_seconds(time: str) -> int | None:
    """A time limit of Slurm's in seconds; None where it is none.

    Its forms are M, M:S, H:M:S, D-H, D-H:M and D-H:M:S (``man sbatch``, ``--time``).
    """
    match = _SLURM_TIME.fullmatch(time)
    if match is None:
        return None
    parts = [int(part) for part in match["clock"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return ((int(match["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
    return (hours * 60 + minutes) * 60 + seconds


def label_of(name: str) -> str:
    """A run's name as a label of Kubernetes' (RFC 1035): ``Tiny_GPT.2`` is ``tiny-gpt-2``."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return label if not label or label[0].isalpha() else f"run-{label}"


def label_faults(option: str, name: str, *, longest: int = LONGEST_LABEL) -> list[Fault]:
    """Whether a name is a label of Kubernetes' (RFC 1035) of at most ``longest`` characters."""
    if _LABEL.fullmatch(name) is None:
        rule = "is no name that Kubernetes takes: small letters, digits and -, with a letter first"
        return [Fault(option, name, rule, f"use {label_of(name)}" if label_of(name) else "")]
    if len(name) > longest:
        rule = f"has {len(name)} characters, and the names made of it have room for {longest}"
        return [Fault(option, name, rule, "use --job-name with a shorter one")]
    return []


def claim_faults(option: str, name: str) -> list[Fault]:
    """Whether a name may be that of a volume claim (RFC 1123 subdomain)."""
    if _CLAIM.fullmatch(name) and len(name) <= 253:
        return []
    return [Fault(option, name, "is no name of a volume claim", "use small letters, digits, - and .")]


def quantity_faults(option: str, value: str | None) -> list[Fault]:
    """Whether a value is a quantity of Kubernetes'."""
    if value is None or _QUANTITY.fullmatch(value):
        return []
    return [Fault(option, value, "is no quantity", "write it like 64Gi, 500m or 8")]
