"""The CUDA devices that this process would see, as the driver tells them, without a CUDA context.

The driver is asked by a process of its own (:mod:`cuda_probe`): one that has asked it cannot fork others
that use CUDA, and a driver that crashes or hangs takes only that process with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache

from mixle_megatron.capability import cuda_probe
from mixle_megatron.capability.facts import CudaDevice

PATIENCE = 60.0
"""Seconds after which a driver that has not answered is given up."""


@dataclass(frozen=True)
class DriverAnswer:
    """What the driver says.

    Attributes:
        devices: those that CUDA would show this process, in its order.
        supports: the newest CUDA that the driver runs, or None.
        error: what went wrong, in one line, or None.
    """

    devices: tuple[CudaDevice, ...] = ()
    supports: str | None = None
    error: str | None = None


def ask_driver() -> DriverAnswer:
    """What the driver says of this host's devices; nothing where there is no driver.

    It is asked once for each value of ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``.
    """
    return _ask(*map(os.environ.get, ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")))


@lru_cache
def _ask(_visible: str | None, _order: str | None) -> DriverAnswer:
    try:
        ctypes.CDLL(cuda_probe.LIBRARY)
    except OSError:
        return DriverAnswer()
    program = [sys.executable, "-I", "-S", str(cuda_probe.__file__)]
    try:
        done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return DriverAnswer(error=f"no answer in {PATIENCE:.0f} seconds")
    except OSError as error:
        return DriverAnswer(error=f"the process that asks it cannot be started: {error}")
    return parse(done.stdout, done.returncode)


def parse(output: str, code: int) -> DriverAnswer:
    """The answer in what the asking process printed before it ended with exit code ``code``."""
    try:
        said = json.loads(output)
        devices = [CudaDevice(name, (major, minor), size) for name, major, minor, size in said["devices"]]
        return DriverAnswer(tuple(devices), said["supports"], said["error"])
    except (ValueError, KeyError, TypeError):
        return DriverAnswer(error=f"the process that asks it ended with exit code {code}")
