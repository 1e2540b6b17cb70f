"""A parallel plan as plain numbers, for code that must not import torch.

mixle's own ``ParallelPlan`` lives in a package whose import loads torch, which takes seconds. What
judges or explains a plan uses this record instead; it has the same fields and derived sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mixle.utils.parallel.training_contracts import ParallelPlan


@dataclass(frozen=True)
class PlanRecord:
    """The fields of mixle's ``ParallelPlan``, unchecked: :mod:`mixle_megatron.rules` judges them.

    Attributes:
        dp_replicate: data-parallel replicas of the sharded optimizer (HSDP's outer dimension).
        dp_shard: ranks that one copy of the optimizer state is sharded over.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        cp: context-parallel ranks.
        ep: expert-parallel ranks, cut from the data-parallel ones.
        etp: tensor-parallel ranks of each expert.
        microbatches: microbatches of one schedule call.
        gradient_accumulation_steps: schedule calls of one optimizer update.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    microbatches: int = 1
    gradient_accumulation_steps: int = 1

    @property
    def data_parallel_size(self) -> int:
        """Ranks that each read their own part of the batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Ranks of the plan; ep and etp cut their groups from these and add none."""
        return self.data_parallel_size * self.tp * self.pp * self.cp

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Size of every axis by its name, in mixle's order."""
        return {name: getattr(self, name) for name in AXES}

    @property
    def active_axes(self) -> tuple[str, ...]:
        """Names of the axes that are larger than 1."""
        return tuple(name for name, size in self.axis_sizes.items() if size > 1)

    def as_dict(self) -> dict[str, int]:
        """The same mapping as ``ParallelPlan.as_dict``."""
        payload = {field.name: getattr(self, field.name) for field in fields(self)}
        return payload | {"world_size": self.world_size, "data_parallel_size": self.data_parallel_size}

    @classmethod
    def from_plan(cls, plan: Any) -> PlanRecord:
        """Copy any object that has the fields, such as a ``ParallelPlan``."""
        return cls(**{field.name: getattr(plan, field.name) for field in fields(cls)})

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> PlanRecord:
        """Read the fields from a mapping, and leave out what is not one (``world_size``)."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: values[name] for name in names if name in values})

    def to_parallel_plan(self) -> ParallelPlan:
        """The plan as mixle's own type. This imports mixle, and with it torch."""
        from mixle.utils.parallel.training_contracts import ParallelPlan

        return ParallelPlan(**{field.name: getattr(self, field.name) for field in fields(self)})


AXES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "etp")
"""The axes of a plan in mixle's order."""
