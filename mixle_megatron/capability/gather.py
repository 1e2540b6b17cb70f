"""Finding out the facts of this host without loading torch: files, metadata, the CUDA driver."""

from __future__ import annotations

import ast
import importlib.util
import os
import platform
import re
import resource
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from mixle_megatron.capability.cuda_driver import DriverAnswer, ask_driver
from mixle_megatron.capability.facts import Cuda, HostFacts, Package, TransformerEngine

IMPORTED_AS = {
    "mixle": "mixle",
    "megatron-core": "megatron.core",
    "torch": "torch",
    "einops": "einops",
    "psutil": "psutil",
    "transformer-engine": "transformer_engine",
    "apex": "apex",
    "flash-attn": "flash_attn",
    "nvidia-resiliency-ext": "nvidia_resiliency_ext",
}
"""The distributions that are looked for, and the module of each."""

UNKNOWN = "unknown"
"""The version of a package that can be imported and does not say which it is."""

_READ_BY_CUDA = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_DRIVER = Path("/proc/driver/nvidia/version")
_SHARED_MEMORY = Path("/dev/shm")


def facts_of_this_host(driver: Callable[[], DriverAnswer] = ask_driver) -> HostFacts:
    """Everything that can be known without importing a package or making a CUDA context.

    Args:
        driver: tells the CUDA devices; by default the driver does.
    """
    packages = {name: Package(_version(name)) for name in IMPORTED_AS}
    return HostFacts(
        python=platform.python_version(),
        packages=packages,
        cuda=_cuda(driver()),
        transformer_engine=TransformerEngine(
            packages["transformer-engine"].version, built_for=_transformer_engine_cuda()
        ),
        apex=_apex(),
        shared_memory_bytes=_shared_memory(),
        open_files=_open_files(),
        environment=_environment(os.environ),
    )


def _version(name: str) -> str | None:
    """The version of what would be imported, which a source tree may put before what is installed."""
    folder = _folder(IMPORTED_AS[name])
    if folder is None:
        return None
    if name == "megatron-core":
        return _assigned(folder / "package_info.py", "MAJOR", "MINOR", "PATCH") or _installed(name) or UNKNOWN
    if name == "torch":
        return _assigned(folder / "version.py", "__version__") or _installed(name) or UNKNOWN
    return _installed(name) or UNKNOWN


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _folder(module: str) -> Path | None:
    """Where a module would be imported from; nothing of it is run.

    ``megatron`` is a namespace: its folders are searched for ``core``.
    """
    top, _, rest = module.partition(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.submodule_search_locations is None:
        return None
    if not rest and spec.origin is None:
        return None  # any folder of that name
    found = (
        Path(place, *rest.split(".")) if rest else Path(place) for place in spec.submodule_search_locations
    )
    return next((folder for folder in found if folder.is_dir()), None)


def _assigned(source: Path, *names: str) -> str | None:
    """What a Python file assigns to these names, joined by dots; None where it assigns one of them not.

    The file is parsed and not run.
    """
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    values = {}
    for statement in tree.body:
        targets = (
            statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        )
        value = getattr(statement, "value", None)
        if isinstance(value, ast.Constant):
            values |= {target.id: value.value for target in targets if isinstance(target, ast.Name)}
    if any(values.get(name) is None for name in names):
        return None
    return ".".join(str(values[name]) for name in names)


def _cuda(answer: DriverAnswer) -> Cuda:
    folder = _folder("torch")
    built_for = None if folder is None else _assigned(folder / "version.py", "cuda")
    return Cuda(
        devices=answer.devices,
        driver=_kernel_driver(),
        supported_by_driver=answer.supports,
        built_for=built_for,
        nccl=_nccl(built_for),
        error=answer.error,
    )


def _kernel_driver() -> str | None:
    try:
        text = _DRIVER.read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"Kernel Module\b.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match[1] if match else None


def _nccl(built_for: str | None) -> str | None:
    """The version of the NCCL that comes with torch's wheels."""
    return _installed(f"nvidia-nccl-cu{built_for.partition('.')[0]}") if built_for else None


def _transformer_engine_cuda() -> str | None:
    """The CUDA that Transformer Engine's core library is built for: its wheels have it in their name."""
    return next((major for major in ("12", "13") if _installed(f"transformer-engine-cu{major}")), None)


def _apex() -> str | None:
    """Whose apex this is: NVIDIA's has the kernels for lists of tensors, the Pyramid toolkit has not."""
    folder = _folder("apex")
    if folder is None:
        return None
    return "nvidia" if (folder / "multi_tensor_apply").is_dir() else "other"


def _shared_memory() -> int | None:
    try:
        status = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return status.f_frsize * status.f_blocks


def _open_files() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(variables.items())
        if name in _READ_BY_CUDA or name.startswith(("NCCL_", "TORCH_NCCL_"))
    }
