"""500 mutated configs: each is sound or refused, and none ends in a traceback."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from mixle_megatron.cli.main import app
from mixle_megatron.config.model import ModelSection
from mixle_megatron.config.schema import dimensions_of
from mixle_megatron.config.schema_faults import dotted_keys
from mixle_megatron.memory import memory_by_stage
from mixle_megatron.pipeline_split import PipelineSplit
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules import all_faults, recompute_faults

CONFIGS = Path(__file__).parent.parent / "configs"
EXAMPLES = [CONFIGS / "tiny_gpt_cpu.yaml", CONFIGS / "tiny_moe_cpu.yaml"]
MUTATIONS = 500
BATCHES = 10
WEIRD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**63, 10**30, -(10**30)),
    *(0.0, -0.0, 0.5, 1e-300, 1e300, 1.5, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        " ",
        "0",
        "auto",
        "none",
        "off",
        "nan",
        "1e-3",
        "1e999",
        "stdlib",
        "../..",
        "a/b",
        "${",
        "${plan.tp}",
    ),
    *(
        "${oc.env:NOT_SET}",
        "???",
        "\x7f",
        "\u2028",
        "\ud800",
        "\U0001f9ee",
        "x" * 5000,
        "%s",
        "{x}",
        "[bold]",
    ),
    *([0, 1, 1, 1], [1], [0] * 5000, "E|L", "Ett|ttL", "Et|t|t|tL", "(t|)*99999", "t*" + "9" * 5000),
    *([], [[]], [None], ["a", 1], {}, {"a": 1}, {"": 0}, {1: 2}, {None: 3}, {"a": {"b": {"c": {}}}}),
)
WEIRD_TEXTS = (
    "0x" + "f" * 5000,
    "1" * 5000,
    "!!set {a}",
    "!!binary aGk=",
    "&a [*a]",
    "*nope",
    "2001-01-01",
    "%",
    "@x",
)


def nested(depth: int) -> Any:
    """A mapping in a mapping, and so on."""
    value: Any = 1
    for _ in range(depth):
        value = {"run": value}
    return value


def pick_key(values: dict, chance: random.Random) -> tuple[dict, Any]:
    """A random mapping of the config and one of its keys."""
    mappings = [values, *(section for section in values.values() if isinstance(section, dict))]
    chosen = chance.choice([mapping for mapping in mappings if mapping] or [{"x": 1}])
    return chosen, chance.choice(list(chosen))


def delete_key(values: dict, chance: random.Random) -> None:
    mapping, key = pick_key(values, chance)
    del mapping[key]


def rename_key(values: dict, chance: random.Random) -> None:
    mapping, key = pick_key(values, chance)
    text = str(key)
    position = chance.randrange(len(text) + 1)
    mapping[text[:position] + chance.choice(["", "x", "_", ".", " "]) + text[position + 1 :]] = mapping.pop(
        key
    )


def change_value(values: dict, chance: random.Random) -> None:
    mapping, key = pick_key(values, chance)
    mapping[key] = chance.choice(WEIRD)


def set_known_key(values: dict, chance: random.Random) -> None:
    section, _, key = chance.choice(list(dotted_keys())).partition(".")
    if isinstance(values.setdefault(section, {}), dict):
        values[section][key] = chance.choice(WEIRD)


def set_sizes(values: dict, chance: random.Random) -> None:
    """Small numbers for a few of the keys that plans, experts and pipelines must agree on."""
    for _ in range(chance.randint(1, 4)):
        section, _, key = chance.choice(AGREEING).partition(".")
        if isinstance(values.setdefault(section, {}), dict):
            values[section][key] = chance.choice([1, 2, 2, 4, 3])


def change_number(values: dict, chance: random.Random) -> None:
    mapping, key = pick_key(values, chance)
    if isinstance(mapping[key], int):
        mapping[key] = chance.choice([mapping[key] + 1, mapping[key] * 2, mapping[key] * 3, 2, 5])


def move_section(values: dict, chance: random.Random) -> None:
    mapping, key = pick_key(values, chance)
    values[chance.choice(list(values) or ["x"])] = mapping[key]


def nest(values: dict, chance: random.Random) -> None:
    mapping, key = pick_key(values, chance)
    mapping[key] = nested(chance.choice([2, 10, 50]))


AGREEING = [
    *(f"plan.{axis}" for axis in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "etp")),
    *(key for key in dotted_keys() if key.startswith("pipeline.num") or key.startswith("pipeline.virtual")),
    *("model.num_moe_experts", "model.moe_router_topk", "model.moe_layer_freq", "model.mtp_num_layers"),
    *("model.moe_router_num_groups", "model.moe_router_group_topk", "model.q_lora_rank", "model.num_layers"),
]
CHANGES: tuple[Callable[[dict, random.Random], None], ...] = (
    *(delete_key, rename_key, change_value, change_value, set_known_key, set_known_key),
    *(change_number, change_number, set_sizes, set_sizes, set_sizes, move_section, nest),
)


def mutated_values(chance: random.Random) -> bytes:
    """The example with one to four structural changes."""
    values = yaml.safe_load(chance.choice(EXAMPLES).read_text())
    for _ in range(chance.randint(1, 4)):
        chance.choice(CHANGES)(values, chance)
    return yaml.safe_dump(values, allow_unicode=False).encode()


def mutated_text(chance: random.Random) -> bytes:
    """The example with changed lines and values that YAML itself stumbles over."""
    lines = chance.choice(EXAMPLES).read_text().splitlines()
    for _ in range(chance.randint(1, 4)):
        index = chance.randrange(len(lines))
        action = chance.randrange(5)
        if action == 0:
            lines[index] = lines[index].partition(":")[0] + ": " + chance.choice(WEIRD_TEXTS)
        elif action == 1:
            lines.insert(index, chance.choice(lines))
        elif action == 2:
            lines[index] = " " * chance.randrange(6) + lines[index].lstrip()
        elif action == 3 and len(lines) > 1:
            del lines[index]
        else:
            lines[index] += chance.choice([":", "[", "}", '"', "\t", "#", " &a", " *a", "\\", "|"])
    return "\n".join(lines).encode()


def mutated_bytes(chance: random.Random) -> bytes:
    """The example with random bytes in it, or cut short, or nothing but random bytes."""
    content = bytearray(chance.choice(EXAMPLES).read_bytes())
    action = chance.randrange(4)
    if action == 0:
        return chance.randbytes(chance.randrange(400))
    if action == 1:
        return bytes(content[: chance.randrange(len(content))])
    for _ in range(chance.randint(1, 8)):
        content[chance.randrange(len(content))] = chance.randrange(256 if action == 2 else 128)
    return bytes(content)


def mutated_overrides(chance: random.Random) -> list[str]:
    """Overrides of known and unknown keys, sound and not."""
    keys = [
        *dotted_keys(),
        "precision",
        "plan",
        "x",
        "",
        "a..b",
        "plan.",
        "data.paths.0",
        "data.paths[0]",
        "run.name.x",
    ]
    values = [str(value) for value in WEIRD] + [
        "[",
        "{",
        "{a: 1}",
        "2",
        "${run.seed}",
        "a=b",
        "&a [*a]",
        "[" * 2000,
    ]
    return [
        f"{chance.choice(keys)}{chance.choice(['=', '=', '=', '', ' ='])}{chance.choice(values)}"
        for _ in range(chance.randint(1, 3))
    ]


@pytest.mark.parametrize("batch", range(BATCHES))
def test_mutated_configs_are_sound_or_refused(batch: int, tmp_path: Path) -> None:
    runner, path = CliRunner(), tmp_path / "config.yaml"
    codes = []
    for number in range(batch, MUTATIONS, BATCHES):
        chance = random.Random(number)
        content = chance.choice([mutated_values, mutated_values, mutated_text, mutated_bytes])(chance)
        path.write_bytes(content)
        overrides = mutated_overrides(chance) if chance.random() < 0.3 else []
        command = chance.choice([["plan"], ["plan", "--json"], ["config", "check"], ["config", "show"]])
        result = runner.invoke(app, [*command, "--", str(path), *overrides])
        about = f"mutation {number}: {command} {overrides}\n{content!r}\n{result.output}"
        assert isinstance(result.exception, SystemExit | None), about + repr(result.exception)
        assert result.exit_code in (0, 2), about
        assert "Traceback" not in result.output, about
        assert result.exit_code == 0 or result.stderr.strip(), about
        codes.append(result.exit_code)
    assert {0, 2} == set(codes), "the mutations no longer reach both outcomes"


def expert_fields(chance: random.Random) -> dict[str, Any]:
    """Routing, widths and kernels of experts, sound and not."""
    return {
        "num_moe_experts": chance.choice([None, 1, 2, 4, 8]),
        "moe_router_topk": chance.choice([1, 2, 2, 3]),
        "moe_layer_freq": chance.choice([1, 1, 2, [0, 1, 1, 1], [0, 1]]),
        "moe_ffn_hidden_size": chance.choice([None, None, 8, 9]),
        "moe_shared_expert_intermediate_size": chance.choice([None, None, 8]),
        "moe_router_score_function": chance.choice(["softmax", "sigmoid"]),
        "moe_router_pre_softmax": chance.random() < 0.3,
        "moe_router_enable_expert_bias": chance.random() < 0.3,
        "moe_router_load_balancing_type": chance.choice(["aux_loss", "seq_aux_loss", "none"]),
        "moe_router_num_groups": chance.choice([None, None, 2, 3]),
        "moe_router_group_topk": chance.choice([None, None, 1, 2]),
        "moe_router_dtype": chance.choice([None, "fp32", "fp64"]),
        "moe_z_loss_coeff": chance.choice([None, 0.0, 1e-3]),
        "moe_token_dispatcher_type": chance.choice(["alltoall", "allgather"]),
        "moe_grouped_gemm": chance.random() < 0.2,
        "moe_expert_capacity_factor": chance.choice([None, None, 1.0, 5.0]),
        "moe_pad_expert_input_to_capacity": chance.random() < 0.2,
    }


def model_fields(chance: random.Random) -> dict[str, Any]:
    """A ``model`` section, sound or not, with experts, latent attention and prediction layers."""
    latent = chance.random() < 0.3
    return expert_fields(chance) | {
        "num_layers": chance.choice([4, 4, 6]),
        "hidden_size": 16,
        "num_attention_heads": 4,
        "seq_length": chance.choice([8, 16, 24]),
        "vocab_size": 257,
        "add_bias_linear": chance.random() < 0.3,
        "num_query_groups": chance.choice([None, None, 2]),
        "multi_latent_attention": latent,
        "position_embedding_type": "rope" if latent or chance.random() < 0.5 else "learned_absolute",
        "q_lora_rank": chance.choice([None, 6, 8]),
        "kv_lora_rank": 12,
        "qk_pos_emb_head_dim": chance.choice([4, 4, 3]),
        "mtp_num_layers": chance.choice([None, None, 1, 2]),
        "recompute_granularity": chance.choice(["none", "none", "full"]),
        "recompute_method": "uniform",
        "recompute_num_layers": chance.choice([1, 2]),
    }


def split_fields(chance: random.Random) -> dict[str, Any]:
    """A ``pipeline`` section."""
    layout = chance.choice(["Ett|ttL", "Et|t|t|tL", "E|tt|t|tmL", "Ettt|tmmL", "Ett|ttmL"])
    return {
        "virtual_pipeline_model_parallel_size": chance.choice([None, None, 1, 2]),
        "num_layers_in_first_pipeline_stage": chance.choice([None, None, 1, 2]),
        "num_layers_in_last_pipeline_stage": chance.choice([None, None, 1, 2]),
        "pipeline_model_parallel_layout": layout if chance.random() < 0.2 else None,
    }


def test_megatron_accepts_what_the_rules_accept() -> None:
    """Of every config that is sound, Megatron's own configurations can be made, and its memory told."""
    import torch

    from mixle_megatron.models.gpt import GPT
    from mixle_megatron.translate import Host, transformer_config

    host, sound = Host.of(torch.device("cpu")), 0
    for number in range(3000):
        chance = random.Random(number)
        model = ModelSection(**model_fields(chance))
        axes = {axis: chance.choice([1, 1, 2]) for axis in ("dp_replicate", "tp", "pp", "cp", "ep", "etp")}
        plan = PlanRecord(dp_shard=chance.choice([2, 4]), microbatches=2, **axes)
        split = PipelineSplit(**(split_fields(chance) if plan.pp > 1 else {}))
        sizes, provider = dimensions_of(model, plan.tp), GPT(model)
        if all_faults(plan, model=sizes, split=split) or _recomputes_too_much(model, plan, split):
            continue
        sound += 1
        transformer_config(plan, provider.transformer_fields(), precision="bf16", host=host, split=split)
        stages = memory_by_stage(sizes, plan, precision="bf16", split=split)
        assert sum(stage.layers * stage.stages for stage in stages) == model.num_layers
        assert all(stage.total_bytes >= stage.parameter_bytes >= 0 for stage in stages)
    assert sound > 150


def _recomputes_too_much(model: ModelSection, plan: PlanRecord, split: PipelineSplit) -> bool:
    """Whether the model's recomputation, which is no size of it, is refused."""
    most = split.most_layers(model.num_layers, plan.pp)
    chosen = model.recompute_granularity, model.recompute_method, model.recompute_num_layers
    return recompute_faults(*chosen, layers_per_stage=most, mtp_num_layers=model.mtp_num_layers) != []
