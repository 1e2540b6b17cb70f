"""Megatron's specs of a stage's layers, with torch layers where Transformer Engine is missing."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from mixle_megatron.layers.attention import TorchAttention
from mixle_megatron.layers.latent_attention import TorchLatentAttention
from mixle_megatron.layers.linear import TorchColumnParallelLinear, TorchRowParallelLinear
from mixle_megatron.layers.norm import TorchNorm
from mixle_megatron.process_groups import MegatronGroups
from mixle_megatron.translate import Host

_HEAD_NORMS = ("q_layernorm", "k_layernorm", "kv_layernorm")
_PREDICTION_NORMS = ("enorm", "hnorm", "layer_norm")


def decoder_spec(config: Any, groups: MegatronGroups, host: Host) -> Any:
    """The layers of a chunk: dense ones and mixtures of experts as ``config.moe_layer_freq`` says."""
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=host.transformer_engine,
        normalization=config.normalization,
        vp_stage=groups.virtual_stage,
        pp_rank=groups.collection.pp.rank(),
    )
    if not host.transformer_engine:
        block.layer_norm = TorchNorm
        for layer in block.layer_specs:
            _with_torch_layers(layer)
    return block


def prediction_spec(config: Any, decoder: Any, groups: MegatronGroups, host: Host) -> Any:
    """The layers that predict tokens beyond the next one (MTP); None where this chunk has none."""
    if not config.mtp_num_layers:
        return None
    block = get_gpt_mtp_block_spec(
        config,
        decoder,
        use_transformer_engine=host.transformer_engine,
        vp_stage=groups.virtual_stage,
        pp_rank=groups.collection.pp.rank(),
    )
    if block is not None and not host.transformer_engine:
        for layer in block.layer_specs:
            for name in _PREDICTION_NORMS:
                setattr(layer.submodules, name, TorchNorm)
    return block


def torch_layer_spec(config: Any) -> ModuleSpec:
    """One dense layer of Megatron's local kind with torch layers in place of its own."""
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    _with_torch_layers(spec)
    return spec


def _with_torch_layers(spec: ModuleSpec) -> None:
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    if layer.self_attention.module is MLASelfAttention:
        layer.self_attention.module = TorchLatentAttention
    layer.input_layernorm = TorchNorm
    layer.pre_mlp_layernorm = TorchNorm
    attention.core_attention = TorchAttention
    attention.linear_proj = TorchRowParallelLinear
    dense = _dense_submodules(layer.mlp)
    if dense is not None:
        dense.linear_fc1, dense.linear_fc2 = TorchColumnParallelLinear, TorchRowParallelLinear
    for name in _HEAD_NORMS:
        if getattr(attention, name, IdentityOp) not in (IdentityOp, None):
            setattr(attention, name, TorchNorm)


def _dense_submodules(mlp: Any) -> MLPSubmodules | None:
    """What a dense layer's MLP is made of, whether this Megatron has a spec of it or a partial call."""
    submodules = mlp.keywords.get("submodules") if isinstance(mlp, partial) else mlp.submodules
    return submodules if isinstance(submodules, MLPSubmodules) else None
