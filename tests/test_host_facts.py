"""How the facts of a host are found out: without torch, without a traceback, and as they are."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mixle_megatron.capability import cuda_driver, cuda_probe, gather
from mixle_megatron.capability.cuda_driver import DriverAnswer, ask_driver, parse
from mixle_megatron.capability.facts import CudaDevice
from mixle_megatron.capability.gather import facts_of_this_host

H100 = CudaDevice("NVIDIA H100 80GB HBM3", (9, 0), 85_000_000_000)
A100 = CudaDevice("NVIDIA A100-SXM4-40GB", (8, 0), 42_000_000_000)


class MadeUpDriver:
    """What CUDA's driver API answers, in Python: calls write into the ctypes objects that they are given."""

    def __init__(self, *devices: CudaDevice, fails: dict[str, int] | None = None) -> None:
        self._devices = devices
        self._fails = fails or {}

    def cuInit(self, _flags: int) -> int:
        return self._fails.get("cuInit", 0)

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 12_040
        return self._fails.get("cuDriverGetVersion", 0)

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self._devices)
        return self._fails.get("cuDeviceGetCount", 0)

    def cuDeviceGet(self, handle: Any, number: int) -> int:
        handle._obj.value = number
        return 0

    def cuDeviceGetName(self, name: Any, length: int, handle: ctypes.c_int) -> int:
        name.value = self._devices[handle.value].name.encode()[: length - 1]
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: ctypes.c_int) -> int:
        value._obj.value = self._devices[handle.value].compute_capability[{75: 0, 76: 1}[attribute]]
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, handle: ctypes.c_int) -> int:
        size._obj.value = self._devices[handle.value].memory_bytes
        return 0

    def cuGetErrorName(self, _code: int, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_UNKNOWN"
        return 0


def answer(driver: MadeUpDriver) -> DriverAnswer:
    """What is understood of what the probe prints of that driver."""
    return parse(json.dumps(cuda_probe.read_devices(driver)), 0)


def test_devices_are_those_that_the_driver_shows() -> None:
    assert answer(MadeUpDriver(H100, A100)) == DriverAnswer((H100, A100), "12.4")
    assert answer(MadeUpDriver()) == DriverAnswer((), "12.4")


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        ({"cuInit": 100}, DriverAnswer((), "12.4")),
        ({"cuInit": 999}, DriverAnswer((), "12.4", "cuInit gives CUDA_ERROR_UNKNOWN (999)")),
        ({"cuDriverGetVersion": 1}, DriverAnswer((H100,), None)),
        ({"cuDeviceGetCount": 3}, DriverAnswer((), "12.4", "cuDeviceGetCount gives CUDA_ERROR_UNKNOWN (3)")),
    ],
)
def test_a_driver_that_fails_is_a_fact(fails: dict[str, int], expected: DriverAnswer) -> None:
    assert answer(MadeUpDriver(H100, fails=fails)) == expected


@pytest.mark.parametrize("output", ["", "Segmentation fault", "[]", '{"devices": 1}', '{"devices": [["A"]]}'])
def test_a_probe_that_dies_is_a_fact(output: str) -> None:
    assert parse(output, -11) == DriverAnswer(error="the process that asks it ended with exit code -11")


def test_the_driver_is_asked_by_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real call, with a library that loads and is no CUDA driver: what comes of it is a fact."""
    probe = tmp_path / "probe.py"
    probe.write_text("import os\nprint('{}')\nos._exit(7)\n", encoding="utf-8")
    monkeypatch.setattr(
        cuda_driver.cuda_probe, "LIBRARY", None
    )  # the process itself, which dlopen always has
    monkeypatch.setattr(cuda_driver.cuda_probe, "__file__", str(probe))
    cuda_driver._ask.cache_clear()
    try:
        assert ask_driver().error == "the process that asks it ended with exit code 7"
    finally:
        cuda_driver._ask.cache_clear()


def test_facts_are_those_of_this_process() -> None:
    facts = facts_of_this_host()
    assert facts.python == platform.python_version()
    assert facts.package("torch").version == torch.__version__
    assert facts.cuda.built_for == torch.version.cuda
    assert facts.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert not facts.imported
    import megatron.core
    import mixle

    assert facts.package("megatron-core").version == megatron.core.__version__.partition("+")[0]
    assert facts.package("mixle").version == mixle.__version__
    if not torch.cuda.is_available():
        assert facts.cuda.devices == ()


def test_the_environment_is_what_cuda_and_nccl_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    environment = facts_of_this_host().environment
    assert {"NCCL_DEBUG": "INFO", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}.items() <= environment.items()
    assert "SOME_TOKEN" not in environment


def run(source: str, *places: Path) -> str:
    """Run Python with these folders before everything that is installed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))}
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def package(folder: Path, name: str, files: dict[str, str], version: str | None = None) -> None:
    """A package of that name in a folder, installed where it has a version."""
    for path, text in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    if version is not None:
        metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")


STATIC = "from mixle_megatron.capability.gather import facts_of_this_host; facts = facts_of_this_host(); "


def test_finding_out_loads_no_package() -> None:
    heavy = "{'torch', 'megatron', 'mixle', 'numpy', 'einops'} & set(sys.modules)"
    assert run(f"import sys; {STATIC} print({heavy}, 'torch.distributed' in sys.modules)") == "set() False"


def test_a_megatron_from_a_source_tree_is_the_one_that_counts(tmp_path: Path) -> None:
    package_info = "import os\nMAJOR = 0\nMINOR = 15\nPATCH = 3\nPRE_RELEASE = ''\nraise RuntimeError\n"
    package(tmp_path, "megatron-core", {"megatron/core/package_info.py": package_info})
    assert run(f"{STATIC} print(facts.package('megatron-core').version)", tmp_path) == "0.15.3"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"apex/__init__.py": "", "apex/multi_tensor_apply/__init__.py": ""}, "nvidia"),
        ({"apex/__init__.py": "raise SystemExit('pyramid')", "apex/models/__init__.py": ""}, "other"),
        ({"apex/notes.txt": "a folder that is no package"}, "None"),
    ],
)
def test_nvidias_apex_is_told_from_the_one_on_pypi(
    tmp_path: Path, files: dict[str, str], expected: str
) -> None:
    package(tmp_path, "apex", files, "0.9.10.dev0")
    assert run(f"{STATIC} print(facts.apex)", tmp_path) == expected


DEEP = (
    "import json; from mixle_megatron.capability.imports import facts_after_importing; "
    "from mixle_megatron.capability.diagnosis import diagnose; "
    "said = diagnose(facts_after_importing()).as_dict(); import torch; "
    "started = [torch.distributed.is_initialized(), torch.cuda.is_initialized()]; "
    "print(json.dumps(said | {'started': started}))"
)


AS_THEY_SHIP = "try:\n    from . import pytorch\nexcept ImportError:\n    pass\n"


@pytest.mark.parametrize(
    ("whole", "torch_part", "error", "trains"),
    [
        ("import onnxscript_", "", "ModuleNotFoundError: No module named 'onnxscript_'", True),
        (AS_THEY_SHIP, "raise ImportError('undefined\\nsymbol')", "ImportError: undefined", False),
        ("raise OSError('libcudart.so.12: not found')", "", "OSError: libcudart.so.12: not found", False),
    ],
    ids=["a module is missing", "another torch", "a library is missing"],
)
def test_a_broken_transformer_engine_is_a_fact_with_its_message(
    tmp_path: Path, whole: str, torch_part: str, error: str, trains: bool
) -> None:
    """Megatron says what comes of it: it goes on without one that lacks a module, and fails with the others.

    Nothing is started while that is found out: no process group, no CUDA context.
    """
    files = {"transformer_engine/__init__.py": whole, "transformer_engine/pytorch/__init__.py": torch_part}
    package(tmp_path, "transformer-engine", files, "2.18.0")
    said = json.loads(run(DEEP, tmp_path))
    assert said["started"] == [False, False]
    engine = said["facts"]["transformer_engine"]
    assert (engine["version"], engine["error"]) == ("2.18.0", error)
    assert any(error in each["message"] for each in said["warnings"])
    assert said["trains"] == trains
    assert all(one["executes"] == trains for one in said["capabilities"] if one["kind"] == "axis")


def test_files_that_cannot_be_read_are_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gather, "_SHARED_MEMORY", tmp_path / "nowhere")
    assert facts_of_this_host().shared_memory_bytes is None
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\nGCC 12\n")
    monkeypatch.setattr(gather, "_DRIVER", driver)
    assert facts_of_this_host().cuda.driver == "550.54.15"
    opened = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    driver.write_text(opened)
    assert facts_of_this_host().cuda.driver == "570.86.15"
