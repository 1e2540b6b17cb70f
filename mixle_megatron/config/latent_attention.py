"""The keys of the ``model`` section about multi-latent attention and multi-token prediction."""

from __future__ import annotations

from pydantic import Field

from mixle_megatron.config.fields import Count, NumberOrZero, Section


class LatentAttentionFields(Section):
    """Attention on low-rank queries, keys and values (MLA), by the names of MLATransformerConfig."""

    multi_latent_attention: bool = Field(
        default=False, description="Attention on low-rank queries, keys and values (MLA)."
    )
    q_lora_rank: Count | None = Field(
        default=None, description="Rank of MLA's queries; null: they are not low-rank."
    )
    kv_lora_rank: Count = Field(default=512, description="Rank of MLA's keys and values.")
    qk_head_dim: Count = Field(
        default=128, description="Channels of each MLA query and key that carry no position."
    )
    qk_pos_emb_head_dim: Count = Field(
        default=64, description="Channels of each MLA query and key that rotary positions turn."
    )
    v_head_dim: Count = Field(default=128, description="Channels of each MLA value.")


class TokenPredictionFields(Section):
    """Layers that predict tokens beyond the next one (MTP)."""

    mtp_num_layers: Count | None = Field(
        default=None, description="Further tokens that are predicted, each by a layer of its own; null: none."
    )
    mtp_loss_scaling_factor: NumberOrZero = Field(
        default=0.1, description="Weight of the mean loss of those predictions."
    )
