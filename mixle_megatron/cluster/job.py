"""What a job file runs, whatever the scheduler: a checked config on a number of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from mixle_megatron.cluster.fitting import network_warnings, world_faults
from mixle_megatron.config.check import located
from mixle_megatron.config.elastic import replanned
from mixle_megatron.config.load import LoadedConfig, check_config, warnings_of
from mixle_megatron.config.schema import Config, effective_plan
from mixle_megatron.errors import Fault
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules import verdict

REFUSED, STOPPED_EARLY = 2, 3
"""What ``pretrain`` ends with when it refuses its input, and when it was stopped and wrote a checkpoint."""


@dataclass(frozen=True)
class Job:
    """A run, laid out on nodes.

    Attributes:
        config: the checked config.
        config_text: the config as YAML, for the job to read. It holds what the file and the overrides
            state, with interpolations resolved; defaults are left to the version that runs it.
        nodes: how many there are.
        ranks_per_node: ranks of each node, one a GPU.
    """

    config: Config
    config_text: str
    nodes: int
    ranks_per_node: int

    @property
    def plan(self) -> PlanRecord:
        """The plan, whose ranks are those of all nodes."""
        return effective_plan(self.config)

    @property
    def uses_gpus(self) -> bool:
        """Whether ranks are given GPUs: all but those of a config that says ``host.device: cpu``."""
        return self.config.host.device != "cpu"

    @property
    def wants_one_connection(self) -> bool:
        """Whether ranks exchange something in the middle of a layer, which one CUDA connection orders."""
        return self.uses_gpus and (self.plan.tp > 1 or self.plan.cp > 1)

    @property
    def title(self) -> str:
        """The run and its ranks in one line."""
        plan = self.plan
        axes = " · ".join(f"{axis}={plan.axis_sizes[axis]}" for axis in plan.active_axes) or "one rank"
        unit = "GPUs" if self.uses_gpus else "ranks"
        return f"{self.config.run.name} ({axes}) on {self.nodes} node(s) of {self.ranks_per_node} {unit}"

    @property
    def outside_paths(self) -> tuple[str, ...]:
        """What the run reads or writes beside its working folder: the absolute paths that it states."""
        run = self.config.run
        beginning = [] if run.resume is None else [str(run.resume.path)]
        data = self.config.model_dump(mode="json", include={"data": ..., "evaluation": {"sets"}})
        paths = (run.dir, *beginning, *_texts(data))
        return tuple(path for path in paths if path.startswith("/"))


def make_job(loaded: LoadedConfig, *, nodes: int, gpus_per_node: int) -> Job:
    """Lay a config out on nodes.

    Raises:
        Refused: the config is at fault, or its plan has not ``nodes`` · ``gpus_per_node`` ranks, and cannot
            have them by being elastic.
    """
    loaded = replanned(loaded, nodes * gpus_per_node)
    faults = check_config(loaded)
    verdict(faults or [*world_faults(loaded, nodes, gpus_per_node), *_text_faults(loaded.config)])
    return Job(loaded.config, stated_yaml(loaded.config), nodes, gpus_per_node)


def job_warnings(loaded: LoadedConfig, nvlink_domain: int) -> list[Fault]:
    """What a job is better changed in before it is submitted.

    Args:
        loaded: its config, which the rules have passed.
        nvlink_domain: GPUs that NVLink connects, such as those of a node.
    """
    warnings = warnings_of(loaded) + network_warnings(loaded, nvlink_domain)
    if loaded.config.checkpoint.every == 0:
        rule = (
            "writes no checkpoint, so that a job that is stopped has lost its run, and is not started again"
        )
        warnings += located([Fault("checkpoint.every", 0, rule, "use 1 or more")], loaded.sources)
    return warnings


def stated_yaml(config: Config) -> str:
    """What a config states, without the defaults of this version."""
    values = config.model_dump(mode="json", exclude_unset=True)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1_000_000)


def _texts(value: Any) -> Iterator[str]:
    """Every text among plain values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _text_faults(config: Config) -> list[Fault]:
    """Values that would be read as interpolations where the config is read again."""
    if "${" not in stated_yaml(config):
        return []
    return [Fault("config", None, "holds ${ in a value that is no interpolation", "rename what it names")]
