"""What builds one pipeline stage of a model, whatever the model is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from mixle_megatron.errors import Fault
from mixle_megatron.models.placement import PlacedParameter
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.process_groups import MegatronGroups
from mixle_megatron.rules.dimensions import ModelDimensions
from mixle_megatron.translate import Host


@runtime_checkable
class ModelProvider(Protocol):
    """A model that does not exist yet: its sizes, Megatron's fields of it, and how to build a stage.

    ``prepare`` checks ``dimensions`` and ``faults`` against the plan, makes a TransformerConfig of
    ``transformer_fields`` and the plan, starts the process groups, and only then calls
    ``build_stage``, once on each rank.
    """

    def dimensions(self, tp: int) -> ModelDimensions:
        """The model's sizes, its vocabulary padded for ``tp``."""
        ...

    def faults(self, plan: PlanRecord) -> list[Fault]:
        """What is wrong with the model under ``plan`` beyond its sizes."""
        ...

    def transformer_fields(self) -> Mapping[str, Any]:
        """Fields of Megatron's TransformerConfig that describe the model itself."""
        ...

    def build_stage(self, config: Any, groups: MegatronGroups, host: Host) -> torch.nn.Module:
        """This rank's stage, initialised, with its parameters on ``host.device``.

        The module has Megatron's ``set_input_tensor`` and ``sharded_state_dict``; called with
        ``(input_ids, position_ids, attention_mask, labels=...)`` its last stage gives the loss of
        each token, ``[batch, sequence]``, and every other stage its hidden states.
        """
        ...

    def in_callers_terms(self, placed: PlacedParameter) -> PlacedParameter:
        """A parameter of the stage as the caller's module has it; the same where that is the stage."""
        ...

    def give_back(self, stage: Any) -> torch.nn.Module:
        """The module that the caller has after a session: the trained one. Collective."""
        ...

    def untouched(self, stage: Any) -> torch.nn.Module:
        """The module that the caller has after a session that failed, without any collective."""
        ...
