"""Closed-form parameter counts against counting by hand, and bytes against what ranks hold."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from small_gpts import LLAMA, SIZES, parallel_plan
from typer.testing import CliRunner

from mixle_megatron.activations import ActivationTerms
from mixle_megatron.cli.main import app
from mixle_megatron.config.model import ModelSection
from mixle_megatron.config.schema import dimensions_of
from mixle_megatron.errors import Refused
from mixle_megatron.gpu_memory import GPUS, gpu_memory
from mixle_megatron.memory import MOST_STAGES, memory_by_stage, stage_memory
from mixle_megatron.parameter_count import (
    layer_parameters,
    model_parameters,
    parameter_count,
    stage_parameters,
    total_parameters,
)
from mixle_megatron.pipeline_split import EVEN, PipelineSplit
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules import ModelDimensions
from mixle_megatron.topology import Topology

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
MIXTRAL_8X7B = dataclasses.replace(LLAMA_3_8B, vocab_size=32000, padded_vocab_size=32000, num_moe_experts=8)
DEEPSEEK_V3 = dataclasses.replace(
    LLAMA_3_8B,
    num_layers=61,
    hidden_size=7168,
    num_attention_heads=128,
    num_query_groups=128,
    ffn_hidden_size=18432,
    vocab_size=129280,
    padded_vocab_size=129280,
    qk_layernorm=True,
    multi_latent_attention=True,
    q_lora_rank=1536,
    num_moe_experts=256,
    moe_layer_freq=[0] * 3 + [1] * 58,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    moe_router_topk=8,
)
BALANCING_BIASES = 58 * 256
"""DeepSeek counts the biases that balance experts among its parameters; Megatron keeps them as buffers."""


def test_totals_are_those_that_are_published() -> None:
    assert total_parameters(GPT2_SMALL) == 124_439_808
    assert total_parameters(LLAMA_3_8B) == 8_030_261_248
    assert total_parameters(MIXTRAL_8X7B) == 46_702_792_704
    assert total_parameters(DEEPSEEK_V3) + BALANCING_BIASES == 671_026_419_200


def test_experts_are_cut_by_their_own_axes() -> None:
    whole = stage_parameters(MIXTRAL_8X7B, PlanRecord(), 0)
    assert whole.expert == 32 * 8 * 3 * 14336 * 4096
    for plan in (PlanRecord(dp_shard=4, ep=4), PlanRecord(dp_shard=4, ep=2, etp=2), PlanRecord(tp=4, etp=4)):
        held = stage_parameters(MIXTRAL_8X7B, plan, 0)
        assert held.expert * plan.ep * plan.etp == whole.expert
        assert (held.dense == whole.dense) == (plan.tp == 1)


def test_experts_state_is_sharded_over_the_ranks_that_hold_them() -> None:
    plan = PlanRecord(dp_shard=8, ep=4)
    [stage] = memory_by_stage(MIXTRAL_8X7B, plan, precision="bf16")
    held = stage_parameters(MIXTRAL_8X7B, plan, 0)
    assert (stage.parameters, stage.expert_parameters) == (held.total, held.expert)
    assert stage.main_parameter_bytes == 4 * (held.dense // 8 + held.expert // 2)
    assert stage.optimizer_state_bytes == 2 * stage.main_parameter_bytes


LAID_OUT = "E" + "tttt|" * 15 + "tmL"


@pytest.mark.parametrize(
    ("layers", "predictions", "pp", "split"),
    [
        (61, None, 15, PipelineSplit(num_layers_in_first_pipeline_stage=5)),
        (61, 1, 15, PipelineSplit(num_layers_in_last_pipeline_stage=5)),
        (64, 1, 8, PipelineSplit(virtual_pipeline_model_parallel_size=4)),
        (64, None, 4, PipelineSplit(2, num_layers_in_first_pipeline_stage=10)),
        (61, 1, 4, PipelineSplit(pipeline_model_parallel_layout=LAID_OUT)),
    ],
)
def test_every_layer_is_on_one_stage_whatever_the_split(
    layers: int, predictions: int | None, pp: int, split: PipelineSplit
) -> None:
    """The parts of a model add up to it, but for the copy of the embedding that predictions use."""
    model = dataclasses.replace(
        DEEPSEEK_V3,
        num_layers=layers,
        moe_layer_freq=[0] * 3 + [1] * (layers - 3),
        mtp_num_layers=predictions,
    )
    held = [stage_parameters(model, PlanRecord(pp=pp), stage, split) for stage in range(pp)]
    assert sum(stage.layers for stage in held) == layers
    assert sum(stage.expert for stage in held) == model_parameters(model).expert
    copies = 129280 * 7168 if predictions else 0
    assert sum(stage.total for stage in held) == total_parameters(model) + copies
    assert [stage.prediction_layers for stage in held] == [0] * (pp - 1) + [predictions or 0]


def test_runs_of_stages_tell_where_experts_begin() -> None:
    stages = memory_by_stage(
        dataclasses.replace(DEEPSEEK_V3, num_layers=64, moe_layer_freq=[0] * 3 + [1] * 61),
        PlanRecord(pp=8),
        precision="bf16",
    )
    assert [(stage.stage, stage.stages, stage.expert_layers) for stage in stages] == [
        *((0, 1, 5), (1, 6, 8), (7, 1, 8)),
    ]


def test_stages_that_were_not_looked_at_are_not_said_to_be_alike() -> None:
    pp = 4 * MOST_STAGES
    every = dataclasses.replace(GPT2_SMALL, num_layers=pp, num_moe_experts=2, moe_layer_freq=1)
    assert [stage.stages for stage in memory_by_stage(every, PlanRecord(pp=pp), precision="fp32")] == [
        *(1, pp - 2, 1),
    ]
    some = dataclasses.replace(every, moe_layer_freq=3)
    shown = memory_by_stage(some, PlanRecord(pp=pp), precision="fp32")
    assert sum(stage.stages for stage in shown) == 16
    assert sum(stage.expert_layers * stage.stages for stage in shown) == 3 + 3


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


def test_stages_differ_by_what_they_have_in_flight() -> None:
    terms = ActivationTerms(micro_batch_size=1, element_bytes=2, fused=True)
    plan = PlanRecord(pp=6, microbatches=4)
    stages = memory_by_stage(GPT2_SMALL, plan, precision="bf16", activations=terms)
    assert [(stage.stage, stage.stages, stage.passes_in_flight) for stage in stages] == [
        *((0, 1, 4), (1, 2, 4), (3, 1, 3), (4, 1, 2), (5, 1, 1)),
    ]
    assert stages[3].activation_bytes * 3 == stages[2].activation_bytes * 2
    assert stages[0].total_bytes == 18 * stages[0].parameters + stages[0].activation_bytes


@pytest.mark.parametrize(
    ("asked", "size"),
    [("h100", 80 * 10**9), ("H200", 141 * 10**9), ("80GiB", 80 * 2**30), ("1.5 tb", 1_500_000_000_000)],
)
def test_memory_of_a_gpu_by_name_or_size(asked: str, size: int) -> None:
    assert gpu_memory(asked).bytes == size


@pytest.mark.parametrize("asked", ["", "h1000", "80", "GiB", "-80GiB", "0GiB", "80 apples", "1e9GB", "nanGB"])
def test_what_is_neither_a_gpu_nor_a_size_is_refused(asked: str) -> None:
    with pytest.raises(Refused, match=f"use {next(iter(GPUS))}, .* or a size such as 80GB"):
        gpu_memory(asked)


def plan_says(*arguments: str, config: str = "tiny_gpt_cpu") -> str:
    """What ``plan`` prints of a shipped config."""
    path = Path(__file__).parent.parent / "configs" / f"{config}.yaml"
    result = CliRunner().invoke(app, ["plan", str(path), *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_plan_says_whether_a_rank_fits() -> None:
    memory = json.loads(plan_says("--gpu-memory", "h100", "--json", config="llama3_70b"))["memory"]
    fullest = max(memory["stages"], key=lambda stage: stage["total_bytes"])
    assert memory["gpu"] == {
        "name": "h100",
        "memory_bytes": GPUS["h100"],
        "fullest_stage": fullest["stage"],
        "free_bytes": GPUS["h100"] - fullest["total_bytes"],
        "fits": True,
    }
    assert [stage["passes_in_flight"] for stage in memory["stages"]] == [23, 21, 19, 17]
    assert (memory["activations_of"], memory["routing"]) == ("transformer_engine", None)
    assert "does not fit 1MiB" in plan_says("--gpu-memory", "1MiB")
    assert "routed evenly" in plan_says("host.device=cpu", config="tiny_moe_cpu")
    assert json.loads(plan_says("--json", "host.device=cpu"))["memory"]["activations_of"] == "torch"


def test_of_many_stages_that_differ_the_ends_are_shown_and_all_are_judged() -> None:
    overrides = ("model.num_layers=128", "plan.pp=128", "batch.global_batch_size=1024")
    memory = json.loads(plan_says(*overrides, "--json"))["memory"]
    assert (len(memory["stages"]), memory["left_out"]) == (16, 128 - 16)
    assert "112 left out" in plan_says(*overrides)


WITH_EXPERTS: dict[str, Any] = (
    SIZES | LLAMA | {"num_layers": 4, "num_moe_experts": 4, "moe_ffn_hidden_size": 24}
)
FIRST_DENSE = {"moe_layer_freq": [0, 1, 1, 1], "moe_shared_expert_intermediate_size": 40}


def held_bytes(sizes: dict[str, int], split: PipelineSplit, precision: str) -> tuple[int, list[int]]:
    """This rank's stage, and bytes of its parameters, gradients, main parameters and adam's moments."""
    import torch

    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.models.gpt import GPT
    from mixle_megatron.optimizer_shards import model_parameters, own_value

    with MegatronBackend().prepare(
        GPT(ModelSection(**(WITH_EXPERTS | FIRST_DENSE))),
        plan=parallel_plan(**sizes),
        precision=precision,
        device="cpu",
        pipeline=split,
    ) as opened:
        tokens = torch.zeros((sizes.get("microbatches", 1), SIZES["seq_length"]), dtype=torch.long)
        opened.train_batch(tokens, tokens)
        held = [parameter for _, parameter in opened.stage.named_parameters()]
        own = [own_value(*each) for each in model_parameters(opened.stage.optimizer)]
        own = [value for value in own if value is not None]
        mains = own if precision != "fp32" else []
        moments = [
            state[name]
            for part in opened.stage.optimizer.chained_optimizers
            for state in part.optimizer.state.values()
            for name in ("exp_avg", "exp_avg_sq")
        ]
        kinds = (held, [parameter.main_grad for parameter in held], mains, moments)
        return opened.coordinate["pp"], [
            sum(tensor.numel() * tensor.element_size() for tensor in kind) for kind in kinds
        ]


@pytest.mark.parametrize(
    ("sizes", "split", "precision"),
    [
        ({"dp_shard": 2, "dp_replicate": 2}, EVEN, "bf16"),
        ({"dp_shard": 4, "ep": 2}, EVEN, "bf16"),
        ({"tp": 2, "etp": 2, "cp": 2}, EVEN, "bf16"),
        ({"tp": 2, "pp": 2, "microbatches": 2}, PipelineSplit(2), "bf16"),
        ({"dp_shard": 2, "pp": 2, "ep": 2}, EVEN, "fp32"),
    ],
    ids=["dp", "ep", "etp and cp", "tp and virtual stages", "ep and pp in fp32"],
)
def test_ranks_hold_the_bytes_that_the_formula_says(
    run_on, sizes: dict[str, int], split: PipelineSplit, precision: str
) -> None:
    """To the byte: on each rank what is whole there, and over all ranks together what is cut in shards.

    Megatron pads the buffer that it cuts, so that one rank's shard is a little larger than another's.
    """
    plan = parallel_plan(**sizes)
    model, topology = dimensions_of(ModelSection(**(WITH_EXPERTS | FIRST_DENSE)), plan.tp), Topology(plan)
    main = moments = says_main = Fraction(0)
    for stage, (parameters, gradients, own_main, own_moments) in run_on(
        plan.world_size, held_bytes, sizes, split, precision
    ):
        says = stage_memory(model, plan, stage, precision=precision, split=split)
        assert (parameters, gradients) == (says.parameter_bytes, says.gradient_bytes)
        assert own_moments == pytest.approx(says.optimizer_state_bytes, rel=0.02)
        parts = stage_parameters(model, plan, stage, split)
        shard = Fraction(parts.dense, topology.optimizer_shards)
        says_main += 4 * (shard + Fraction(parts.expert, topology.expert_optimizer_shards))
        main, moments = main + own_main, moments + own_moments
    assert main == (0 if precision == "fp32" else says_main)
    assert moments == 2 * says_main
