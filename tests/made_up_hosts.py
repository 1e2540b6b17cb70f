"""Hosts that are not here, as facts: what is decided about a host is a function of these alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mixle_megatron.capability.facts import (
    Cuda,
    CudaDevice,
    HostFacts,
    Package,
    Support,
    TransformerEngine,
)

GIB = 1 << 30
NEEDED = {
    "mixle": Package("0.8.2"),
    "megatron-core": Package("0.19.2"),
    "torch": Package("2.14.1"),
    "einops": Package("0.8.2"),
    "psutil": Package("7.2.2"),
}

LAPTOP = HostFacts(
    python="3.12.1",
    packages=NEEDED,
    cuda=Cuda(built_for="13.0", usable=False, nccl="2.30.7"),
    shared_memory_bytes=8 * GIB,
    open_files=4096,
    imported=True,
)
"""Everything that training needs, and no GPU."""

V100 = CudaDevice("Tesla V100-SXM2-32GB", (7, 0), 32 * GIB)
A100 = CudaDevice("NVIDIA A100-SXM4-80GB", (8, 0), 80 * GIB)
L40S = CudaDevice("NVIDIA L40S", (8, 9), 48 * GIB)
H100 = CudaDevice("NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB)
H200 = CudaDevice("NVIDIA H200", (9, 0), 141 * GIB)
B200 = CudaDevice("NVIDIA B200", (10, 0), 180 * GIB)
B300 = CudaDevice("NVIDIA B300", (10, 3), 288 * GIB)
WORKSTATION = CudaDevice("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 96 * GIB)

CHECKS = ("fp8", "mxfp8", "fp8-blockwise", "nvfp4")
# What Transformer Engine's own checks answer on each of them, read in its source (2.18, quantization.py).
ENGINE_SAYS = {
    V100: (False, False, False, False),
    A100: (False, False, False, False),
    L40S: (True, False, False, False),
    H100: (True, False, True, False),
    H200: (True, False, True, False),
    B200: (True, True, True, True),
    B300: (True, True, True, True),
    WORKSTATION: (True, False, True, True),
}


def host(*devices: CudaDevice, built_for: str = "13.0", **changes: Any) -> HostFacts:
    """A well kept host with these devices, Transformer Engine 2.18 and a torch for that CUDA."""
    facts = replace(
        LAPTOP,
        packages=NEEDED | {"transformer-engine": Package("2.18.0")},
        cuda=Cuda(devices, "580.65.06", "13.0", built_for=built_for, usable=True, nccl="2.30.7"),
        transformer_engine=engine_on(devices[0], built_for),
        shared_memory_bytes=64 * GIB,
        open_files=1 << 20,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )
    return replace(facts, **changes)


def engine_on(device: CudaDevice, cuda: str = "13.0") -> TransformerEngine:
    """Transformer Engine as it answers where this device is the current one."""
    says = zip(CHECKS, ENGINE_SAYS[device], strict=True)
    support = {
        name: Support(passes, "" if passes else f"{name} is not for this device") for name, passes in says
    }
    return TransformerEngine("2.18.0", built_for=cuda.partition(".")[0], support=support)


def with_package(facts: HostFacts, name: str, package: Package | None) -> HostFacts:
    """The same host with that package, or without it."""
    others = {key: value for key, value in facts.packages.items() if key != name}
    return replace(facts, packages=others | ({} if package is None else {name: package}))


BROKEN = "ModuleNotFoundError: No module named 'onnxscript'"
UNDEFINED = "ImportError: transformer_engine_torch.so: undefined symbol: _ZN3c104cuda"

HOSTS: dict[str, HostFacts] = {
    "laptop": LAPTOP,
    "V100": host(V100, built_for="12.6"),
    "V100 with CUDA 13": host(V100),
    "A100": host(*[A100] * 8),
    "L40S": host(L40S),
    "H100": host(*[H100] * 8),
    "H100 with CUDA 12.4": host(H100, built_for="12.4"),
    "H200": host(H200),
    "B200": host(*[B200] * 8),
    "B200 with CUDA 12.4": host(B200, built_for="12.4"),
    "B300": host(B300),
    "workstation": host(WORKSTATION),
    "two kinds": host(B200, H100),
    "two kinds of Blackwell": host(B200, WORKSTATION),
    "Megatron too old": with_package(host(H100), "megatron-core", Package("0.15.3")),
    "Megatron missing": with_package(LAPTOP, "megatron-core", None),
    "no Transformer Engine": with_package(
        host(H100, transformer_engine=TransformerEngine()), "transformer-engine", None
    ),
    "Transformer Engine too old": host(B200, transformer_engine=TransformerEngine("2.1.0")),
    "Transformer Engine broken": host(H100, transformer_engine=TransformerEngine("2.18.0", BROKEN)),
    # Megatron goes on without an engine that lacks a module, and fails with most that are broken otherwise.
    "Transformer Engine breaks Megatron": with_package(
        host(H100, transformer_engine=TransformerEngine("2.18.0", UNDEFINED)),
        "megatron-core",
        Package("0.19.2", UNDEFINED),
    ),
    "Transformer Engine for another CUDA": host(
        H100, transformer_engine=TransformerEngine("2.18.0", BROKEN, built_for="12")
    ),
    "wrong apex": with_package(replace(LAPTOP, apex="other"), "apex", Package("0.9.10.dev0")),
    "torch without CUDA": host(
        H100,
        transformer_engine=TransformerEngine(),
        cuda=Cuda((H100,), "550.54.15", "12.4", usable=False),
    ),
    "old driver": host(H100, cuda=Cuda((H100,), "550.54.15", "12.4", built_for="13.0", usable=False)),
}
