"""What this package needs, in which versions, and whether a host has it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from mixle_megatron.capability.facts import HostFacts

INSTALL_TRANSFORMER_ENGINE = "pip install --no-build-isolation 'mixle-megatron[te]'"
"""NVIDIA ships the torch part as source, which is built against the torch that is installed."""


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: ``(2, 14, 1)`` of ``2.14.1+cu130``, ``(0, 20)`` of ``0.20rc1``."""
    leading = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, leading[0].split("."))) if leading else ()


@dataclass(frozen=True)
class Requirement:
    """A distribution in a range of versions.

    Attributes:
        name: of the distribution, or ``python``.
        at_least: the oldest version that will do, or None for any.
        below: the version from which on it is not known to, or None.
    """

    name: str
    at_least: str | None = None
    below: str | None = None

    @property
    def specifier(self) -> str:
        """The range as pip has it: ``>=0.16,<0.20``, or nothing."""
        bounds = ((">=", self.at_least), ("<", self.below))
        return ",".join(f"{sign}{version}" for sign, version in bounds if version is not None)

    def __str__(self) -> str:
        return self.name + self.specifier

    def admits(self, version: str) -> bool:
        """Whether this version is in the range."""
        numbers = release(version)
        if self.at_least is not None and numbers < release(self.at_least):
            return False
        return self.below is None or numbers < release(self.below)


REQUIREMENTS = (
    Requirement("python", "3.11", "3.13"),
    Requirement("mixle", "0.8.1", "0.9"),
    Requirement("megatron-core", "0.16", "0.20"),
    Requirement("torch", "2.6"),
    Requirement("einops"),
    Requirement("psutil"),
)
"""What training needs. Megatron needs einops and psutil, and declares neither."""


@dataclass(frozen=True)
class Found:
    """A requirement beside what a host has.

    Attributes:
        name: of the distribution.
        needs: the range, as pip has it; empty for any version.
        found: the version that is installed, or None.
        problem: what is wrong with that, or empty.
        remedy: what would put it right, or empty.
    """

    name: str
    needs: str
    found: str | None
    problem: str = ""
    remedy: str = ""

    @property
    def met(self) -> bool:
        """Whether the host has what is needed."""
        return not self.problem

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for ``--json``."""
        return {**asdict(self), "met": self.met}


def found_on(facts: HostFacts) -> tuple[Found, ...]:
    """Every requirement beside what the host has."""
    return tuple(_found(requirement, facts) for requirement in REQUIREMENTS)


def _found(requirement: Requirement, facts: HostFacts) -> Found:
    name, needs = requirement.name, requirement.specifier
    if name == "python":
        version, error = facts.python, None
    else:
        package = facts.package(name)
        version, error = package.version, package.error
    install = f"use Python {needs}" if name == "python" else f"pip install '{requirement}'"
    if version is None:
        return Found(name, needs, None, f"{name} is not installed", install)
    if not requirement.admits(version):
        return Found(name, needs, version, f"{name} {version} is not within {needs}", install)
    if error is not None:
        remedy = f"make this work: python -c 'import {name.replace('-', '.')}'"
        if error == facts.transformer_engine.error:
            # Megatron imports every Transformer Engine that is installed, also where nothing uses it.
            remedy = f"pip uninstall transformer-engine, or rebuild it: {INSTALL_TRANSFORMER_ENGINE}"
        return Found(name, needs, version, f"importing {name} {version} fails: {error}", remedy)
    return Found(name, needs, version)
