"""Every rule finds its fault, names numbers, and proposes values that work."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle_megatron.errors import Fault, Refused, Unsupported
from mixle_megatron.optimizer_settings import OptimizerSettings
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules import (
    BatchDimensions,
    ModelDimensions,
    all_faults,
    batch_faults,
    model_faults,
    padded_vocab_size,
    plan_faults,
    plan_model_faults,
    precision_faults,
    recompute_faults,
    resolve_microbatches,
    schedule_faults,
    verdict,
    vocabulary_faults,
    world_faults,
)
from mixle_megatron.rules.nearest import divisors, listed, multiples_around, nearest

MODEL = ModelDimensions(
    num_layers=6,
    hidden_size=64,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=8,
    ffn_hidden_size=256,
    seq_length=32,
    vocab_size=257,
    padded_vocab_size=257,
    max_position_embeddings=32,
)


def model(**changes: object) -> ModelDimensions:
    """The sound model with some fields changed."""
    return dataclasses.replace(MODEL, **changes)


def fields(faults: list[Fault]) -> list[str]:
    """What the faults are about."""
    return [fault.field for fault in faults]


def test_sound_input_has_no_faults() -> None:
    plan = PlanRecord(dp_replicate=2, dp_shard=2, tp=2, pp=3, microbatches=2)
    assert (
        all_faults(
            plan,
            model=model(padded_vocab_size=258),
            batch=BatchDimensions(16, 2, 32),
            precision="bf16",
            world_size=24,
        )
        == []
    )
    verdict([])


def test_tp_against_heads_has_the_form_of_a_fault() -> None:
    [fault] = [
        fault
        for fault in plan_model_faults(PlanRecord(tp=3), model(padded_vocab_size=258))
        if "heads" in fault.rule
    ]
    assert fault == Fault("plan.tp", 3, "does not divide model.num_attention_heads=8", "use 1, 2 or 4")


def test_tp_is_judged_against_everything_it_cuts() -> None:
    faults = plan_model_faults(PlanRecord(tp=3), model(padded_vocab_size=258))
    named = [re.search(r"model\.(\w+)", fault.rule).group(1) for fault in faults]
    assert named == ["num_attention_heads", "num_query_groups", "ffn_hidden_size", "seq_length"]


def test_tp_against_the_vocabulary() -> None:
    assert (
        plan_model_faults(PlanRecord(tp=2), model(padded_vocab_size=257))[0].field
        == "model.padded_vocab_size"
    )
    assert plan_model_faults(PlanRecord(tp=2), model(padded_vocab_size=258)) == []
    small = model(vocab_size=1, padded_vocab_size=2)
    assert fields(plan_model_faults(PlanRecord(tp=2), small)) == ["plan.tp"]
    assert fields(plan_model_faults(PlanRecord(), model(padded_vocab_size=256))) == [
        "model.padded_vocab_size"
    ]


@given(st.integers(1, 10**6), st.integers(1, 64), st.integers(1, 128))
def test_padded_vocabulary_is_the_next_multiple(vocab_size: int, tp: int, divisor: int) -> None:
    padded = padded_vocab_size(vocab_size, tp, divisor)
    assert padded % (tp * divisor) == 0
    assert vocab_size <= padded < vocab_size + tp * divisor


def test_pp_against_layers() -> None:
    [fault] = plan_model_faults(PlanRecord(pp=4), MODEL)
    assert fault == Fault("plan.pp", 4, "does not divide model.num_layers=6", "use 1, 2, 3 or 6")
    assert fields(plan_model_faults(PlanRecord(pp=12), MODEL)) == ["plan.pp"]


def test_prefixes_are_the_callers() -> None:
    [fault] = plan_model_faults(PlanRecord(pp=4), MODEL, plan_prefix="prepare.plan", model_prefix="config")
    assert (fault.field, fault.rule) == ("prepare.plan.pp", "does not divide config.num_layers=6")


@pytest.mark.parametrize("axis", ["cp", "ep", "etp"])
def test_axes_that_are_not_built_are_refused_by_name(axis: str) -> None:
    faults = plan_faults(PlanRecord(dp_shard=2, tp=2, **{axis: 2}))
    assert fields(faults) == [f"plan.{axis}"]
    with pytest.raises(Unsupported, match="is not executed by this version"):
        verdict(faults)


def test_unsupported_only_where_nothing_else_is_wrong() -> None:
    unsupported = plan_faults(PlanRecord(cp=2)) + precision_faults("fp8")
    with pytest.raises(NotImplementedError):
        verdict(unsupported)
    with pytest.raises(Refused) as caught:
        verdict([*unsupported, Fault("plan.tp", 3, "does not divide")])
    assert not isinstance(caught.value, Unsupported)
    assert len(caught.value.faults) == 3


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_sizes_are_whole_numbers_from_one(value: object) -> None:
    assert fields(plan_faults(PlanRecord(tp=value, pp=value))) == ["plan.tp", "plan.pp"]


def test_ep_must_divide_the_data_parallel_size() -> None:
    faults = [
        fault for fault in plan_faults(PlanRecord(dp_shard=2, dp_replicate=3, ep=4)) if "divide" in fault.rule
    ]
    assert faults[0].rule == "does not divide plan.dp_replicate=3 · plan.dp_shard=2 = 6"
    assert faults[0].remedy == "use 1, 2, 3 or 6"


def test_etp_must_divide_the_ranks_that_experts_have() -> None:
    faults = plan_faults(PlanRecord(dp_shard=2, tp=2, ep=2, etp=3))
    assert fields(faults) == ["plan.ep", "plan.etp", "plan.etp"]
    assert faults[-1].remedy == "use 1 or 2"


def test_world_size_against_ranks() -> None:
    plan = PlanRecord(dp_shard=2, tp=2)
    assert world_faults(plan, 4) == []
    [fault] = world_faults(plan, 8)
    assert fault.value == 4
    assert "there are, 8" in fault.rule
    assert fault.remedy == "start 4 ranks, or use plan.dp_shard=4"
    assert world_faults(plan, 7)[0].remedy == "start 4 ranks"


def test_auto_microbatches_follow_from_the_batch() -> None:
    plan = PlanRecord(dp_shard=2, gradient_accumulation_steps=2)
    assert resolve_microbatches(plan, BatchDimensions(48, 4, 8)) == 3
    assert batch_faults(plan, BatchDimensions(48, 4, 8)) == []
    assert resolve_microbatches(plan, BatchDimensions(50, 4, 8)) is None


def test_batch_that_does_not_divide_names_values_that_do() -> None:
    [fault] = batch_faults(PlanRecord(dp_shard=3), BatchDimensions(16, 4, 8))
    assert fault.field == "batch.global_batch_size"
    assert "= 12" in fault.rule
    assert "batch.global_batch_size 12 or 24" in fault.remedy
    assert "plan.dp_replicate · plan.dp_shard 1, 2 or 4" in fault.remedy
    assert "micro_batch_size" not in fault.remedy


def test_stated_microbatches_must_agree() -> None:
    batch = BatchDimensions(16, 4, 8)
    assert batch_faults(PlanRecord(dp_shard=2), batch, 2) == []
    [fault] = batch_faults(PlanRecord(dp_shard=2), batch, 3)
    assert (fault.field, fault.value, fault.remedy) == ("plan.microbatches", 3, "use auto or 2")
    assert "= 24 sequences" in fault.rule


def test_heads_against_hidden_size_and_groups() -> None:
    [fault] = model_faults(model(hidden_size=60, kv_channels=7))
    assert fault.remedy.startswith("use model.hidden_size 56 or 64, model.num_attention_heads ")
    assert model_faults(model(hidden_size=60, kv_channels=16)) == []
    [fault] = model_faults(model(num_query_groups=3))
    assert (fault.field, fault.remedy) == ("model.num_query_groups", "use 1, 2, 4 or 8")


def test_heads_wider_than_the_model_are_faults_and_no_crash() -> None:
    assert fields(model_faults(model(hidden_size=4, kv_channels=0))) == ["model.hidden_size"]
    narrow = model(hidden_size=4, kv_channels=0, position_embedding_type="rope")
    assert fields(model_faults(narrow)) == ["model.hidden_size"]


def test_rotary_positions_turn_pairs() -> None:
    [fault] = model_faults(model(kv_channels=9, position_embedding_type="rope"))
    assert (fault.field, fault.remedy) == ("model.kv_channels", "use 8 or 10")
    half = model(kv_channels=8, position_embedding_type="rope", rotary_percent=0.5)
    assert model_faults(half) == []
    assert len(model_faults(dataclasses.replace(half, rotary_percent=0.4))) == 1


def test_sequence_against_positions() -> None:
    [fault] = model_faults(model(seq_length=64))
    assert fault.field == "model.seq_length"
    assert fault.remedy == "use at most 32, or model.max_position_embeddings=64"


def test_vocabulary_against_the_tokenizer() -> None:
    assert vocabulary_faults(257, "byte") == []
    [fault] = vocabulary_faults(256, "byte")
    assert (fault.field, fault.remedy) == ("model.vocab_size", "use 257 or more")


@pytest.mark.parametrize(
    ("precision", "error"), [("fp16", Unsupported), ("nvfp4", Unsupported), ("fp7", Refused)]
)
def test_precisions_that_are_not_executed(precision: str, error: type[Refused]) -> None:
    with pytest.raises(error, match="use fp32 or bf16") as caught:
        verdict(precision_faults(precision))
    assert type(caught.value) is error


def test_recomputation_has_megatrons_conditions() -> None:
    def found(*arguments: object) -> list[str]:
        return fields(recompute_faults(*arguments, layers_per_stage=2))

    assert found("none", "uniform", 3) == []
    assert found("selective", "none", None) == []
    assert found("selective", "none", 1) == ["model.recompute_num_layers"]
    assert found("full", "none", None) == ["model.recompute_method", "model.recompute_num_layers"]
    assert found("full", "block", 3) == ["model.recompute_num_layers"]
    assert found("full", "block", 2) == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"min_lr": 0.2}, "min_lr"),
        ({"init_lr": 0.2}, "init_lr"),
        ({"warmup_steps": 10}, "decay_steps"),
        ({"schedule": "WSD"}, "wsd_decay_steps"),
        ({"schedule": "WSD", "wsd_decay_steps": 9, "warmup_steps": 2}, "wsd_decay_steps"),
        ({"end_weight_decay": 0.2}, "end_weight_decay"),
        ({"end_weight_decay": 0.0, "weight_decay_incr_style": "linear"}, "end_weight_decay"),
    ],
)
def test_schedules_have_megatrons_conditions(changes: dict[str, object], field: str) -> None:
    sound = OptimizerSettings(lr=0.1, decay_steps=10)
    assert schedule_faults(sound) == []
    assert fields(schedule_faults(dataclasses.replace(sound, **changes))) == [f"optimizer.{field}"]


def test_all_faults_come_at_once() -> None:
    faults = all_faults(
        PlanRecord(tp=3, pp=4, cp=2, microbatches=5),
        model=model(seq_length=64, padded_vocab_size=258),
        batch=BatchDimensions(16, 4, 64),
        precision="fp8",
        world_size=2,
    )
    assert {fault.field for fault in faults} == {
        *("plan.cp", "plan.tp", "plan.pp", "plan.microbatches", "plan.world_size"),
        *("model.seq_length", "precision"),
    }


@settings(max_examples=200)
@given(st.integers(1, 5000), st.integers(1, 5000))
def test_nearest_values_work(number: int, target: int) -> None:
    proposed = nearest(divisors(number), target)
    assert proposed
    assert all(number % value == 0 for value in proposed)
    assert all(value % number == 0 and value >= number for value in multiples_around(target, number))


def test_lists_read_as_sentences() -> None:
    assert [listed(values) for values in ([], [1], [1, 2], [1, 2, 4])] == ["", "1", "1 or 2", "1, 2 or 4"]


@settings(max_examples=200)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 64), st.integers(1, 6))
def test_a_proposed_tp_is_accepted(tp: int, heads: int, sequence: int, layers: int) -> None:
    """What one refusal proposes must not be refused by the next."""
    sizes = model(num_layers=layers, num_attention_heads=heads, num_query_groups=heads, seq_length=sequence)
    for fault in plan_model_faults(PlanRecord(tp=tp), dataclasses.replace(sizes, padded_vocab_size=tp * 257)):
        for value in map(int, re.findall(r"\d+", fault.remedy)):
            padded = dataclasses.replace(sizes, padded_vocab_size=257 * value)
            assert plan_model_faults(PlanRecord(tp=value), padded) == []
