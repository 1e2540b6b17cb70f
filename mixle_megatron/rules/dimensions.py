"""The sizes that rules are about, as plain numbers: no torch, no Megatron, no YAML."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelDimensions:
    """What of a GPT decides its parameter shapes and how a plan may cut it.

    The names are those of Megatron's ``TransformerConfig`` and ``GPTModel``. Every default of a
    config file is already resolved here: no field is ``None``.

    Attributes:
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        num_attention_heads: query heads.
        num_query_groups: key and value heads.
        kv_channels: width of one head.
        ffn_hidden_size: width of the feed-forward layer, after the gate.
        seq_length: tokens of one training sequence.
        vocab_size: tokens that the user sees.
        padded_vocab_size: rows of the embedding, a multiple of tp.
        max_position_embeddings: longest sequence that the model has positions for.
        position_embedding_type: ``learned_absolute``, ``rope`` or ``none``.
        rotary_percent: share of a head's channels that rotary positions turn.
        normalization: ``LayerNorm`` (weight and bias) or ``RMSNorm`` (weight).
        gated_linear_unit: whether the first feed-forward matrix is twice as wide (SwiGLU).
        add_bias_linear: biases on the linear layers.
        add_qkv_bias: a bias on query, key and value even without ``add_bias_linear``.
        qk_layernorm: a norm on each head's queries and keys.
        share_embeddings_and_output_weights: whether the output layer is the embedding.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    seq_length: int
    vocab_size: int
    padded_vocab_size: int
    max_position_embeddings: int
    position_embedding_type: str = "learned_absolute"
    rotary_percent: float = 1.0
    normalization: str = "LayerNorm"
    gated_linear_unit: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    share_embeddings_and_output_weights: bool = True


@dataclass(frozen=True)
class BatchDimensions:
    """The batch of one optimizer update.

    Attributes:
        global_batch_size: sequences of one update, over all ranks.
        micro_batch_size: sequences of one microbatch on one data-parallel rank.
        seq_length: tokens of one sequence.
    """

    global_batch_size: int
    micro_batch_size: int
    seq_length: int


def padded_vocab_size(vocab_size: int, tp: int, make_vocab_size_divisible_by: int = 1) -> int:
    """Rows of the embedding: ``vocab_size`` rounded up to a multiple of divisor times tp."""
    multiple = make_vocab_size_divisible_by * tp
    return -(-vocab_size // multiple) * multiple
