"""The shipped configs: what they state against what was published of their models, and that they run.

Published numbers stand here by themselves, not taken from the files: parameters are those of the papers or
of the published weights, as each line says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from mixle.utils.parallel.training_contracts import ParallelPlan
from typer.testing import CliRunner

from mixle_megatron.config.check_files import check_files
from mixle_megatron.config.load import load_config
from mixle_megatron.config.model import ModelSection
from mixle_megatron.config.schema import Config, dimensions_of, effective_plan
from mixle_megatron.explain import explain
from mixle_megatron.optimizer_settings import OptimizerSettings
from mixle_megatron.parameter_count import (
    activated_parameters,
    model_parameters,
    parameter_count,
    word_parameters,
)
from mixle_megatron.pipeline_split import PipelineSplit
from mixle_megatron.plan_record import PlanRecord

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "configs").glob("*.yaml"))
TINY = {"tiny_gpt_cpu", "tiny_moe_cpu"}

PARAMETERS = {
    "gpt3_1_3b": 1.320e9,  # GPT-3 XL in appendix D of arXiv:2005.14165; table 2.1 rounds it to 1.3 billion
    "gpt3_6_7b": 6.660e9,  # the same table
    "gpt3_175b": 174.6e9,  # the same table
    "llama3_8b": 8.03e9,  # meta-llama/Meta-Llama-3-8B, numbers in its files
    "llama3_70b": 70.55e9,  # meta-llama/Meta-Llama-3-70B, likewise
    "llama3_405b": 405.85e9,  # meta-llama/Llama-3.1-405B, likewise
    "qwen3_8b": 8.19e9,  # Qwen/Qwen3-8B, likewise; its model card says 8.2 billion
    "qwen3_30b_a3b": 30.5e9,  # Qwen/Qwen3-30B-A3B, its model card
    "mixtral_8x7b": 46.7e9,  # Mistral AI's announcement of Mixtral 8x7B
    "deepseek_v3": 671e9,  # arXiv:2412.19437, without the prediction layer
}
WITHIN = 0.005

ACTIVATED = {
    "qwen3_30b_a3b": (3.3e9, 0.02),  # its model card, two digits, which are cut off and not rounded
    "mixtral_8x7b": (12.9e9, WITHIN),  # Mistral AI's announcement
}

TOKENS = {
    "gpt3_1_3b": 300e9,  # table 2.1 of arXiv:2005.14165, for every size
    "gpt3_6_7b": 300e9,
    "gpt3_175b": 300e9,
    "llama3_8b": 15e12,  # model card
    "llama3_70b": 15e12,
    "llama3_405b": 15.6e12,  # arXiv:2407.21783
    "qwen3_8b": 30e12,  # first stage, arXiv:2505.09388
    "qwen3_30b_a3b": 30e12,
    "mixtral_8x7b": 1e12,  # not published
    "deepseek_v3": 14.8e12,  # arXiv:2412.19437
}


@dataclass(frozen=True)
class Stated:
    """What the comments of a config state about its hardware and its batch."""

    gpus: int
    gpu: str
    gigabytes: int
    nodes: int
    gpus_per_node: int
    sequences: int
    seq_length: int
    tokens: int
    ranks: int
    microbatches: int


_STATED = re.compile(
    r"^# GPUs: (?P<gpus>[\d,]+) x (?P<gpu>.+), (?P<gigabytes>\d+) GB, (?P<nodes>[\d,]+) nodes? of "
    r"(?P<gpus_per_node>\d+)$\n"
    r"^# Batch: (?P<sequences>[\d,]+) sequences of (?P<seq_length>[\d,]+) tokens, "
    r"(?P<tokens>[\d,]+) tokens an update$.*"
    r"^plan: +# (?P<ranks>\d+) ranks: .*microbatches: auto, (?P<microbatches>\d+)$",
    flags=re.MULTILINE | re.DOTALL,
)


def stated(name: str) -> Stated:
    """The comments of a config, read."""
    found = _STATED.search((ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))
    assert found, "the comment says what the plan is for"
    values = {key: value.replace(",", "") for key, value in found.groupdict().items()}
    return Stated(**{key: value if key == "gpu" else int(value) for key, value in values.items()})  # type: ignore[arg-type]


@cache
def config(name: str) -> Config:
    """A shipped config."""
    return load_config(ROOT / "configs" / f"{name}.yaml").config


def near(published: float, within: float = WITHIN) -> Any:
    return pytest.approx(published, rel=within)


def test_every_published_model_has_a_file() -> None:
    names = {path.stem for path in FILES}
    assert names - TINY == set(PARAMETERS) == set(TOKENS)
    assert names >= TINY


def test_config_check_passes_all_at_once() -> None:
    from mixle_megatron.cli.main import app

    done = CliRunner().invoke(app, ["config", "check", *map(str, FILES)])
    assert done.exit_code == 0, done.output
    assert [line for line in done.stdout.splitlines() if line.endswith(": sound")] == [
        f"{path}: sound" for path in FILES
    ]


def test_the_only_warning_is_of_the_data_that_is_to_be_named() -> None:
    checked = check_files([str(path) for path in FILES])
    for path, verdict in checked.items():
        fields = [warning.field for warning in verdict.warnings]
        assert fields == ([] if Path(path).stem in TINY else ["data.paths"]), path


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_plan_is_for_the_gpus_that_are_stated(name: str) -> None:
    plan, said = effective_plan(config(name)), stated(name)
    assert said.gpus == said.nodes * said.gpus_per_node == plan.world_size == said.ranks
    assert plan.microbatches == said.microbatches
    assert said.gpus_per_node % plan.tp == 0, "tensor-parallel ranks share a node"


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_batch_and_the_run_are_those_that_are_stated(name: str) -> None:
    batch, said = explain(load_config(ROOT / "configs" / f"{name}.yaml"))["batch"], stated(name)
    assert batch["sequences_per_update"] == said.sequences
    assert batch["seq_length"] == said.seq_length
    assert batch["tokens_per_update"] == said.tokens == said.sequences * said.seq_length
    assert 0 <= batch["tokens_of_run"] - TOKENS[name] < batch["tokens_per_update"], "not an update more"


STATIC = ("parameter_bytes", "gradient_bytes", "main_parameter_bytes", "optimizer_state_bytes")


@pytest.mark.parametrize("name", PARAMETERS)
def test_what_a_rank_holds_leaves_room_on_the_gpu_that_is_stated(name: str) -> None:
    """All that is estimated fits; and what is there before any batch takes less than two fifths."""
    stages = explain(load_config(ROOT / "configs" / f"{name}.yaml"))["memory"]["stages"]
    there = stated(name).gigabytes * 1e9
    assert max(stage["total_bytes"] for stage in stages) < there
    assert max(sum(stage[part] for part in STATIC) for stage in stages) < 0.4 * there


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_number(name: str) -> None:
    model = dimensions_of(config(name).model)
    assert model_parameters(replace(model, mtp_num_layers=None)).total == near(PARAMETERS[name])


def built_on_meta(name: str, fields: dict[str, Any]) -> int:
    """How many numbers the whole model has on one rank, built by Megatron without any memory."""
    from mixle_megatron.host import cpu_runtime
    from mixle_megatron.models.gpt import GPT, build_gpt_stage
    from mixle_megatron.process_groups import destroy_groups, make_groups
    from mixle_megatron.random_state import seed_generators
    from mixle_megatron.translate import Host, transformer_config

    meta = torch.device("meta")
    with meta:
        # torch collects the functions that a device's context acts on when it first needs them, which
        # must not be while others stand in for them.
        assert torch.empty(1).is_meta
    model, host, plan = GPT(ModelSection(**fields)), Host.of(torch.device("cpu")), PlanRecord()
    with cpu_runtime(), patch.object(torch.cuda, "current_device", lambda: meta):
        groups = make_groups(plan)
        try:
            seed_generators(1234, groups)
            terms = transformer_config(plan, model.transformer_fields(), precision="bf16", host=host)
            with meta:
                stage = build_gpt_stage(terms, model.model, model.dimensions(1), groups, host)
        finally:
            destroy_groups(groups)
    assert all(parameter.is_meta for parameter in stage.parameters()), name
    return sum(parameter.numel() for parameter in stage.parameters())


@pytest.mark.parametrize("name", PARAMETERS)
def test_megatron_builds_as_many_parameters_as_are_counted(run_on, name: str) -> None:
    """The whole published model, its vocabulary's padding and its prediction layers included."""
    model = config(name).model
    (parameters,) = run_on(1, built_on_meta, name, model.model_dump())
    assert parameters == parameter_count(dimensions_of(model), PlanRecord(), 0)


@pytest.mark.parametrize("name", ACTIVATED)
def test_activated_parameters_are_the_published_number(name: str) -> None:
    published, within = ACTIVATED[name]
    assert activated_parameters(dimensions_of(config(name).model)) == near(published, within)


def test_parameters_of_deepseek_v3_in_all_its_published_parts() -> None:
    """README_WEIGHTS.md of its weights: what is activated is without the embedding, of which a token
    reads one row; the files hold embedding and output layer once more, with the prediction layer.
    """
    model = dimensions_of(config("deepseek_v3").model)
    embedding = word_parameters(model)
    assert embedding == near(0.9e9, 0.05)
    assert activated_parameters(model) - embedding == near(36.6e9)
    assert activated_parameters(model) == near(37e9, 0.02)
    assert model_parameters(model).total + 2 * embedding == near(685e9), "all that the files hold"
    predictions = model_parameters(model).total - model_parameters(replace(model, mtp_num_layers=None)).total
    assert predictions == near(11.5e9, 0.01)


def test_a_dense_model_activates_all_its_parameters() -> None:
    model = dimensions_of(config("llama3_8b").model)
    assert activated_parameters(model) == model_parameters(model).total


SMALL = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "kv_channels": 16,
    "ffn_hidden_size": 96,
    "seq_length": 32,
    "vocab_size": 257,
    "init_method_std": 0.1,
}
SMALL_EXPERTS = {"num_moe_experts": 8, "moe_ffn_hidden_size": 24, "moe_router_topk": 2}
SMALL_DEEPSEEK = SMALL_EXPERTS | {
    "moe_shared_expert_intermediate_size": 24,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_router_topk": 4,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "kv_channels": None,
    "q_lora_rank": 24,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}


def small_copy(name: str) -> dict[str, Any]:
    """The fields of a published model with every size small, and everything else as it is."""
    model = config(name).model
    changed: dict[str, Any] = dict(SMALL)
    if model.multi_latent_attention:
        changed |= SMALL_DEEPSEEK
    elif model.num_moe_experts is not None:
        changed |= SMALL_EXPERTS
    if model.num_query_groups is not None:
        changed["num_query_groups"] = 2
    return model.model_dump() | changed


def losses(fields: dict[str, Any], precision: str, sizes: dict[str, int], layout: str | None) -> list[float]:
    """The losses of some updates on four rows whose next tokens can be learnt."""
    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.models.gpt import GPT

    with MegatronBackend().prepare(
        GPT(ModelSection(**fields)),
        plan=ParallelPlan(**sizes),
        precision=precision,
        optimizer=OptimizerSettings(name="adam", lr=3e-3),
        pipeline=PipelineSplit(pipeline_model_parallel_layout=layout),
        device="cpu",
    ) as opened:
        windows = ((torch.arange(4 * 33) * 5) % 251).view(4, 33)
        rows = windows.chunk(opened.data_parallel_size)[opened.data_parallel_rank]
        return [opened.train_batch(rows[:, :-1], rows[:, 1:]).loss for _ in range(8)]


@pytest.mark.parametrize(
    "name",
    ["gpt3_1_3b", "llama3_8b", "llama3_405b", "qwen3_8b", "qwen3_30b_a3b", "mixtral_8x7b", "deepseek_v3"],
)
def test_a_small_copy_of_the_model_learns(run_on, name: str) -> None:
    """Every option of the file together, on the CPU, in its precision."""
    (curve,) = run_on(1, losses, small_copy(name), config(name).precision, {"microbatches": 2}, None)
    assert curve[-1] < 0.9 * curve[0]


def test_a_small_deepseek_v3_learns_the_same_over_the_axes_of_its_plan(run_on) -> None:
    """Stages laid out as in the file, and experts split: against one rank, of the same microbatches."""
    fields = small_copy("deepseek_v3")
    (alone,) = run_on(1, losses, fields, "fp32", {"microbatches": 4}, None)
    sizes = {"pp": 2, "dp_shard": 2, "ep": 2, "microbatches": 2}
    for curve in run_on(4, losses, fields, "fp32", sizes, "Ettt|tmL"):
        assert curve == pytest.approx(alone, rel=1e-4)


COLUMNS = ("tp", "pp", "dp_shard", "ep")
_ROW = re.compile(r"^\| `configs/(\w+)\.yaml` \| (.*) \| (.*) \| (.*) \| (.*) \|$", flags=re.MULTILINE)


def test_the_table_in_the_documents_is_that_of_the_files() -> None:
    text = (ROOT / "docs" / "configs.md").read_text(encoding="utf-8")
    rows = {name: cells for name, *cells in _ROW.findall(text)}
    assert set(rows) == {path.stem for path in FILES}
    for name in PARAMETERS:
        said, plan = stated(name), effective_plan(config(name))
        gpu = f"{said.gpus} {said.gpu.removeprefix('NVIDIA ')}, {said.gigabytes} GB"
        axes = ", ".join(f"{axis} {getattr(plan, axis)}" for axis in COLUMNS if getattr(plan, axis) > 1)
        assert rows[name][1:] == [gpu, axes, f"{said.sequences} x {said.seq_length}"], name
