"""The closed form of a stage's parameters against what each rank of real stages holds."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from small_gpts import SIZES, VARIANTS, parallel_plan, section, session

from mixle_megatron.config.model import ModelSection
from mixle_megatron.config.schema import dimensions_of
from mixle_megatron.memory import stage_memory
from mixle_megatron.parameter_count import parameter_count, stage_parameters, total_parameters
from mixle_megatron.pipeline_split import EVEN, PipelineSplit
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules import all_faults
from mixle_megatron.topology import Topology

MODELS = ["gpt2", "gpt2_untied", "llama", "llama_tied", "qk_norm"]
PLANS = [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}]

ROPE: dict[str, Any] = {"position_embedding_type": "rope", "add_bias_linear": False}
LATENT = ROPE | {
    "multi_latent_attention": True,
    "kv_lora_rank": 12,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 10,
}
MORE_MODELS: dict[str, dict[str, Any]] = {
    "experts": {"num_moe_experts": 4, "add_bias_linear": False},
    "narrow experts": {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "add_bias_linear": False},
    "shared experts, first layer dense": {
        "num_moe_experts": 4,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "moe_ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    "every other layer": {"num_moe_experts": 2, "add_bias_linear": False, "moe_layer_freq": 2},
    "latent": LATENT,
    "latent of low-rank queries": LATENT
    | {"q_lora_rank": 14, "qk_layernorm": True, "add_bias_linear": True, "normalization": "RMSNorm"},
    "predictions": {
        "mtp_num_layers": 2,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
    },
    "latent predictions with experts": LATENT
    | {"mtp_num_layers": 1, "num_moe_experts": 4, "share_embeddings_and_output_weights": False},
}
"""Models beyond a dense GPT by name: what differs from a small GPT-2 of four layers."""

MORE_PLANS: list[tuple[dict[str, int], PipelineSplit]] = [
    ({}, EVEN),
    ({"tp": 2}, EVEN),
    ({"dp_shard": 2, "ep": 2}, EVEN),
    ({"tp": 2, "dp_shard": 2, "ep": 2}, EVEN),
    ({"tp": 2, "etp": 2}, EVEN),
    ({"dp_shard": 2, "etp": 2}, EVEN),
    ({"pp": 2}, PipelineSplit(virtual_pipeline_model_parallel_size=2)),
    ({"pp": 2}, PipelineSplit(num_layers_in_first_pipeline_stage=1)),
    ({"tp": 2, "pp": 2}, PipelineSplit(num_layers_in_last_pipeline_stage=1)),
    ({"pp": 2}, PipelineSplit(pipeline_model_parallel_layout="E|tt|t|tL")),
    ({"pp": 2}, PipelineSplit(pipeline_model_parallel_layout="Et|tttmmL")),
    ({"pp": 2, "tp": 2}, PipelineSplit(pipeline_model_parallel_layout="Et|t|t|tmmL")),
]


def held(variants: list[str], sizes: dict[str, int]) -> tuple[int, dict[str, int]]:
    """This rank's stage, and how many numbers it holds of each model."""
    count = {}
    for variant in variants:
        with session(variant, **sizes) as opened:
            count[variant] = sum(parameter.numel() for parameter in opened.module.parameters())
    return opened.coordinate["pp"], count


def more_section(name: str) -> ModelSection:
    """The ``model`` section of one of :data:`MORE_MODELS`."""
    return ModelSection(**(SIZES | {"num_layers": 4} | MORE_MODELS[name]))


def built(names: list[str], sizes: dict[str, int], split: PipelineSplit) -> tuple[int, dict[str, list[int]]]:
    """This rank's stage, and how many numbers it holds of each model: all of them, and of experts."""
    from mixle_megatron.host import cpu_runtime
    from mixle_megatron.process_groups import destroy_groups, make_groups
    from mixle_megatron.random_state import seed_generators

    plan = parallel_plan(**sizes)
    with cpu_runtime():
        groups = make_groups(plan, split=split)
        try:
            seed_generators(1234, groups)
            can = [name for name in names if not name.startswith("latent") or _builds_latent_attention()]
            return groups.collection.pp.rank(), {name: _numbers(name, plan, split, groups) for name in can}
        finally:
            destroy_groups(groups)


def _builds_latent_attention() -> bool:
    """Megatron 0.16 takes Transformer Engine for installed wherever its wrapper can be imported."""
    from megatron.core.transformer import multi_latent_attention

    return not multi_latent_attention.HAVE_TE or isinstance(multi_latent_attention.TELinear, type)


def _numbers(name: str, plan: Any, split: PipelineSplit, groups: Any) -> list[int]:
    from mixle_megatron.models.gpt import GPT
    from mixle_megatron.translate import Host, transformer_config

    model, host = GPT(more_section(name)), Host.of(torch.device("cpu"))
    config = transformer_config(plan, model.transformer_fields(), precision="fp32", host=host, split=split)
    chunks = split.chunks(plan.pp)
    count = [0, 0]
    for chunk in range(chunks):
        stage = model.build_stage(config, groups.of_chunk(chunk, chunks), host)
        for parameter_name, parameter in stage.named_parameters():
            count[0] += parameter.numel()
            count[1] += parameter.numel() if ".experts." in parameter_name else 0
    return count


@pytest.mark.parametrize("sizes", [{}, *PLANS], ids=str)
def test_every_rank_holds_the_parameters_that_the_formula_says(run_on, sizes: dict[str, int]) -> None:
    plan = parallel_plan(**sizes)
    for stage, count in run_on(prod(sizes.values()), held, MODELS, sizes):
        for variant, parameters in count.items():
            dimensions = dimensions_of(section(variant), plan.tp)
            assert parameters == parameter_count(dimensions, plan, stage), variant


def test_total_counts_each_parameter_once(run_on) -> None:
    ((_, count),) = run_on(1, held, MODELS, {})
    assert count == {variant: total_parameters(dimensions_of(section(variant))) for variant in MODELS}
    assert set(MODELS) <= set(VARIANTS)
    assert torch.tensor(list(count.values())).unique().numel() == len(MODELS), "the models differ"


@pytest.mark.parametrize(("sizes", "split"), MORE_PLANS, ids=lambda part: str(_stated(part)))
def test_experts_latent_attention_and_predictions(
    run_on, sizes: dict[str, int], split: PipelineSplit
) -> None:
    plan = parallel_plan(**sizes, microbatches=2)
    names = [name for name in MORE_MODELS if _fits(more_section(name), plan, split)]
    assert names
    for stage, counts in run_on(plan.world_size, built, names, sizes, split):
        for name, count in counts.items():
            expected = stage_parameters(dimensions_of(more_section(name), plan.tp), plan, stage, split)
            assert count == [expected.total, expected.expert], name


def _stated(part: dict[str, int] | PipelineSplit) -> dict[str, int]:
    return part.arguments() if isinstance(part, PipelineSplit) else part


def _fits(model: ModelSection, plan: Any, split: PipelineSplit) -> bool:
    """Whether the plan and the split can hold the model."""
    return all_faults(PlanRecord.from_plan(plan), model=dimensions_of(model, plan.tp), split=split) == []


WITH_EXPERTS = "shared experts, first layer dense"


def own_shards(sizes: dict[str, int]) -> list[int]:
    """How many fp32 main parameters this rank's optimizer keeps: of dense parameters, and of experts."""
    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.models.gpt import GPT
    from mixle_megatron.models.naming import is_expert
    from mixle_megatron.optimizer_shards import model_parameters, own_value

    count = [0, 0]
    with MegatronBackend().prepare(
        GPT(more_section(WITH_EXPERTS)), plan=parallel_plan(**sizes), precision="bf16", device="cpu"
    ) as opened:
        names = {parameter: name for name, parameter in opened.stage.named_parameters()}
        for part, parameter in model_parameters(opened.stage.optimizer):
            value = own_value(part, parameter)
            count[is_expert(names[parameter])] += 0 if value is None else value.numel()
    return count


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp_shard": 2, "ep": 2},
        {"dp_shard": 4, "ep": 2},
        {"tp": 2, "dp_shard": 2, "ep": 2},
        {"dp_shard": 2, "cp": 2},
        {"dp_replicate": 2, "dp_shard": 2},
    ],
    ids=str,
)
def test_optimizers_keep_the_shards_that_the_formula_says(run_on, sizes: dict[str, int]) -> None:
    """Experts' over their own data-parallel ranks; Megatron's buffers pad the ends of shards a little."""
    plan = parallel_plan(**sizes)
    model, topology = dimensions_of(more_section(WITH_EXPERTS), plan.tp), Topology(plan)
    held = stage_parameters(model, plan, 0)
    memory = stage_memory(model, plan, 0, precision="bf16")
    for dense, expert in run_on(plan.world_size, own_shards, sizes):
        assert dense == pytest.approx(held.dense / topology.optimizer_shards, rel=0.02)
        assert expert == held.expert / topology.expert_optimizer_shards
        assert 4 * (dense + expert) == pytest.approx(memory.main_parameter_bytes, rel=0.02)
