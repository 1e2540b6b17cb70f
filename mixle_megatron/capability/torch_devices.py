"""The facts of a host on which torch is loaded and about to be used."""

from __future__ import annotations

import torch

from mixle_megatron.capability.cuda_driver import DriverAnswer
from mixle_megatron.capability.facts import CudaDevice, HostFacts
from mixle_megatron.capability.gather import facts_of_this_host


def facts_beside_torch(device: torch.device) -> HostFacts:
    """The facts of this host, for a rank that is to run on ``device``.

    Where torch has a CUDA device and the driver could not be asked, its devices are torch's. All devices
    of a host are among them, so that its ranks come to one verdict.
    """
    facts = facts_of_this_host()
    if device.type == "cuda" and not facts.cuda.devices:
        return facts_of_this_host(_devices)
    return facts


def _devices() -> DriverAnswer:
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    devices = (CudaDevice(each.name, (each.major, each.minor), each.total_memory) for each in found)
    return DriverAnswer(tuple(devices))
