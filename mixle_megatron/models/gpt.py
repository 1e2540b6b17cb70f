"""A GPT described by Megatron's own field names, and built as Megatron's GPTModel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from mixle_megatron.config.experts import ExpertFields
from mixle_megatron.config.latent_attention import LatentAttentionFields, TokenPredictionFields
from mixle_megatron.config.model import ModelSection
from mixle_megatron.config.schema import dimensions_of
from mixle_megatron.errors import Fault
from mixle_megatron.models.decoder_spec import decoder_spec, prediction_spec
from mixle_megatron.models.experts import mark_experts
from mixle_megatron.models.initialisation import Initialisation, initialise
from mixle_megatron.models.provider import ModelProvider, SessionTerms
from mixle_megatron.models.vocabulary import exclude_padding_from_softmax
from mixle_megatron.process_groups import MegatronGroups
from mixle_megatron.rules import recompute_faults
from mixle_megatron.rules.dimensions import ModelDimensions
from mixle_megatron.translate import Host

_TRANSFORMER_FIELDS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "normalization",
    "layernorm_epsilon",
    "activation_func",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "hidden_dropout",
    "attention_dropout",
    "recompute_num_layers",
)


@dataclass(frozen=True)
class GPT(ModelProvider):
    """A GPT that any plan can build.

    The same seed gives the same model under every plan: each parameter is drawn from the seed and
    its logical name, and only then cut into shards.

    Attributes:
        model: the fields of a config's ``model`` section.
        seed: what the initial weights are drawn from.
    """

    model: ModelSection
    seed: int = 1234

    takes_attention_mask = True
    """By torch's layers; what Transformer Engine's do is judged of the host."""

    @classmethod
    def of(cls, *, seed: int = 1234, **fields: Any) -> GPT:
        """A GPT from the keys of a config's ``model`` section, checked as those are."""
        return cls(ModelSection(**fields), seed)

    @cached_property
    def initialisation(self) -> Initialisation:
        """How its parameters are drawn."""
        return Initialisation(self.seed, self.model.init_method_std, self.model.num_layers)

    def dimensions(self, tp: int) -> ModelDimensions:
        """The model's sizes, its vocabulary padded for ``tp``."""
        return dimensions_of(self.model, tp)

    def faults(self, terms: SessionTerms) -> list[Fault]:
        """What is wrong with its activation recomputation under the plan."""
        model = self.model
        return recompute_faults(
            model.recompute_granularity,
            model.recompute_method,
            model.recompute_num_layers,
            layers_per_stage=max(terms.split.most_layers(model.num_layers, terms.plan.pp), 1),
            mtp_num_layers=model.mtp_num_layers,
        )

    def transformer_fields(self) -> Mapping[str, Any]:
        """Fields of TransformerConfig with the defaults that depend on others resolved."""
        fields = {name: getattr(self.model, name) for name in _TRANSFORMER_FIELDS}
        sizes = self.dimensions(1)
        for name in ("num_query_groups", "kv_channels", "ffn_hidden_size"):
            fields[name] = getattr(sizes, name)
        for name in ("recompute_granularity", "recompute_method"):
            value = getattr(self.model, name)
            fields[name] = None if value == "none" else value
        return fields | self._expert_fields() | self._latent_attention_fields() | self._prediction_fields()

    def description(self) -> Mapping[str, Any]:
        """The config's ``model`` section."""
        return self.model.model_dump(mode="json")

    def _expert_fields(self) -> dict[str, Any]:
        if self.model.num_moe_experts is None:
            return {}
        stated = {name: getattr(self.model, name) for name in ExpertFields.model_fields}
        return stated | {"moe_ffn_hidden_size": self.dimensions(1).expert_width}

    def _latent_attention_fields(self) -> dict[str, Any]:
        if not self.model.multi_latent_attention:
            return {}
        stated = {name: getattr(self.model, name) for name in LatentAttentionFields.model_fields}
        rotary = {name: getattr(self.model, name) for name in ("rotary_base", "rotary_percent")}
        return stated | rotary | {"rope_type": "rope"}

    def _prediction_fields(self) -> dict[str, Any]:
        if self.model.mtp_num_layers is None:
            return {}
        return {name: getattr(self.model, name) for name in TokenPredictionFields.model_fields}

    def build_stage(self, config: Any, groups: MegatronGroups, host: Host) -> torch.nn.Module:
        """This rank's stage of a Megatron GPTModel, initialised from the seed."""
        sizes = self.dimensions(config.tensor_model_parallel_size)
        stage = build_gpt_stage(config, self.model, sizes, groups, host)
        initialise(stage, self.initialisation, sizes, groups)
        return stage


def build_gpt_stage(
    config: Any, model: ModelSection, sizes: ModelDimensions, groups: MegatronGroups, host: Host
) -> GPTModel:
    """A stage of Megatron's GPTModel with a vocabulary whose padding has no effect, not initialised."""
    decoder = decoder_spec(config, groups, host)
    stage = GPTModel(
        config=config,
        transformer_layer_spec=decoder,
        mtp_block_spec=prediction_spec(config, decoder, groups, host),
        vocab_size=sizes.padded_vocab_size,
        max_sequence_length=sizes.max_position_embeddings,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        pg_collection=groups.collection,
        vp_stage=groups.virtual_stage,
    )
    exclude_padding_from_softmax(stage, sizes.vocab_size, groups)
    mark_experts(stage)
    return stage
