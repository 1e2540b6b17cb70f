"""The ``model`` section. Names and meanings are those of Megatron's TransformerConfig and GPTModel."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mixle_megatron.config.experts import ExpertFields
from mixle_megatron.config.fields import Count, Fraction, NoneWord, Number, Positive, Section
from mixle_megatron.config.latent_attention import LatentAttentionFields, TokenPredictionFields


class TransformerFields(Section):
    """Sizes, norms and feed-forward layers of a dense transformer."""

    family: Literal["gpt"] = Field(default="gpt", description="Model family: gpt is Megatron's GPTModel.")
    num_layers: Count = Field(description="Transformer layers.")
    hidden_size: Count = Field(description="Width of the residual stream.")
    num_attention_heads: Count = Field(description="Query heads of each layer.")
    seq_length: Count = Field(description="Tokens of one training sequence.")
    vocab_size: Count = Field(description="Tokens that the tokenizer can give (bytes: 257).")

    ffn_hidden_size: Count | None = Field(
        default=None, description="Width of the feed-forward layer; null: 4 · hidden_size."
    )
    num_query_groups: Count | None = Field(
        default=None, description="Key and value heads (GQA); null: num_attention_heads."
    )
    kv_channels: Count | None = Field(
        default=None, description="Width of one head; null: hidden_size / num_attention_heads."
    )
    max_position_embeddings: Count | None = Field(
        default=None, description="Longest sequence the model has positions for; null: seq_length."
    )
    position_embedding_type: Annotated[Literal["learned_absolute", "rope", "none"], NoneWord] = Field(
        default="learned_absolute", description="How positions enter the model."
    )
    rotary_base: Count = Field(default=10000, description="Base period of rotary positions.")
    rotary_percent: Annotated[Positive, Field(le=1)] = Field(
        default=1.0, description="Share of each head's channels that rotary positions turn."
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = Field(default="LayerNorm", description="Kind of norm.")
    layernorm_epsilon: Positive = Field(default=1e-5, description="Added to the variance in norms.")
    activation_func: Literal["gelu", "silu", "relu", "squared_relu", "quick_gelu"] = Field(
        default="gelu", description="Activation of the feed-forward layer; gelu is the exact one."
    )
    gated_linear_unit: bool = Field(
        default=False, description="Gate the feed-forward layer; with silu this is SwiGLU."
    )
    add_bias_linear: bool = Field(default=True, description="Biases on all linear layers.")
    add_qkv_bias: bool = Field(
        default=False, description="A bias on query, key and value where add_bias_linear is false."
    )
    qk_layernorm: bool = Field(default=False, description="A norm on each head's queries and keys.")
    share_embeddings_and_output_weights: bool = Field(
        default=True, description="Tie the output layer to the embedding."
    )
    make_vocab_size_divisible_by: Count = Field(
        default=1, description="The vocabulary is padded to a multiple of this times plan.tp."
    )
    hidden_dropout: Fraction = Field(default=0.0, description="Dropout on the residual stream.")
    attention_dropout: Fraction = Field(default=0.0, description="Dropout on attention weights.")
    init_method_std: Number = Field(
        default=0.02, ge=0, description="Standard deviation of the initial weights."
    )
    recompute_granularity: Annotated[Literal["none", "selective", "full"], NoneWord] = Field(
        default="none", description="Activations computed again in backward: of core attention or of layers."
    )
    recompute_method: Annotated[Literal["none", "uniform", "block"], NoneWord] = Field(
        default="none", description="How full recomputation chooses its layers."
    )
    recompute_num_layers: Count | None = Field(
        default=None, description="Layers of each recomputed unit (uniform), or recomputed per stage (block)."
    )


class ModelSection(TokenPredictionFields, LatentAttentionFields, ExpertFields, TransformerFields):
    """A GPT: decoder-only transformer with a language-model head.

    One flat section: its keys are those of its bases, the last one's first.
    """
