"""The sizes that rules are about, as plain numbers: no torch, no Megatron, no YAML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExpertDimensions:
    """A model's mixtures of experts, and how tokens are routed to them.

    Attributes:
        num_moe_experts: experts of each mixture-of-experts layer; None where every layer is dense.
        moe_layer_freq: every how many layers one has experts, beginning with the first; or 1
            (experts) or 0 (dense) for each layer.
        moe_ffn_hidden_size: width of each expert, after the gate; None is ``ffn_hidden_size``.
        moe_shared_expert_intermediate_size: width of all shared experts together; None where none.
        moe_router_topk: experts that each token is sent to.
        moe_router_num_groups: groups of experts that a token chooses among first, or None.
        moe_router_group_topk: groups that a token may choose its experts from, or None.
        moe_router_score_function: ``softmax`` or ``sigmoid``.
        moe_router_pre_softmax: softmax before the choice of experts.
        moe_router_load_balancing_type: ``aux_loss``, ``seq_aux_loss`` or ``none``.
        moe_router_enable_expert_bias: a bias on the experts' scores, which is no parameter.
        moe_token_dispatcher_type: ``allgather``, ``alltoall`` or ``flex``.
        moe_grouped_gemm: one kernel for all experts of a rank.
        moe_expert_capacity_factor: most tokens of an expert, over those of even routing; or None.
        moe_pad_expert_input_to_capacity: pad each expert's tokens to its capacity.
    """

    num_moe_experts: int | None = None
    moe_layer_freq: int | Sequence[int] = 1
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_router_topk: int = 2
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_score_function: str = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_load_balancing_type: str = "aux_loss"
    moe_router_enable_expert_bias: bool = False
    moe_token_dispatcher_type: str = "alltoall"
    moe_grouped_gemm: bool = False
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        if self.num_moe_experts is None:
            return False
        if isinstance(self.moe_layer_freq, int):
            return layer % self.moe_layer_freq == 0
        return bool(self.moe_layer_freq[layer])

    def moe_layers(self, start: int, end: int) -> int:
        """How many of the layers from ``start`` to before ``end`` have experts, without walking them."""
        if self.num_moe_experts is None:
            return 0
        if isinstance(self.moe_layer_freq, int):
            return -(-end // self.moe_layer_freq) + -start // self.moe_layer_freq
        return sum(self.moe_layer_freq[start:end])


@dataclass(frozen=True, kw_only=True)
class LatentAttentionDimensions:
    """Multi-latent attention (MLA), by the names of Megatron's ``MLATransformerConfig``.

    Attributes:
        multi_latent_attention: whether attention is on low-rank queries, keys and values.
        q_lora_rank: rank of the queries; None where they are not low-rank.
        kv_lora_rank: rank of keys and values.
        qk_head_dim: channels of each query and key that carry no position.
        qk_pos_emb_head_dim: channels of each query and key that rotary positions turn.
        v_head_dim: channels of each value.
    """

    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128


@dataclass(frozen=True)
class ModelDimensions(ExpertDimensions, LatentAttentionDimensions):
    """What of a GPT decides its parameter shapes and how a plan may cut it.

    The names are those of Megatron's ``TransformerConfig`` and ``GPTModel``. Defaults of a config
    file that follow from other keys are already resolved here; None is the absence of something.

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
        mtp_num_layers: layers that predict tokens beyond the next one; None where there are none.
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
    mtp_num_layers: int | None = None

    @property
    def expert_width(self) -> int:
        """Width of each expert, after the gate."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size


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
