"""What is known of a host, as plain data: whoever decides about a host decides about this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mixle_megatron.precision import ComputeCapability


@dataclass(frozen=True)
class Package:
    """A distribution, and what came of importing it.

    Attributes:
        version: None where it is not installed.
        error: what importing it raised, in one line; None where that went well or was not tried.
    """

    version: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class CudaDevice:
    """One CUDA device, as the driver shows it to this process."""

    name: str
    compute_capability: ComputeCapability
    memory_bytes: int


@dataclass(frozen=True)
class Cuda:
    """CUDA on this host.

    Attributes:
        devices: in CUDA's order, so far as ``CUDA_VISIBLE_DEVICES`` shows them.
        driver: version of NVIDIA's kernel driver, or None.
        supported_by_driver: the newest CUDA that the driver runs, such as ``13.0``, or None.
        built_for: the CUDA that torch is built for, or None for a build without CUDA.
        usable: whether torch can use the devices; None where torch was not asked.
        nccl: the version of NCCL that torch has, or None for a build without it.
        error: what asking the driver raised, in one line, or None.
    """

    devices: tuple[CudaDevice, ...] = ()
    driver: str | None = None
    supported_by_driver: str | None = None
    built_for: str | None = None
    usable: bool | None = None
    nccl: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Support:
    """What one of Transformer Engine's support checks says of the current device."""

    passes: bool
    reason: str = ""


@dataclass(frozen=True)
class TransformerEngine:
    """NVIDIA's Transformer Engine.

    Attributes:
        version: None where it is not installed.
        error: what importing its torch modules raised, in one line; None where that went well or was
            not tried.
        built_for: the major version of CUDA that its core library is built for, or None if that is not
            known (a build from source).
        support: its own checks by name: ``fp8``, ``mxfp8``, ``fp8-blockwise``, ``nvfp4``; empty where
            they were not asked.
    """

    version: str | None = None
    error: str | None = None
    built_for: str | None = None
    support: Mapping[str, Support] = field(default_factory=dict)


@dataclass(frozen=True)
class HostFacts:
    """Everything that is known of a host.

    Attributes:
        python: version of Python.
        packages: by name of the distribution; those that are not installed have no version.
        cuda: devices, driver and what torch is built for.
        transformer_engine: NVIDIA's Transformer Engine.
        apex: whose package of the name ``apex`` this is: ``nvidia``, ``other``, or None.
        shared_memory_bytes: size of ``/dev/shm``, or None where there is none.
        open_files: how many files a process may have open, or None where that is not limited.
        environment: variables that CUDA and NCCL read.
        imported: whether the packages were imported, so that their errors are known.
    """

    python: str
    packages: Mapping[str, Package] = field(default_factory=dict)
    cuda: Cuda = Cuda()
    transformer_engine: TransformerEngine = TransformerEngine()
    apex: str | None = None
    shared_memory_bytes: int | None = None
    open_files: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    imported: bool = False

    def package(self, name: str) -> Package:
        """A distribution by name; one that is not installed has no version."""
        return self.packages.get(name, Package())

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``; compute capabilities are text such as ``9.0``."""
        facts = asdict(self)
        for device in facts["cuda"]["devices"]:
            device["compute_capability"] = in_words(device["compute_capability"])
        facts["cuda"]["devices"] = list(facts["cuda"]["devices"])
        return facts


def in_words(version: tuple[int, ...]) -> str:
    """``9.0`` of ``(9, 0)``."""
    return ".".join(map(str, version))
