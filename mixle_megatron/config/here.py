"""What only this host can tell about a config: whether it has the text, the precision and the device."""

from __future__ import annotations

from mixle_megatron.capability.gather import facts_of_this_host
from mixle_megatron.capability.refusals import host_faults
from mixle_megatron.config.schema import Config
from mixle_megatron.data import DataRequest, check_data
from mixle_megatron.errors import Fault


def here_faults(config: Config) -> list[Fault]:
    """Everything that is wrong with the data, the precision and the device on this host.

    The data is judged by names and sizes alone, the rest without loading torch.
    """
    faults = check_data(data_request(config))
    hardware = host_faults(
        config.precision, config.host.device, facts_of_this_host(), device_field="host.device"
    )
    return faults + hardware


def data_request(config: Config) -> DataRequest:
    """What of a config decides its data."""
    return DataRequest(
        section=config.data,
        sets=config.evaluation.sets,
        evaluates=config.evaluation.every > 0,
        sequence_length=config.model.seq_length,
        vocab_size=config.model.vocab_size,
        seed=config.run.seed,
    )
