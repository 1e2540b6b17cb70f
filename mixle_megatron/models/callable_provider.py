"""A function that builds one stage, as a model that any plan can build."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from mixle_megatron.errors import Fault
from mixle_megatron.models.built_module import sizes_of
from mixle_megatron.models.initialisation import Initialisation, initialise
from mixle_megatron.models.provider import ModelProvider, SessionTerms
from mixle_megatron.process_groups import MegatronGroups
from mixle_megatron.rules.dimensions import ModelDimensions
from mixle_megatron.translate import Host, activation_function

StageFunction = Callable[[TransformerConfig, MegatronGroups, Host], torch.nn.Module]
"""From Megatron's config, this rank's process groups and its host to its stage of the model."""


@dataclass(frozen=True)
class CallableProvider(ModelProvider):
    """A ModelProvider made of one function, and of what ``prepare`` judges before it calls it.

    Attributes:
        build: gives a GPTModel-style stage: see :meth:`ModelProvider.build_stage`, of which it is
            the body.
        fields: the model's fields of TransformerConfig, as Megatron names them.
        vocab_size: rows of the embedding that ``build`` makes; tp has to divide it.
        max_sequence_length: the longest sequence.
        seed: what the weights are drawn from after ``build``, the same under every plan; None where
            ``build`` gives them their values. The config that ``build`` gets draws none.
        position_embedding_type: as GPTModel takes it.
        share_embeddings_and_output_weights: whether the output layer is the embedding.
    """

    build: StageFunction
    fields: Mapping[str, Any]
    vocab_size: int
    max_sequence_length: int
    seed: int | None
    position_embedding_type: str = "learned_absolute"
    share_embeddings_and_output_weights: bool = False

    pads_vocabulary = False
    """Rows of its embedding may be padding, of which nothing is known here."""

    def dimensions(self, tp: int) -> ModelDimensions:
        """The sizes that Megatron gives a model of these fields."""
        return sizes_of(
            self._config(),
            tp,
            self.vocab_size,
            self.max_sequence_length,
            position_embedding_type=self.position_embedding_type,
            share_embeddings_and_output_weights=self.share_embeddings_and_output_weights,
        )

    def faults(self, terms: SessionTerms) -> list[Fault]:
        """Nothing beyond the sizes: what the function asks of a plan, it says itself."""
        return []

    def transformer_fields(self) -> Mapping[str, Any]:
        """The model's fields."""
        return self.fields

    def build_stage(self, config: Any, groups: MegatronGroups, host: Host) -> torch.nn.Module:
        """What the function builds, with weights from the seed where there is one."""
        stage = self.build(config, groups, host)
        if self.seed is not None:
            drawn = Initialisation(self.seed, config.init_method_std, config.num_layers)
            initialise(stage, drawn, self.dimensions(config.tensor_model_parallel_size), groups)
        return stage

    def _config(self) -> TransformerConfig:
        """Megatron's config of the model alone, on one rank."""
        fields = dict(self.fields)
        if isinstance(fields.get("activation_func"), str):
            fields["activation_func"] = activation_function(fields["activation_func"])
        return TransformerConfig(**fields)
