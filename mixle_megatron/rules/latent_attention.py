"""What multi-latent attention (MLA) must satisfy, by itself and under tensor parallelism."""

from __future__ import annotations

from mixle_megatron.errors import Fault
from mixle_megatron.rules.dimensions import ModelDimensions


def latent_attention_faults(model: ModelDimensions, prefix: str = "model") -> list[Fault]:
    """Everything that is wrong with the latent attention of a model that has it.

    Its keys are made for every query head, and carry rotary positions of their own.
    """
    faults = []
    if model.position_embedding_type != "rope":
        rule = f"gives no positions to {prefix}.multi_latent_attention, which turns its own"
        faults.append(
            Fault(f"{prefix}.position_embedding_type", model.position_embedding_type, rule, "use rope")
        )
    heads, groups = model.num_attention_heads, model.num_query_groups
    if groups != heads:
        rule = (
            f"is not {prefix}.num_attention_heads={heads}, and {prefix}.multi_latent_attention has no groups"
        )
        faults.append(Fault(f"{prefix}.num_query_groups", groups, rule, f"use {heads}, or leave it out"))
    return faults


def latent_attention_cuts(model: ModelDimensions) -> dict[str, int]:
    """What tp must divide of latent attention besides its heads.

    Megatron's local layers are built with the projections down to these ranks cut, whether or not
    they are replaced by whole ones afterwards; one file is to run with them and with Transformer Engine.
    """
    if not model.multi_latent_attention:
        return {}
    cuts = {"kv_lora_rank + qk_pos_emb_head_dim": model.kv_lora_rank + model.qk_pos_emb_head_dim}
    return cuts if model.q_lora_rank is None else {"q_lora_rank": model.q_lora_rank, **cuts}
