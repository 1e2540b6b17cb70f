"""What a host lacks for CUDA, and for a precision on it, each with what would make it so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mixle_megatron.capability.facts import CudaDevice, HostFacts, in_words
from mixle_megatron.capability.requirements import INSTALL_TRANSFORMER_ENGINE, release
from mixle_megatron.precision import ComputeCapability, Precision, recipe

# The CUDA that first compiles for an architecture, and the one that no longer does (release notes of
# CUDA 12.8 and 13.0): what decides whether a build of torch can have kernels for a device.
_BLACKWELL, _CUDA_OF_BLACKWELL = (10, 0), (12, 8)
_TURING, _CUDA_WITHOUT_OLDER = (7, 5), (13,)


@dataclass(frozen=True)
class Lack:
    """One thing that is missing.

    Attributes:
        reason: what is missing, with its numbers.
        remedy: what would make it so.
    """

    reason: str
    remedy: str


def cuda_lacks(facts: HostFacts) -> list[Lack]:
    """Why no rank of this host can run on CUDA; empty where they can."""
    cuda = facts.cuda
    if not cuda.devices:
        reason = f"the CUDA driver does not answer: {cuda.error}" if cuda.error else "there is no CUDA device"
        return [Lack(reason, "repair the driver" if cuda.error else "a host with a CUDA device")]
    torch = facts.package("torch").version
    if cuda.built_for is None:
        wanted = f"a build of torch for CUDA {cuda.supported_by_driver or '12'}"
        return [Lack(f"torch {torch} is built without CUDA", wanted)]
    built_for = release(cuda.built_for)
    newest = release(cuda.supported_by_driver or cuda.built_for)
    if newest[:1] < built_for[:1]:
        reason = f"torch is built for CUDA {cuda.built_for}, and the driver runs {in_words(newest)} at most"
        return [Lack(reason, f"a newer driver, or a build of torch for CUDA {newest[0]}")]
    lacks = [lack for device in _kinds(facts) for lack in _architecture_lacks(device, built_for)]
    if not lacks and cuda.usable is False:
        return [Lack("torch finds no CUDA device that it can use", "make torch.cuda.is_available() true")]
    return lacks


def precision_lacks(name: str, device: str, facts: HostFacts) -> list[Lack]:
    """What this host lacks for a precision.

    Args:
        name: of a precision that exists.
        device: ``cpu`` or ``cuda``.
        facts: those of the host.
    """
    precision = recipe(name, [device.compute_capability for device in facts.cuda.devices])
    if device == "cpu":
        return [_no_cpu(precision)] if precision.quantised else []
    lacks = cuda_lacks(facts)
    if not facts.cuda.devices and not facts.cuda.error:
        lacks = [Lack(f"there is no CUDA device, and it needs one of {_range(precision)}", _gpu(precision))]
    return [
        *lacks,
        *_hardware(precision, facts),
        *_cuda_version(precision, facts),
        *_engine(precision, facts),
    ]


def _no_cpu(precision: Precision) -> Lack:
    return Lack("it runs on CUDA devices alone", _gpu(precision))


def _gpu(precision: Precision) -> str:
    return f"a CUDA device of {_range(precision)}"


def _range(precision: Precision) -> str:
    """The devices that have a precision, in words."""
    if precision.below is None:
        return f"compute capability {in_words(precision.compute_capability)} or above"
    return f"compute capability {_generation(precision)}"


def _generation(precision: Precision) -> str:
    """``10.x`` of a precision that one generation has, and the next one not."""
    major, _ = precision.compute_capability
    if precision.below == (major + 1, 0):
        return f"{major}.x"
    return f"{in_words(precision.compute_capability)} to below {in_words(precision.below or ())}"


def _kinds(facts: HostFacts) -> list[CudaDevice]:
    """One device of each kind, in order."""
    return list({(device.name, device.compute_capability): device for device in facts.cuda.devices}.values())


def _architecture_lacks(device: CudaDevice, built_for: tuple[int, ...]) -> Iterator[Lack]:
    """Whether torch's build can have kernels for the device."""
    capability, build = device.compute_capability, f"torch is built for CUDA {in_words(built_for)}"
    having = f"compute capability {in_words(capability)} ({device.name})"
    if capability < _TURING and built_for >= _CUDA_WITHOUT_OLDER:
        yield Lack(f"{build}, which has left {having} out", "a build of torch for CUDA 12")
    if capability >= _BLACKWELL and built_for < _CUDA_OF_BLACKWELL:
        wanted = in_words(_CUDA_OF_BLACKWELL)
        yield Lack(f"{build}, which does not know {having}", f"a build of torch for CUDA {wanted} or newer")


def _hardware(precision: Precision, facts: HostFacts) -> Iterator[Lack]:
    for device in _kinds(facts):
        capability: ComputeCapability = device.compute_capability
        if precision.fits(capability):
            continue
        least, what = in_words(precision.compute_capability), f"compute capability {in_words(capability)}"
        if capability < precision.compute_capability:
            reason = f"{what} ({device.name}) is below {least}"
        else:
            reason = f"{what} ({device.name}) is not {_generation(precision)}"
        yield Lack(reason, _gpu(precision))


def _cuda_version(precision: Precision, facts: HostFacts) -> Iterator[Lack]:
    built_for = facts.cuda.built_for
    if precision.cuda and built_for and facts.cuda.devices and release(built_for) < precision.cuda:
        needed = in_words(precision.cuda)
        reason = f"torch is built for CUDA {built_for}, and it needs {needed}"
        yield Lack(reason, f"a build of torch for CUDA {needed} or newer")


def _engine(precision: Precision, facts: HostFacts) -> Iterator[Lack]:
    """What is missing of Transformer Engine; its own check is asked last, where all else is there."""
    if precision.transformer_engine is None:
        return
    engine = facts.transformer_engine
    if engine.version is None:
        yield Lack("Transformer Engine is not installed", INSTALL_TRANSFORMER_ENGINE)
        return
    if release(engine.version) < release(precision.transformer_engine):
        reason = f"Transformer Engine {engine.version} is older than {precision.transformer_engine}"
        yield Lack(reason, "pip install --no-build-isolation --upgrade 'mixle-megatron[te]'")
    if engine.error is not None:
        reason = f"importing Transformer Engine {engine.version} fails: {engine.error}"
        remedy = "install the one that is built for this torch: "
        yield Lack(reason, f"{remedy}{INSTALL_TRANSFORMER_ENGINE} --force-reinstall --no-deps")
        return
    check = engine.support.get(precision.support_check or "")
    if check is not None and not check.passes and all(map(precision.fits, _capabilities(facts))):
        yield Lack(f"Transformer Engine says: {check.reason}", "what Transformer Engine asks for")


def _capabilities(facts: HostFacts) -> list[ComputeCapability]:
    return [device.compute_capability for device in facts.cuda.devices]
