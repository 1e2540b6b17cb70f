"""Of which versions and which machine evidence is. No torch."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mixle_megatron import __version__
from mixle_megatron.capability.facts import HostFacts, in_words

_COMPUTE = ("mixle", "megatron-core", "torch", "transformer-engine", "apex", "flash-attn")
"""The packages that numbers depend on."""

_PROCESSORS = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Origin:
    """What numbers depend on beside a plan: evidence of another origin says nothing here.

    Attributes:
        versions: of Python, this package and those that it computes with; of this package a digest of its
            sources too, as one version of it may be many while it is being developed.
        hardware: the processor, the CUDA devices and their driver.
    """

    versions: Mapping[str, str]
    hardware: Mapping[str, str]

    def differences(self, other: Origin) -> list[str]:
        """What ``other`` has otherwise, in words: ``torch 2.14.1, not 2.13.0``."""
        return [
            f"{name} {theirs.get(name, 'none')}, not {own.get(name, 'none')}"
            for own, theirs in ((self.versions, other.versions), (self.hardware, other.hardware))
            for name in dict.fromkeys([*own, *theirs])
            if own.get(name) != theirs.get(name)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Origin:
        """What :meth:`as_dict` made."""
        return cls(dict(values["versions"]), dict(values["hardware"]))


def origin_of(facts: HostFacts) -> Origin:
    """The origin of what is measured on a host with these facts."""
    versions = {name: facts.package(name).version for name in _COMPUTE}
    devices = [f"{each.name} ({in_words(each.compute_capability)})" for each in facts.cuda.devices]
    hardware = {
        "processor": processor(),
        "CUDA devices": ", ".join(devices),
        "CUDA driver": facts.cuda.driver,
    }
    return Origin(
        versions={
            "python": facts.python,
            "mixle-megatron": __version__,
            "mixle-megatron sources": sources_digest(),
            **{name: version for name, version in versions.items() if version is not None},
        },
        hardware={name: value for name, value in hardware.items() if value},
    )


@cache
def processor() -> str:
    """The processor's architecture and, where the kernel tells it, its model."""
    architecture = platform.machine()
    if not _PROCESSORS.exists():
        return architecture
    lines = _PROCESSORS.read_text(encoding="utf-8", errors="replace").splitlines()
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return " ".join([architecture, *sorted(models)])


@cache
def sources_digest() -> str:
    """A digest of this package's Python files, names and contents: 16 hexadecimal digits."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
