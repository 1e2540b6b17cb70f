"""Finding out what only importing the packages can tell: whether that goes well, and what they say.

This loads torch, Megatron and whatever of the optional packages is installed. No process group is made;
Transformer Engine's support checks, which need a CUDA context, are asked only where there is a device.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from mixle_megatron.capability.facts import HostFacts, Package, Support, TransformerEngine
from mixle_megatron.capability.gather import facts_of_this_host

_MODULES = {
    "torch": ("torch", "torch.distributed"),
    "mixle": ("mixle.utils.parallel",),
    "einops": ("einops",),
    "psutil": ("psutil",),
    "megatron-core": (
        "megatron.core.parallel_state",
        "megatron.core.distributed",
        "megatron.core.optimizer",
        "megatron.core.models.gpt.gpt_model",
        "megatron.core.extensions.transformer_engine",
    ),
    "flash-attn": ("flash_attn",),
    "nvidia-resiliency-ext": ("nvidia_resiliency_ext",),
    "apex": ("apex",),
}
"""Of each distribution the modules that using it would import, torch first, on which all others stand."""

_CHECKS = {
    "fp8": "is_fp8_available",
    "mxfp8": "is_mxfp8_available",
    "fp8-blockwise": "is_fp8_block_scaling_available",
    "nvfp4": "is_nvfp4_available",
}
"""Transformer Engine's support checks by the names that they have here; older versions have not all."""


def facts_after_importing() -> HostFacts:
    """Everything that is known of this host, the outcome of every import included."""
    facts = facts_of_this_host()
    with _silence():
        packages = {
            # the Pyramid toolkit of that name is nothing that Megatron would use
            name: package if name == "apex" and facts.apex == "other" else _imported(name, package)
            for name, package in facts.packages.items()
        }
        engine = _transformer_engine(facts.transformer_engine, packages)
        cuda = facts.cuda if _fails("torch", packages) else replace(facts.cuda, **_torch_cuda())
    packages["transformer-engine"] = replace(packages["transformer-engine"], error=engine.error)
    return replace(facts, packages=packages, cuda=cuda, transformer_engine=engine, imported=True)


def _imported(name: str, package: Package) -> Package:
    if package.version is None or name not in _MODULES:
        return package
    return replace(
        package, error=_error_of(lambda: [importlib.import_module(each) for each in _MODULES[name]])
    )


def _error_of(attempt: Callable[[], Any]) -> str | None:
    """What an attempt raises, in one line. Whatever an import may raise is a fact of the host."""
    try:
        attempt()
    except (Exception, SystemExit) as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    return None


def _fails(name: str, packages: dict[str, Package]) -> bool:
    return packages[name].version is None or packages[name].error is not None


def _transformer_engine(engine: TransformerEngine, packages: dict[str, Package]) -> TransformerEngine:
    """Transformer Engine after its torch modules were imported and its checks asked."""
    if engine.version is None or _fails("torch", packages):
        return engine
    error = _error_of(lambda: importlib.import_module("transformer_engine.pytorch"))
    return replace(engine, error=error, support={} if error else _support())


def _support() -> dict[str, Support]:
    import torch

    if not torch.cuda.is_available():
        return {}
    manager = importlib.import_module("transformer_engine.pytorch.fp8").FP8GlobalStateManager
    return {
        name: _asked(getattr(manager, check)) for name, check in _CHECKS.items() if hasattr(manager, check)
    }


def _asked(check: Callable[[], tuple[bool, str]]) -> Support:
    """What a check answers; one that raises does not pass."""
    answers: list[tuple[bool, str]] = []
    error = _error_of(lambda: answers.append(check()))
    return Support(False, error) if error else Support(bool(answers[0][0]), answers[0][1])


def _torch_cuda() -> dict[str, Any]:
    """What torch says of CUDA and NCCL."""
    import torch
    import torch.distributed as dist

    nccl = None
    if dist.is_available() and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"built_for": torch.version.cuda, "usable": torch.cuda.is_available(), "nccl": nccl}


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep what packages print and warn of while they are imported out of the answer."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        with contextlib.redirect_stderr(io.StringIO()):
            yield
