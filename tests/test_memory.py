"""Closed-form parameter counts against counting by hand."""

from __future__ import annotations

import dataclasses

import pytest

from mixle_megatron.memory import layer_parameters, memory_by_stage, parameter_count, total_parameters
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules import ModelDimensions

GPT2_SMALL = ModelDimensions(
    num_layers=12,
    hidden_size=768,
    num_attention_heads=12,
    num_query_groups=12,
    kv_channels=64,
    ffn_hidden_size=3072,
    seq_length=1024,
    vocab_size=50257,
    padded_vocab_size=50257,
    max_position_embeddings=1024,
)
LLAMA_3_8B = ModelDimensions(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    ffn_hidden_size=14336,
    seq_length=8192,
    vocab_size=128256,
    padded_vocab_size=128256,
    max_position_embeddings=8192,
    position_embedding_type="rope",
    normalization="RMSNorm",
    gated_linear_unit=True,
    add_bias_linear=False,
    share_embeddings_and_output_weights=False,
)


def test_totals_are_those_that_are_published() -> None:
    assert total_parameters(GPT2_SMALL) == 124_439_808
    assert total_parameters(LLAMA_3_8B) == 8_030_261_248


def test_one_layer_by_hand() -> None:
    model = dataclasses.replace(
        GPT2_SMALL, hidden_size=8, num_attention_heads=2, num_query_groups=1, kv_channels=4, ffn_hidden_size=6
    )
    qkv, proj = (8 + 2 * 4) * 8 + 16, 8 * 8 + 8
    fc1, fc2 = 6 * 8 + 6, 8 * 6 + 8
    assert layer_parameters(model) == qkv + proj + fc1 + fc2 + 2 * 16
    bare = dataclasses.replace(model, add_bias_linear=False, normalization="RMSNorm")
    assert layer_parameters(bare) == 128 + 64 + 48 + 48 + 2 * 8
    assert layer_parameters(dataclasses.replace(bare, add_qkv_bias=True)) == layer_parameters(bare) + 16
    assert layer_parameters(dataclasses.replace(bare, qk_layernorm=True)) == layer_parameters(bare) + 2 * 4
    assert layer_parameters(dataclasses.replace(bare, gated_linear_unit=True)) == layer_parameters(bare) + 48


def test_tp_cuts_matrices_and_their_column_biases() -> None:
    model = GPT2_SMALL
    whole, half = layer_parameters(model), layer_parameters(model, 2)
    replicated = 2 * 2 * 768 + 2 * 768
    assert 2 * half - whole == replicated


def test_stages_hold_the_model_and_a_second_copy_of_tied_embeddings() -> None:
    plan = PlanRecord(pp=3)
    words = 50257 * 768
    held = [parameter_count(GPT2_SMALL, plan, stage) for stage in range(3)]
    assert sum(held) == total_parameters(GPT2_SMALL) + words
    assert held[1] == 4 * layer_parameters(GPT2_SMALL)
    untied = dataclasses.replace(GPT2_SMALL, share_embeddings_and_output_weights=False)
    assert sum(parameter_count(untied, plan, stage) for stage in range(3)) == total_parameters(untied)


def test_total_does_not_depend_on_the_padding_of_a_plan() -> None:
    padded = dataclasses.replace(GPT2_SMALL, padded_vocab_size=50304)
    assert total_parameters(padded) == total_parameters(GPT2_SMALL)
    assert parameter_count(padded, PlanRecord(tp=2), 0) > parameter_count(
        dataclasses.replace(GPT2_SMALL, padded_vocab_size=50258), PlanRecord(tp=2), 0
    )


@pytest.mark.parametrize(
    ("precision", "optimizer", "weights", "main", "states"),
    [("fp32", "adam", 4, 0, 8), ("bf16", "adam", 2, 4, 8), ("bf16", "sgd", 2, 4, 4)],
)
def test_bytes_of_each_precision(
    precision: str, optimizer: str, weights: int, main: int, states: int
) -> None:
    [stage] = memory_by_stage(GPT2_SMALL, PlanRecord(), precision=precision, optimizer=optimizer)
    assert stage.parameter_bytes == weights * stage.parameters
    assert stage.gradient_bytes == 4 * stage.parameters
    assert stage.main_parameter_bytes == main * stage.parameters
    assert stage.optimizer_state_bytes == states * stage.parameters
    assert stage.total_bytes == (weights + 4 + main + states) * stage.parameters


def test_optimizer_state_is_sharded_over_dp_shard_and_copied_over_dp_replicate() -> None:
    [whole] = memory_by_stage(GPT2_SMALL, PlanRecord(), precision="bf16")
    [sharded] = memory_by_stage(GPT2_SMALL, PlanRecord(dp_shard=4, dp_replicate=2), precision="bf16")
    assert sharded.optimizer_state_bytes * 4 == whole.optimizer_state_bytes
    assert sharded.parameter_bytes == whole.parameter_bytes


def test_stages_that_are_alike_are_told_once() -> None:
    stages = memory_by_stage(GPT2_SMALL, PlanRecord(pp=6), precision="fp32")
    assert [(stage.stage, stage.stages) for stage in stages] == [(0, 1), (1, 4), (5, 1)]
