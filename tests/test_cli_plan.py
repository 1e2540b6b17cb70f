"""``mixle-megatron plan`` and ``config``: what they print, their exit codes, and what they never import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mixle_megatron.cli.main import app
from mixle_megatron.explain import ranks_in_short

CONFIGS = Path(__file__).parent.parent / "configs"
TINY, TINY_MOE = str(CONFIGS / "tiny_gpt_cpu.yaml"), str(CONFIGS / "tiny_moe_cpu.yaml")


def run(*arguments: str) -> Result:
    """The program in this process."""
    return CliRunner().invoke(app, list(arguments))


def plan(*overrides: str, config: str = TINY) -> dict:
    """The JSON of ``plan`` for a shipped example."""
    result = run("plan", config, "--json", *overrides)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_plan_prints_every_part() -> None:
    result = run("plan", TINY, "plan.tp=2", "plan.pp=2")
    assert result.exit_code == 0
    for words in (
        "dense grid: tp · cp · dp · pp = 2 · 1 · 2 · 2 = 8 ranks",
        "expert grid: etp · ep · edp · pp = 1 · 1 · 4 · 2 = 8 ranks",
        "num_distributed_optimizer_instances",
        "tensor_model_parallel_size",
        "Memory of one rank",
        "optimizer.adam_beta2",
        "command line",
    ):
        assert words in result.stdout


def test_plan_of_experts_prints_both_grids_and_what_lies_on_them() -> None:
    result = run("plan", TINY_MOE, "plan.tp=2", "plan.ep=2", "plan.etp=2", "plan.cp=2", "plan.dp_shard=4")
    assert result.exit_code == 0
    for words in (
        "dense grid: tp · cp · dp · pp = 2 · 2 · 4 · 1 = 16 ranks",
        "expert grid: etp · ep · edp · pp = 2 · 2 · 4 · 1 = 16 ranks",
        "each sharded over 8 ranks (ZeRO-1); that of experts over 4",
        "expert_model_parallel_size",
        "moe_token_dispatcher_type",
        "2,097,152 of them in experts",
        "of experts",
    ):
        assert words in result.stdout
    assert "of them in experts" not in run("plan", TINY).stdout


def test_json_has_the_groups_and_the_parameters_of_experts() -> None:
    explanation = plan("plan.tp=2", "plan.ep=2", config=TINY_MOE)
    assert explanation["grids"]["expert"] == {"etp": 1, "ep": 2, "edp": 2, "pp": 1}
    assert explanation["grids"]["expert_optimizer_shards"] == 2
    last = explanation["ranks"]["listed"][3]
    assert last["megatron"] == {"tp": 1, "cp": 0, "dp": 1, "pp": 0, "etp": 0, "ep": 1, "edp": 1}
    assert last["groups"]["ep"] == {"size": 2, "ranks": "2,3"}
    assert last["groups"]["expt_dp"] == {"size": 2, "ranks": "1,3"}
    memory = explanation["memory"]
    assert memory["expert_parameters"] == 4 * 4 * 2 * 512 * 128
    assert memory["stages"][0]["expert_parameters"] * 2 == memory["expert_parameters"]
    config = explanation["megatron"]["TransformerConfig"]
    assert (config["num_moe_experts"], config["moe_ffn_hidden_size"]) == (4, 512)


def test_json_has_the_groups_of_context_parallelism() -> None:
    explanation = plan("plan.cp=2", "plan.tp=2")
    assert explanation["ranks"]["listed"][3]["mixle"]["cp"] == 1
    assert explanation["ranks"]["listed"][3]["groups"]["cp"] == {"size": 2, "ranks": "1,3"}
    assert explanation["grids"]["optimizer_shards"] == 4


def test_latent_attention_and_predictions_are_among_megatrons_arguments() -> None:
    overrides = ("model.multi_latent_attention=true", "model.position_embedding_type=rope")
    config = plan(*overrides, "model.mtp_num_layers=2")["megatron"]["TransformerConfig"]
    assert config["rope_type"] == "rope"
    assert (config["kv_lora_rank"], config["q_lora_rank"], config["mtp_num_layers"]) == (512, None, 2)
    assert not {"rope_type", "mtp_num_layers", "num_moe_experts"} & set(
        plan()["megatron"]["TransformerConfig"]
    )


def test_stages_are_shown_where_they_are_not_equal_parts() -> None:
    assert "Pipeline:" not in run("plan", TINY, "plan.pp=2").stdout
    assert plan("plan.pp=2")["pipeline"]["listed"] == [
        {"stage": 0, "chunks": [[0, 1]], "prediction_layers": 0},
        {"stage": 1, "chunks": [[2, 3]], "prediction_layers": 0},
    ]
    overrides = ("plan.pp=2", "pipeline.pipeline_model_parallel_layout=Ett|t|tm|L")
    assert "put every m before the L" in run("plan", TINY, *overrides, "model.mtp_num_layers=1").stderr
    overrides = (
        "plan.pp=2",
        "pipeline.pipeline_model_parallel_layout=E|tt|t|tmL",
        "model.mtp_num_layers=1",
        "model.position_embedding_type=rope",
        "model.share_embeddings_and_output_weights=false",
    )
    pipeline = plan(*overrides)["pipeline"]
    assert [stage["chunks"] for stage in pipeline["listed"]] == [[[], [2, 2]], [[0, 1], [3, 3]]]
    assert [stage["prediction_layers"] for stage in pipeline["listed"]] == [0, 1]
    megatron = plan(*overrides)["megatron"]
    assert megatron["initialize_model_parallel"]["virtual_pipeline_model_parallel_size"] == 2
    assert megatron["TransformerConfig"]["pipeline_model_parallel_layout"] == "E|tt|t|tmL"
    table = run("plan", TINY, *overrides).stdout
    assert "Pipeline: 2 stage(s) of 2 chunk(s)" in table
    assert "none" in table


def test_json_is_one_stable_object() -> None:
    explanation = plan()
    assert list(explanation) == [
        *("path", "plan", "grids", "megatron", "batch", "pipeline", "memory", "ranks", "values", "warnings"),
    ]
    assert explanation["plan"]["world_size"] == 2
    assert plan() == explanation


def test_json_says_what_an_update_reads() -> None:
    batch = plan("plan.gradient_accumulation_steps=2", "plan.dp_shard=2")["batch"]
    assert batch["microbatches"] == 1
    assert batch["sequences_per_microbatch"] == 4
    assert batch["sequences_per_call_and_rank"] == 4
    assert batch["sequences_per_update_and_rank"] == 8
    assert batch["sequences_per_update"] == 16
    assert batch["tokens_per_update"] == 16 * 128
    assert batch["tokens_of_run"] == 200 * 16 * 128


def test_json_gives_each_ranks_place_and_groups() -> None:
    ranks = plan("plan.dp_replicate=2", "plan.tp=2")["ranks"]
    assert ranks["left_out"] == 0
    assert [rank["rank"] for rank in ranks["listed"]] == list(range(8))
    last = ranks["listed"][7]
    assert last["mixle"] == {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "pp": 0, "cp": 0}
    assert last["megatron"] == {"tp": 1, "cp": 0, "dp": 3, "pp": 0, "etp": 0, "ep": 0, "edp": 7}
    assert last["groups"]["dp"] == {"size": 4, "ranks": "1-7:2"}
    assert last["groups"]["intra_dp_cp"] == {"size": 2, "ranks": "5,7"}


def test_many_ranks_are_told_by_their_ends() -> None:
    overrides = ("plan.dp_shard=64", "plan.tp=4", "batch.global_batch_size=256")
    ranks = plan(*overrides)["ranks"]
    assert ranks["left_out"] == 256 - 16
    assert [rank["rank"] for rank in ranks["listed"]][7:9] == [7, 248]
    assert ranks["listed"][-1]["node"] == 31
    assert "240 left out" in run("plan", TINY, *overrides).stdout


def test_a_plan_beyond_any_machine_is_told_all_the_same() -> None:
    largest = 2**31 - 1
    result = run(
        *("plan", TINY, f"plan.dp_shard={largest}", f"batch.global_batch_size={largest}"),
        *("batch.micro_batch_size=1", f"model.num_layers={largest}", f"plan.pp={largest}"),
        *("model.num_moe_experts=2", "model.moe_layer_freq=3", "model.add_bias_linear=false"),
    )
    assert result.exit_code == 0
    assert f"{largest**2} ranks" in result.stdout


def test_ranks_per_node() -> None:
    assert run("plan", TINY, "--ranks-per-node", "0").exit_code == 2
    result = run("plan", TINY, "--json", "--ranks-per-node", "1")
    assert [rank["node"] for rank in json.loads(result.stdout)["ranks"]["listed"]] == [0, 1]


def test_every_effective_value_is_shown_with_its_origin() -> None:
    values = {entry["key"]: entry for entry in plan("run.steps=7")["values"]}
    assert values["plan.microbatches"] == {"key": "plan.microbatches", "value": 2, "source": "default: auto"}
    assert values["run.steps"]["source"] == "command line"
    assert values["optimizer.decay_steps"]["value"] == 21
    assert values["model.ffn_hidden_size"] == {
        "key": "model.ffn_hidden_size",
        "value": 512,
        "source": "default",
    }
    assert values["model.num_layers"]["source"].endswith("tiny_gpt_cpu.yaml:19")


def test_missing_data_is_a_warning_of_the_plan() -> None:
    result = run("plan", TINY, "data.paths=[/no/such/file]")
    assert result.exit_code == 0
    assert "warning: data.paths=/no/such/file does not exist" in result.stdout


def test_a_value_without_effect_is_a_warning_of_check_too() -> None:
    result = run("config", "check", TINY, "model.moe_router_topk=1")
    assert result.exit_code == 0
    assert "model.moe_router_topk=1 has no effect with model.num_moe_experts=null" in result.stderr
    assert "warning" not in run("config", "check", TINY, TINY_MOE).output


@pytest.mark.parametrize("command", [("plan",), ("config", "show"), ("config", "check"), ("pretrain",)])
def test_refusal_is_one_message_and_exit_code_2(command: tuple[str, ...]) -> None:
    result = run(*command, TINY, "plan.tp=3", "plan.ppp=2")
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert "plan.tp=3 does not divide model.num_attention_heads=4; use 1, 2 or 4" in result.stderr
    assert "did you mean plan.pp?" in result.stderr


def test_usage_errors_are_exit_code_2() -> None:
    assert run("plan").exit_code == 2
    assert run("nothing").exit_code == 2
    assert run("config", "check").exit_code == 2
    assert run("config", "check", "plan.tp=2").exit_code == 2


def test_check_judges_each_file(tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.touch()
    result = run("config", "check", TINY, str(empty))
    assert result.exit_code == 2
    assert f"{TINY}: sound" in result.stdout
    assert f"{empty}: 5 faults" in result.stderr
    assert run("config", "check", TINY).exit_code == 0


def test_check_gives_faults_as_data() -> None:
    result = run("config", "check", "--json", TINY, "plan.pp=3")
    assert result.exit_code == 2
    [fault] = json.loads(result.stdout)["files"][TINY]["faults"]
    assert fault == {
        "field": "plan.pp",
        "value": 3,
        "rule": "does not divide model.num_layers=4",
        "remedy": "use 1, 2 or 4",
        "source": "command line",
    }


def test_check_here_judges_data_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("config", "check", TINY, "data.paths=[/no/such/file]")
    assert run(*arguments).exit_code == 0
    assert "warning" in run(*arguments).stderr
    assert run(*arguments, "--here").exit_code == 2
    monkeypatch.setenv("WORLD_SIZE", "3")
    result = run("config", "check", "--here", TINY)
    assert result.exit_code == 2
    assert "there are, 3" in result.stderr


def test_show_prints_what_loads_again(tmp_path: Path) -> None:
    shown = run("config", "show", TINY, "plan.tp=2").stdout
    path = tmp_path / "shown.yaml"
    path.write_text(shown)
    assert run("config", "show", str(path)).stdout == shown


def test_schema_is_json_schema() -> None:
    schema = json.loads(run("config", "schema").stdout)
    assert schema["$defs"]["PlanSection"]["additionalProperties"] is False
    assert schema["required"] == ["run", "model", "batch", "optimizer", "data"]


@pytest.mark.parametrize(
    "arguments",
    [
        *(("plan", TINY), ("plan", TINY, "--json"), ("plan", TINY_MOE, "plan.ep=2", "plan.cp=2")),
        *(("config", "check", TINY), ("config", "schema"), ("--help",)),
    ],
)
def test_nothing_loads_torch(arguments: tuple[str, ...]) -> None:
    program = (
        "import sys, atexit\n"
        "from mixle_megatron.cli.main import app\n"
        "try:\n    app(sys.argv[1:])\n"
        "except SystemExit as end:\n    assert end.code in (0, None), end.code\n"
        "loaded = {'torch', 'megatron', 'mixle', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_module_is_the_same_program() -> None:
    program = [sys.executable, "-m", "mixle_megatron", "config", "check", TINY, "plan.tp=3"]
    result = subprocess.run(program, capture_output=True, text=True)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), ""),
        ((3,), "3"),
        ((3, 4), "3,4"),
        ((0, 1, 2, 3), "0-3"),
        ((0, 2, 4, 6), "0-6:2"),
        ((0, 8), "0,8"),
        ((0, 1, 2, 8, 9, 10), "0-2,8-10"),
        ((0, 1, 8, 9), "0,1,8,9"),
        (tuple(range(0, 90, 10)), "0-80:10"),
        (
            tuple(value for base in range(0, 100, 10) for value in (base, base + 1)),
            "0,1,10,11,20,21,30,31,…,90,91",
        ),
    ],
)
def test_ranks_are_told_in_short(ranks: tuple[int, ...], text: str) -> None:
    assert ranks_in_short(ranks, most_runs=4) == text
