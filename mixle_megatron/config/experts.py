"""The keys of the ``model`` section about mixtures of experts, by Megatron's names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mixle_megatron.config.fields import (
    Count,
    LayerFrequency,
    NoneWord,
    NullWord,
    NumberOrZero,
    Positive,
    Section,
)


class ExpertFields(Section):
    """Routed and shared experts in place of feed-forward layers."""

    num_moe_experts: Count | None = Field(
        default=None, description="Experts of each mixture-of-experts layer; null: every layer is dense."
    )
    moe_router_topk: Count = Field(default=2, description="Experts that each token is sent to.")
    moe_ffn_hidden_size: Count | None = Field(
        default=None, description="Width of each expert's feed-forward layer; null: ffn_hidden_size."
    )
    moe_shared_expert_intermediate_size: Count | None = Field(
        default=None, description="Width of the experts that see every token, all together; null: none."
    )
    moe_layer_freq: LayerFrequency = Field(
        default=1,
        description="Every how many layers one has experts, beginning with the first; or a list with 1 "
        "(experts) or 0 (dense) for each layer.",
    )

    moe_router_load_balancing_type: Annotated[Literal["aux_loss", "seq_aux_loss", "none"], NoneWord] = Field(
        default="aux_loss",
        description="Loss that evens out the experts' tokens: of a microbatch, of each sequence, or none.",
    )
    moe_aux_loss_coeff: NumberOrZero = Field(default=0.0, description="Weight of that loss.")
    moe_z_loss_coeff: NumberOrZero | None = Field(
        default=None, description="Weight of the loss on large router logits (z-loss); null: none."
    )
    moe_router_score_function: Literal["softmax", "sigmoid"] = Field(
        default="softmax", description="What makes scores of the router's logits."
    )
    moe_router_pre_softmax: bool = Field(
        default=False, description="Softmax over all experts before the choice, not over the chosen ones."
    )
    moe_router_topk_scaling_factor: Positive | None = Field(
        default=None, description="Factor on the scores of the chosen experts; null: none."
    )
    moe_router_num_groups: Count | None = Field(
        default=None, description="Groups of experts that a token chooses among first; null: no groups."
    )
    moe_router_group_topk: Count | None = Field(
        default=None, description="Groups that each token may choose its experts from; null: no groups."
    )
    moe_router_enable_expert_bias: bool = Field(
        default=False, description="Balance experts by a bias on their scores in the choice, without a loss."
    )
    moe_router_bias_update_rate: NumberOrZero = Field(
        default=1e-3, description="Step of that bias, one a committed update."
    )
    moe_router_dtype: Annotated[Literal["fp32", "fp64"] | None, NullWord] = Field(
        default=None, description="What routing computes in; null: the model's own dtype."
    )

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = Field(
        default="alltoall", description="How tokens reach their experts' ranks; flex needs DeepEP."
    )
    moe_grouped_gemm: bool = Field(
        default=False,
        description="One kernel for all experts of a rank; on a CPU experts are computed one after another.",
    )
    moe_expert_capacity_factor: Positive | None = Field(
        default=None,
        description="Most tokens of an expert, over those of even routing; null: none is dropped.",
    )
    moe_pad_expert_input_to_capacity: bool = Field(
        default=False, description="Pad each expert's tokens to its capacity."
    )
    moe_token_drop_policy: Literal["probs", "position"] = Field(
        default="probs", description="Tokens that an expert drops: those of least score, or the last ones."
    )
