"""What builds one pipeline stage of a model, whatever the model is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from mixle_megatron.documents import DocumentBounds
from mixle_megatron.errors import Fault
from mixle_megatron.models.placement import PlacedParameter
from mixle_megatron.pipeline_split import PipelineSplit
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.process_groups import MegatronGroups
from mixle_megatron.rules.dimensions import ModelDimensions
from mixle_megatron.translate import Host


@dataclass(frozen=True)
class SessionTerms:
    """What ``prepare`` was asked for, besides the model.

    Attributes:
        plan: the plan; it may itself be refused for other reasons, and need not be a grid.
        precision: what the forward and backward passes compute in.
        device: where the parameters will be.
        split: which layers each pipeline stage holds.
        documents: what stops at the end of a document; None where nothing does.
    """

    plan: PlanRecord
    precision: str
    device: torch.device
    split: PipelineSplit
    documents: DocumentBounds | None = None


@runtime_checkable
class ModelProvider(Protocol):
    """A model that does not exist yet: its sizes, Megatron's fields of it, and how to build a stage.

    ``prepare`` calls the methods in the order in which they stand here. What the first two find is
    refused before a process group exists; ``docs/providers.md`` says more, with an example.
    """

    def dimensions(self, tp: int) -> ModelDimensions:
        """The model's sizes, its vocabulary padded for ``tp``.

        Asked before anything is started, by the rules that judge the plan, and again by the session,
        which refuses token ids and sequences beyond them.
        """
        ...

    def faults(self, terms: SessionTerms) -> list[Fault]:
        """What is wrong with the model under these terms beyond its sizes; the same on every rank."""
        ...

    def transformer_fields(self) -> Mapping[str, Any]:
        """Fields of Megatron's TransformerConfig that describe the model itself.

        Those of the plan, the precision and the host are added to them and come first, the
        initialisation among them: ``init_method`` and its like do nothing. ``activation_func`` may
        be a name.
        """
        ...

    def build_stage(self, config: Any, groups: MegatronGroups, host: Host) -> torch.nn.Module:
        """This rank's stage, initialised, with its parameters on ``host.device``.

        Called once on each rank; under virtual pipeline stages once for each chunk of its layers,
        which ``groups`` then stands for.

        Args:
            config: Megatron's TransformerConfig; its ``params_dtype`` is that of the parameters.
            groups: the process groups, and whether this is the first or the last stage.
            host: the device, and whether Transformer Engine is there.

        Returns:
            A module with Megatron's ``set_input_tensor`` and ``sharded_state_dict``. Called with
            ``(input_ids, position_ids, attention_mask, labels=...)``, ids int64 ``[batch, sequence]``
            and the mask None, its last stage gives each token's loss ``[batch, sequence]``, and
            every other stage its hidden states ``[sequence, batch, hidden]``. Where the provider has an
            attribute ``takes_attention_mask`` that is true, the mask may be what to add to the scores,
            ``[batch, 1, sequence, sequence]`` in ``params_dtype``, and then every layer honours it.
        """
        ...

    def description(self) -> Mapping[str, Any]:
        """What a checkpoint's manifest says of the model beside its sizes; by default nothing.

        Plain values. With all keys of a config's ``model`` section, an export needs no config.
        """
        return {}

    def in_callers_terms(self, placed: PlacedParameter) -> PlacedParameter:
        """A parameter of the stage as the caller's module has it; by default the caller's is the stage.

        Asked for each parameter of the whole model when the session opens, for its layouts.
        """
        return placed

    def give_back(self, stage: Any) -> torch.nn.Module:
        """The module that the caller has after a session, the trained one: by default the stage.

        Called by ``close`` on every rank at once, so that it may be collective.
        """
        return stage.module

    def untouched(self, stage: Any) -> torch.nn.Module:
        """The module that the caller has after a session that failed, without any collective.

        Other ranks may be gone. It is the caller's own module as it was at ``prepare``; by default
        there is no other than the stage, as that session left it.
        """
        return stage.module
