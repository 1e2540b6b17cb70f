"""What only this host can tell about a config: whether it has the text, the precision and the device."""

from __future__ import annotations

from mixle_megatron.capability.gather import facts_of_this_host
from mixle_megatron.capability.refusals import host_faults
from mixle_megatron.config.schema import Config
from mixle_megatron.data import check_source
from mixle_megatron.errors import Fault


def here_faults(config: Config) -> list[Fault]:
    """Everything that is wrong with the data, the precision and the device on this host.

    The data is judged by names and sizes alone, the rest without loading torch.
    """
    faults = check_source(config.data, seed=config.run.seed, seq_length=config.model.seq_length)
    if not faults and config.evaluation.every and config.data.validation_fraction == 0:
        rule = f"holds no text out, but evaluation.every={config.evaluation.every} asks for some"
        faults.append(Fault("data.validation_fraction", 0.0, rule, "use 0.05, or evaluation.every=0"))
    hardware = host_faults(
        config.precision, config.host.device, facts_of_this_host(), device_field="host.device"
    )
    return faults + hardware
