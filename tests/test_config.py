"""Loading a config: values, sources, and every fault of it at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mixle_megatron.config.load import (
    LoadedConfig,
    check_config,
    config_from_mapping,
    load_config,
    resolved_yaml,
    warnings_of,
)
from mixle_megatron.config.schema import (
    Config,
    decay_steps,
    effective_config,
    effective_plan,
    model_dimensions,
    padded_vocab_size,
)
from mixle_megatron.config.schema_faults import dotted_keys
from mixle_megatron.errors import Fault, Refused, Unsupported
from mixle_megatron.rules import verdict

CONFIGS = Path(__file__).parent.parent / "configs"
TINY = CONFIGS / "tiny_gpt_cpu.yaml"
TINY_MOE = CONFIGS / "tiny_moe_cpu.yaml"


def tiny(*overrides: str) -> LoadedConfig:
    """The shipped example with overrides."""
    return load_config(TINY, overrides)


def refused(*overrides: str, path: Path = TINY) -> tuple[Fault, ...]:
    """The faults of a config that must be refused, by the schema or by the rules."""
    with pytest.raises(Refused) as caught:
        verdict(check_config(load_config(path, overrides)))
    return caught.value.faults


def fields(faults: tuple[Fault, ...]) -> set[str]:
    """What the faults are about."""
    return {fault.field for fault in faults}


def written(folder: Path, text: str | bytes) -> Path:
    """A config file with this content."""
    path = folder / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_example_is_sound_and_that_of_the_design() -> None:
    loaded = tiny()
    verdict(check_config(loaded))
    assert loaded.config.model.vocab_size == 257
    assert effective_plan(loaded.config).world_size == 2
    assert effective_plan(loaded.config).microbatches == 2


@pytest.mark.parametrize(
    "overrides",
    [
        ("run.steps=1",),
        ("plan.dp_shard=1",),
        ("plan.dp_replicate=2", "plan.dp_shard=2"),
        ("plan.tp=2", "plan.pp=2"),
        ("plan.tp=4", "plan.dp_shard=1"),
        ("plan.pp=4",),
        ("plan.gradient_accumulation_steps=2",),
        ("plan.dp_shard=4", "batch.micro_batch_size=2"),
        ("plan.cp=2",),
        ("plan.tp=2", "plan.cp=4", "plan.pp=2", "pipeline.virtual_pipeline_model_parallel_size=2"),
        ("plan.pp=2", "pipeline.num_layers_in_first_pipeline_stage=1"),
        ("plan.pp=2", "pipeline.pipeline_model_parallel_layout=Et|tttL"),
    ],
)
def test_example_runs_under_other_plans_by_overrides_alone(overrides: tuple[str, ...]) -> None:
    verdict(check_config(tiny(*overrides)))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("plan.ep=2",),
        ("plan.etp=2",),
        ("plan.tp=2",),
        ("plan.tp=2", "plan.ep=2"),
        ("plan.tp=2", "plan.etp=2"),
        ("plan.tp=2", "plan.ep=2", "plan.etp=2"),
        ("plan.cp=2", "plan.pp=2", "plan.ep=2"),
    ],
)
def test_example_of_experts_is_sound_under_its_plans(overrides: tuple[str, ...]) -> None:
    loaded = load_config(TINY_MOE, overrides)
    verdict(check_config(loaded))
    assert warnings_of(loaded) == []


def test_examples_have_the_same_sizes() -> None:
    dense, experts = tiny().config, load_config(TINY_MOE).config
    differing = {
        key
        for key in type(dense.model).model_fields
        if getattr(dense.model, key) != getattr(experts.model, key)
    }
    assert differing == {"num_moe_experts", "add_bias_linear", "moe_aux_loss_coeff"}
    assert dense.model_copy(update={"model": experts.model, "run": experts.run}) == experts


def test_sources_say_where_values_came_from() -> None:
    loaded = tiny("plan.tp=2", "optimizer={lr: 1e-4}")
    assert loaded.sources["plan.tp"] == "command line"
    assert loaded.sources["model.num_layers"].endswith("tiny_gpt_cpu.yaml:19")
    assert "optimizer.schedule" not in loaded.sources
    assert loaded.config.optimizer.lr == 1e-4
    assert loaded.config.optimizer.schedule == "cosine"


def test_numbers_that_yaml_takes_for_text_are_numbers() -> None:
    mapping = tiny().config.model_dump()
    mapping["optimizer"]["lr"] = "3e-4"
    assert config_from_mapping(mapping).optimizer.lr == 3e-4
    assert tiny("optimizer.adam_eps=1e-6").config.optimizer.adam_eps == 1e-6


def test_words_that_yaml_takes_for_other_things() -> None:
    config = tiny("logging.progress=off", "model.recompute_granularity=null", "checkpoint=null").config
    assert config.logging.progress == "off"
    assert config.model.recompute_granularity == "none"
    assert config.checkpoint.keep == 2


def test_interpolation() -> None:
    assert (
        tiny("model.max_position_embeddings=${model.seq_length}").config.model.max_position_embeddings == 128
    )
    faults = refused("model.kv_channels=${nope}", "plan.pp=3")
    assert [fault.field for fault in faults] == ["model.kv_channels", "plan.pp"]


@pytest.mark.parametrize(
    ("override", "field", "words"),
    [
        ("plan.tpp=2", "plan.tpp", "did you mean plan.tp?"),
        ("model.num_heads=2", "model.num_heads", "did you mean model.num_attention_heads?"),
        ("steps=2", "steps", "did you mean run.steps?"),
        ("plan.lr=2", "plan.lr", "did you mean optimizer.lr?"),
        ("plan.tp='2'", "plan.tp", "use 2 without quotes"),
        ("plan.tp=true", "plan.tp", "must be a whole number"),
        ("plan.tp=1.5", "plan.tp", "must be a whole number"),
        ("plan.tp=0", "plan.tp", "use 1 or more"),
        ("plan.tp=-2", "plan.tp", "must be at least 1"),
        ("plan.tp=", "plan.tp", "must be a whole number"),
        ("plan.tp=99999999999999999999", "plan.tp", "must be at most"),
        ("plan.microbatches=0", "plan.microbatches", "auto"),
        ("plan=3", "plan", "must be a mapping"),
        ("run.name=a/b", "run.name", "must be letters"),
        ("run.name=3", "run.name", 'quote it: "3"'),
        ("optimizer.lr=.nan", "optimizer.lr", "must be"),
        ("optimizer.lr=fast", "optimizer.lr", "must be a number"),
        ("optimizer.adam_beta1=1", "optimizer.adam_beta1", "must be below 1"),
        ("optimizer.name=adamw", "optimizer.name", "did you mean adam?"),
        ("model.activation_func=swiglu", "model.activation_func", "is not one of gelu"),
        ("model.qk_layernorm=1", "model.qk_layernorm", "must be true or false"),
        ("model.moe_layer_freq=0", "model.moe_layer_freq", "a whole number from 1, or a list of 0 and 1"),
        ("model.moe_layer_freq=[0,2]", "model.moe_layer_freq", "a whole number from 1, or a list of 0 and 1"),
        ("model.moe_layer_freq=[]", "model.moe_layer_freq", "a whole number from 1, or a list of 0 and 1"),
        ("model.moe_router_dtype=bf16", "model.moe_router_dtype", "is not one of fp32, fp64"),
        ("model.moe_z_loss_coeff=-1", "model.moe_z_loss_coeff", "use 0 or more"),
        ("model.moe_expert_capacity_factor=0", "model.moe_expert_capacity_factor", "must be above 0"),
        ("model.kv_lora_rank=0", "model.kv_lora_rank", "use 1 or more"),
        ("model.mtp_num_layers=0", "model.mtp_num_layers", "use 1 or more"),
        ("plan.ep=2", "plan.ep", "model.num_moe_experts is null; use 1"),
        ("plan.cp=3", "plan.cp", "use 1, 2, 4, 8, 16, 32 or 64 or model.seq_length 126 or 132"),
        (
            "pipeline.virtual_pipeline_model_parallel_size=2",
            "pipeline.virtual_pipeline_model_parallel_size",
            "leave it out, or use plan.pp=2 or more",
        ),
        ("pipeline.layout=EL", "pipeline.layout", "did you mean pipeline.pipeline_model_parallel_layout?"),
        ("data.paths=[]", "data.paths", "must not be empty"),
        ("data.paths=stdlib", "data.paths", "use [stdlib]"),
        ("data.source=csv", "data.source", "is not one of text"),
        ("precision=fp7", "precision", "is not one of"),
        ("model.vocab_size=256", "model.vocab_size", "use 257 or more"),
        ("optimizer.decay_steps=20", "optimizer.decay_steps", "use 21 or more"),
    ],
)
def test_one_fault_says_what_is_wrong_and_what_works(override: str, field: str, words: str) -> None:
    [fault] = refused(override)
    assert fault.field == field
    assert words in str(fault)
    assert fault.source == "command line"


def test_schema_and_rule_faults_come_together() -> None:
    faults = refused("plan.tpp=2", "plan.pp=3", "model.seq_length=x", "optimizer.min_lr=1")
    assert fields(faults) == {"plan.tpp", "model.seq_length", "optimizer.min_lr"}
    faults = refused("plan.tpp=2", "plan.pp=3", "optimizer.min_lr=1", "optimizer.clip_grad=x")
    assert fields(faults) == {"plan.tpp", "plan.pp", "optimizer.min_lr", "optimizer.clip_grad"}


def test_no_rule_speaks_of_a_value_that_is_not_known() -> None:
    faults = refused("plan.dp_shard=x", "batch.micro_batch_size=5")
    assert [fault.field for fault in faults] == ["plan.dp_shard"]


def test_bad_overrides_do_not_hide_other_faults() -> None:
    faults = refused("plan.tp", "=3", "plan.ep=[", "plan.pp=3", "data.paths.x=3")
    assert [fault.field for fault in faults] == ["override", "override", "plan.ep", "data.paths.x", "plan.pp"]


def test_a_later_override_wins() -> None:
    assert tiny("plan.tp=3", "plan.tp=2").config.plan.tp == 2


def test_missing_keys_are_explained() -> None:
    with pytest.raises(Refused) as caught:
        config_from_mapping({"run": {"name": "x"}})
    texts = [str(fault) for fault in caught.value.faults]
    assert "run.steps is required; state it (Optimizer updates of the whole run)" in texts
    assert "data is required; state it, with paths" in texts


@pytest.mark.parametrize(
    "overrides",
    [
        ("precision=fp8",),
        ("precision=mxfp8",),
        ("model.num_moe_experts=4", "model.moe_token_dispatcher_type=flex", "precision=fp16"),
    ],
)
def test_what_is_not_built_is_unsupported(overrides: tuple[str, ...]) -> None:
    with pytest.raises(Unsupported):
        verdict(check_config(tiny(*overrides)))


def test_words_where_megatron_has_null() -> None:
    config = tiny("model.moe_router_dtype=none", "model.moe_router_load_balancing_type=null").config
    assert config.model.moe_router_dtype is None
    assert config.model.moe_router_load_balancing_type == "none"
    assert tiny("model.moe_layer_freq=[0,1,1,1]").config.model.moe_layer_freq == [0, 1, 1, 1]


def test_interleaved_microbatches_are_judged_where_they_follow_from_the_batch() -> None:
    chunks = "pipeline.virtual_pipeline_model_parallel_size=2"
    [fault] = refused(chunks, "plan.pp=2", "batch.micro_batch_size=8")
    assert (fault.field, fault.value) == ("plan.microbatches", 1)
    assert fault.remedy == "use 2, 4 or 8, with batch.micro_batch_size 4, 2 or 1"
    faults = refused(chunks, "plan.pp=2", "batch.micro_batch_size=8", "model.vocab_size=3")
    assert fields(faults) == {"plan.microbatches", "model.vocab_size"}


def test_recomputed_layers_are_those_of_a_chunk() -> None:
    recompute = (
        "model.recompute_granularity=full",
        "model.recompute_method=block",
        "plan.pp=2",
        "model.recompute_num_layers=3",
    )
    verdict(check_config(tiny(*recompute, "pipeline.num_layers_in_first_pipeline_stage=1")))
    [fault] = refused(*recompute)
    assert fault.remedy == "use a number from 1 to 2"


def test_faults_carry_the_line_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, TINY.read_text().replace("num_attention_heads: 4", "num_attention_heads: 3"))
    faults = refused(path=path)
    assert {fault.source for fault in faults} == {f"{path}:20"}
    assert faults[0].field == "model.hidden_size"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "run is required"),
        (b"- a\n- b\n", "is not a mapping of sections"),
        (b"just text\n", "is not a mapping of sections"),
        (b"run: [1\n", "is not valid YAML"),
        (b"a: b: c\n", "is not valid YAML"),
        (b"run: {name: \xff}\n", "is not UTF-8 text"),
        (b"run: \x00\n", "is not valid YAML"),
        (b"run: {name: a}\nrun: {name: b}\n", "run is given twice, in lines 1 and 2"),
        (b"run:\n  name: a\n  name: b\n", "run.name is given twice, in lines 2 and 3"),
        (b"run: &a [*a]\n", ""),
        (b"--- {}\n--- {}\n", "is not valid YAML"),
        (b"run: !!python/object:os.system {}\n", ""),
        (b"a: " + b"[" * 5000, "nested more than"),
        (b"a: " + b"{a: " * 5000, "nested more than"),
        (b"a: " + b"1" * 5000, "cannot be read"),
        (b"x: " + b"y" * 300_000, "larger than"),
        (b"1: 2\nnull: 3\n", ""),
    ],
)
def test_files_that_are_no_config_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in "\n".join(map(str, refused(path=written(tmp_path, content))))


def test_aliases_that_stand_for_billions_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    assert "stands for more than" in str(refused(path=written(tmp_path, "\n".join(lines)))[0])


def test_paths_that_are_no_file_are_refused(tmp_path: Path) -> None:
    written(tmp_path, "")
    assert "is a folder" in str(refused(path=tmp_path)[0])
    assert "beside it are config.yaml" in str(refused(path=tmp_path / "confg.yaml")[0])


def test_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    verdict(check_config(load_config(written(tmp_path, b"\xef\xbb\xbf" + TINY.read_bytes()))))


def test_resolved_yaml_states_everything_and_loads_again(tmp_path: Path) -> None:
    loaded = tiny("model.num_query_groups=2", "logging.progress=off")
    text = resolved_yaml(loaded.config)
    values = yaml.safe_load(text)
    assert [f"{name}.{key}" for name in values if name != "precision" for key in values[name]] == list(
        dotted_keys()
    )
    assert values["model"]["ffn_hidden_size"] == 512
    assert values["optimizer"]["decay_steps"] == 200
    again = load_config(written(tmp_path, text)).config
    assert again == effective_config(loaded.config)
    assert resolved_yaml(again) == text


def test_derived_values() -> None:
    config = tiny("plan.tp=4", "optimizer.warmup_steps=300", "model.make_vocab_size_divisible_by=16").config
    assert padded_vocab_size(config) == 320
    assert model_dimensions(config).kv_channels == 32
    assert decay_steps(config) == 301


def test_mapping_is_judged_like_a_file() -> None:
    mapping = tiny().config.model_dump()
    assert config_from_mapping(mapping) == tiny().config
    mapping["plan"]["tpp"] = 1
    with pytest.raises(Refused, match=r"plan.tpp=1 is not a key of plan; did you mean plan.tp\?"):
        config_from_mapping(mapping)
    mapping["plan"] = mapping
    with pytest.raises(Refused, match="is nested without end"):
        config_from_mapping(mapping)
    with pytest.raises(Refused, match="is not a mapping"):
        config_from_mapping([])  # type: ignore[arg-type]


def test_data_is_judged_only_here() -> None:
    loaded = tiny("data.paths=[stdlib, /no/such/folder, /no/such/*.txt]")
    assert check_config(loaded) == []
    faults = check_config(loaded, here=True)
    found = [(fault.field, fault.value) for fault in faults]
    assert found == [("data.paths", "/no/such/folder"), ("data.paths", "/no/such/*.txt")]
    assert [fault.field for fault in check_config(tiny(), world_size=3)] == ["plan.world_size"]


def test_every_field_is_described() -> None:
    schema = Config.model_json_schema()
    sections = [schema, *schema["$defs"].values()]
    assert all(
        {"description", "$ref"} & set(field)
        for section in sections
        for field in section["properties"].values()
    )


def test_options_are_frozen() -> None:
    """A key that goes or changes its name breaks config files: do it on purpose."""
    assert sorted({key.partition(".")[0] for key in dotted_keys()} | {"precision"}) == [
        *("batch", "checkpoint", "data", "evaluation", "host", "logging", "model"),
        *("optimizer", "pipeline", "plan", "precision", "run"),
    ]
    assert len(list(dotted_keys())) == 121


UNREAD = {
    "optimizer.adam_beta1=0.8": "optimizer.name=sgd",
    "optimizer.sgd_momentum=0.5": "optimizer.name=adam",
    "optimizer.min_lr=0.0001": "optimizer.schedule=constant",
    "optimizer.init_lr=0.0001": "optimizer.warmup_steps=0",
    "optimizer.wsd_decay_steps=3": "optimizer.schedule=cosine",
    "model.rotary_base=5000": "model.position_embedding_type=learned_absolute",
    "model.add_qkv_bias=true": "model.add_bias_linear=true",
    "model.moe_router_topk=1": "model.num_moe_experts=null",
    "model.moe_layer_freq=[0,1,1,1]": "model.num_moe_experts=null",
    "model.q_lora_rank=8": "model.multi_latent_attention=false",
    "model.mtp_loss_scaling_factor=0.5": "model.mtp_num_layers=null",
}


UNREAD_BY_EXPERTS = {
    "model.moe_aux_loss_coeff=0.1": "model.moe_router_load_balancing_type=none",
    "model.moe_router_pre_softmax=true": "model.moe_router_score_function=sigmoid",
    "model.moe_router_num_groups=2": "model.moe_router_group_topk=null",
    "model.moe_router_bias_update_rate=0.1": "model.moe_router_enable_expert_bias=false",
    "model.moe_token_drop_policy=position": "model.moe_expert_capacity_factor=null",
}


@pytest.mark.parametrize("value", UNREAD)
def test_a_value_without_effect_is_a_warning_with_its_reason(value: str) -> None:
    (warning,) = warnings_of(tiny(value, UNREAD[value]))
    expected = f"command line: {value} has no effect with {UNREAD[value]}".replace(
        "[0,1,1,1]", "a list of 4 values"
    )
    assert str(warning).lower() == expected.lower()


@pytest.mark.parametrize("value", UNREAD_BY_EXPERTS)
def test_a_value_without_effect_on_experts_is_a_warning(value: str) -> None:
    reason = UNREAD_BY_EXPERTS[value]
    (warning,) = warnings_of(load_config(TINY_MOE, ["model.moe_aux_loss_coeff=0", value, reason]))
    assert str(warning) == f"command line: {value} has no effect with {reason}"
    (warning,) = warnings_of(tiny(value))
    assert "model.num_moe_experts=null" in str(warning)


def test_the_widths_of_heads_are_not_those_of_latent_attention() -> None:
    overrides = ("model.multi_latent_attention=true", "model.kv_channels=16", "model.add_qkv_bias=true")
    warnings = warnings_of(tiny(*overrides))
    assert [warning.field for warning in warnings] == ["model.kv_channels", "model.add_qkv_bias"]


def test_the_example_states_nothing_to_no_effect() -> None:
    assert warnings_of(tiny()) == []
