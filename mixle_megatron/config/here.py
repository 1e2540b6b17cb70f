"""What only this host can tell about a config: whether the text that it names is there, and enough."""

from __future__ import annotations

from mixle_megatron.config.schema import Config
from mixle_megatron.data import check_source
from mixle_megatron.errors import Fault


def here_faults(config: Config) -> list[Fault]:
    """Everything that is wrong with the data on this host, judged by names and sizes alone."""
    faults = check_source(config.data, seed=config.run.seed, seq_length=config.model.seq_length)
    if not faults and config.evaluation.every and config.data.validation_fraction == 0:
        rule = f"holds no text out, but evaluation.every={config.evaluation.every} asks for some"
        faults.append(Fault("data.validation_fraction", 0.0, rule, "use 0.05, or evaluation.every=0"))
    return faults
