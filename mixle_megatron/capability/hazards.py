"""What of a host runs, and is worth a look before a long run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mixle_megatron.capability.facts import HostFacts, in_words
from mixle_megatron.capability.lacks import cuda_lacks
from mixle_megatron.capability.requirements import INSTALL_TRANSFORMER_ENGINE, release

# NVIDIA's NCCL guide (troubleshooting, shared memory) starts containers with --shm-size=1g.
ENOUGH_SHARED_MEMORY = 1 << 30
FEW_OPEN_FILES = 1024
"""Open files under which even a few ranks of one host may run out: sockets, checkpoint files, data."""
FEW_OPEN_FILES_ON_CUDA = 4096
"""The same where NCCL opens several sockets to each peer."""

# From compute capability 10.0 on, kernels start in the order that overlap needs without this limit.
_NEEDS_ONE_CONNECTION_BELOW = (10, 0)

SLOWING = {
    "NCCL_P2P_DISABLE": "devices of one host then exchange through its memory",
    "NCCL_SHM_DISABLE": "processes of one host then exchange through the network",
    "NCCL_IB_DISABLE": "hosts then exchange over TCP instead of InfiniBand",
}
"""Switches of NCCL that turn a faster way off, where they are 1."""


@dataclass(frozen=True)
class Hazard:
    """One thing worth a look.

    Attributes:
        about: what it is about, in a word or two.
        message: what was found, and what comes of it.
        remedy: what to do.
    """

    about: str
    message: str
    remedy: str


def hazards(facts: HostFacts) -> tuple[Hazard, ...]:
    """Everything worth a look on this host."""
    found = list(_of_packages(facts))
    if facts.cuda.devices:
        found += [*_of_devices(facts), *_of_communication(facts)]
    return (*found, *_of_limits(facts))


def _of_packages(facts: HostFacts) -> Iterator[Hazard]:
    if facts.apex == "other":
        yield Hazard(
            "apex",
            f"apex {facts.package('apex').version} is not NVIDIA's: PyPI has a Pyramid toolkit of that name, "
            "which Megatron takes for it",
            "pip uninstall apex; NVIDIA's is built from its repository, and is not needed here",
        )
    engine, torch_cuda = facts.transformer_engine, facts.cuda.built_for
    if engine.error is not None:
        message = f"importing Transformer Engine {engine.version} fails: {engine.error}"
        yield Hazard(
            "Transformer Engine", message, f"pip uninstall it, or rebuild it: {INSTALL_TRANSFORMER_ENGINE}"
        )
    if engine.built_for and torch_cuda and release(engine.built_for)[:1] != release(torch_cuda)[:1]:
        yield Hazard(
            "Transformer Engine",
            f"its core library is built for CUDA {engine.built_for}, and torch for CUDA {torch_cuda}",
            f"install transformer-engine[core_cu{release(torch_cuda)[0]}] of the same version",
        )
    for name in ("flash-attn", "nvidia-resiliency-ext", "apex"):
        package = facts.package(name)
        if package.error is not None and not (name == "apex" and facts.apex == "other"):
            message = f"importing {name} {package.version} fails: {package.error}"
            yield Hazard(name, message, f"pip uninstall {name}, or install one that is built for this torch")


def _of_devices(facts: HostFacts) -> Iterator[Hazard]:
    kinds = {f"{each.name} ({in_words(each.compute_capability)})" for each in facts.cuda.devices}
    if len(kinds) > 1:
        yield Hazard(
            "devices",
            f"they differ: {', '.join(sorted(kinds))}. A precision runs where all of them have it, and the "
            "slowest sets the pace",
            "show a run devices of one kind: CUDA_VISIBLE_DEVICES",
        )
    if not cuda_lacks(facts) and facts.transformer_engine.version is None:
        yield Hazard(
            "Transformer Engine",
            "it is not installed: layers are torch's, without its fused kernels",
            INSTALL_TRANSFORMER_ENGINE,
        )


def _of_communication(facts: HostFacts) -> Iterator[Hazard]:
    for lack in cuda_lacks(facts):
        message = f"{lack.reason}: runs use the CPU and gloo, although there are CUDA devices"
        yield Hazard("gloo", message, lack.remedy)
    if not cuda_lacks(facts) and facts.imported and facts.cuda.nccl is None:
        message = "torch has no NCCL: ranks on CUDA devices cannot exchange anything"
        yield Hazard("NCCL", message, "a build of torch with NCCL")
    yield from _of_environment(facts)


def _of_environment(facts: HostFacts) -> Iterator[Hazard]:
    environment = facts.environment
    oldest = min(device.compute_capability for device in facts.cuda.devices)
    connections = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if oldest < _NEEDS_ONE_CONNECTION_BELOW and connections != "1":
        yield Hazard(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            f"it is {connections or 'not set'}: under tp and cp, communication may start too late to overlap "
            f"with computation on compute capability {in_words(oldest)}",
            "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        )
    for name, effect in SLOWING.items():
        if environment.get(name, "0") not in ("0", ""):
            yield Hazard(name, f"it is {environment[name]}: {effect}", f"unset {name}")
    if environment.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        message = f"it is {environment['NCCL_DEBUG']}: every rank writes what NCCL does"
        yield Hazard("NCCL_DEBUG", message, "export NCCL_DEBUG=WARN")


def _of_limits(facts: HostFacts) -> Iterator[Hazard]:
    shared = facts.shared_memory_bytes
    if len(facts.cuda.devices) > 1 and shared is not None and shared < ENOUGH_SHARED_MEMORY:
        yield Hazard(
            "/dev/shm",
            f"it holds {shared / (1 << 20):,.0f} MiB: NCCL may find no room for what devices of one host "
            "exchange",
            "start the container with --shm-size=1g or --ipc=host",
        )
    few = FEW_OPEN_FILES_ON_CUDA if facts.cuda.devices else FEW_OPEN_FILES
    if facts.open_files is not None and facts.open_files < few:
        message = (
            f"a process may have {facts.open_files:,} open; many ranks, or a large checkpoint, need more"
        )
        yield Hazard("open files", message, "ulimit -n 65536")
