"""Every rule finds its fault, names numbers, and proposes values that work."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle_megatron.errors import Fault, Refused, Unsupported
from mixle_megatron.optimizer_settings import OptimizerSettings
from mixle_megatron.pipeline_split import PipelineSplit
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules import (
    AXES_NOT_EXECUTED,
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
def test_every_axis_is_executed(axis: str) -> None:
    assert plan_faults(PlanRecord(dp_shard=2, tp=2, **{axis: 2})) == []


def test_an_axis_that_is_not_executed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AXES_NOT_EXECUTED, "cp", "it is switched off here")
    faults = plan_faults(PlanRecord(cp=2))
    assert fields(faults) == ["plan.cp"]
    with pytest.raises(Unsupported, match="is not executed by this version: it is switched off here"):
        verdict(faults)


def test_unsupported_only_where_nothing_else_is_wrong() -> None:
    unsupported = precision_faults("nvfp4") + precision_faults("fp8")
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
    assert fields(faults) == ["plan.etp"]
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
    ("precision", "error"), [("fp8", Unsupported), ("nvfp4", Unsupported), ("fp7", Refused)]
)
def test_precisions_that_are_not_executed(precision: str, error: type[Refused]) -> None:
    with pytest.raises(error, match="use fp32, bf16 or fp16") as caught:
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
        PlanRecord(tp=3, pp=4, microbatches=5),
        model=model(seq_length=64, padded_vocab_size=258),
        batch=BatchDimensions(16, 4, 64),
        precision="fp8",
        world_size=2,
    )
    assert {fault.field for fault in faults} == {
        *("plan.tp", "plan.pp", "plan.microbatches", "plan.world_size"),
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


def expert_model(**changes: object) -> ModelDimensions:
    """A sound model with experts, with some fields changed."""
    return model(**({"num_moe_experts": 8, "moe_ffn_hidden_size": 24, "add_bias_linear": False} | changes))


def test_cp_splits_sequences_in_twice_as_many_chunks() -> None:
    [fault] = plan_model_faults(PlanRecord(cp=3), MODEL)
    assert fault == Fault(
        "plan.cp",
        3,
        "splits model.seq_length=32, which is no multiple of 2 · cp = 6",
        "use 1, 2, 4, 8 or 16 or model.seq_length 30 or 36",
    )
    wide = model(seq_length=24, max_position_embeddings=24, padded_vocab_size=260)
    assert plan_model_faults(PlanRecord(cp=3, tp=4), wide) == []
    [fault] = plan_model_faults(PlanRecord(cp=4, tp=4), wide)
    assert fault.rule.endswith("which is no multiple of 2 · cp = 8 and cp · plan.tp = 16")
    assert fault.remedy == "use 1, 2, 3 or 6 or model.seq_length 16 or 32"


@settings(max_examples=200)
@given(st.integers(1, 12), st.sampled_from([1, 2, 4]), st.integers(1, 96))
def test_a_proposed_cp_or_sequence_is_accepted(cp: int, tp: int, sequence: int) -> None:
    sizes = model(seq_length=sequence, max_position_embeddings=2048, padded_vocab_size=260)
    for fault in plan_model_faults(PlanRecord(cp=cp, tp=tp), sizes):
        if fault.field != "plan.cp":
            continue
        sizes_text = fault.remedy.partition("model.seq_length ")[2]
        axis_text = fault.remedy.partition("model.seq_length ")[0]
        for value in map(int, re.findall(r"\d+", axis_text)):
            assert "plan.cp" not in fields(plan_model_faults(PlanRecord(cp=value, tp=tp), sizes))
        for value in map(int, re.findall(r"\d+", sizes_text)):
            longer = dataclasses.replace(sizes, seq_length=value)
            assert plan_model_faults(PlanRecord(cp=cp, tp=tp), longer) == []


def test_experts_axes_need_experts() -> None:
    faults = plan_model_faults(PlanRecord(dp_shard=2, tp=2, ep=2, etp=2), model(padded_vocab_size=258))
    assert [(fault.field, fault.remedy) for fault in faults] == [("plan.ep", "use 1"), ("plan.etp", "use 1")]
    assert "model.num_moe_experts is null" in faults[0].rule


def test_ep_and_etp_divide_the_experts() -> None:
    assert plan_model_faults(PlanRecord(dp_shard=8, ep=4, etp=2), expert_model()) == []
    [fault] = plan_model_faults(PlanRecord(dp_shard=6, ep=3), expert_model())
    assert fault == Fault("plan.ep", 3, "does not divide model.num_moe_experts=8", "use 1 or 2")
    [fault] = plan_model_faults(PlanRecord(dp_shard=10, etp=5), expert_model())
    assert fault == Fault("plan.etp", 5, "does not divide model.moe_ffn_hidden_size=24", "use 1 or 2")


def test_predictions_of_further_tokens_run_where_one_rank_is_followed() -> None:
    untied = {"share_embeddings_and_output_weights": False}
    predicting = model(mtp_num_layers=1, position_embedding_type="rope", **untied)
    assert plan_model_faults(PlanRecord(pp=2, dp_shard=2), predicting) == []
    [fault] = plan_model_faults(PlanRecord(cp=2), predicting)
    assert (fault.field, fault.remedy) == ("plan.cp", "use 1")
    [fault] = plan_model_faults(PlanRecord(pp=2), model(mtp_num_layers=1, position_embedding_type="rope"))
    assert (fault.field, fault.remedy) == (
        "model.share_embeddings_and_output_weights",
        "use false, or plan.pp=1",
    )
    learned = model(mtp_num_layers=1, **untied)
    assert plan_model_faults(PlanRecord(dp_shard=2), learned) == []
    [fault] = plan_model_faults(PlanRecord(pp=2), learned)
    assert (fault.field, fault.remedy) == ("model.position_embedding_type", "use rope, or plan.pp=1")


def test_tp_cuts_shared_experts_and_the_dense_layers_that_are_left() -> None:
    shared = expert_model(moe_shared_expert_intermediate_size=7, ffn_hidden_size=9, padded_vocab_size=258)
    [fault] = plan_model_faults(PlanRecord(tp=2), shared)
    assert "moe_shared_expert_intermediate_size=7" in fault.rule
    first_dense = dataclasses.replace(shared, moe_layer_freq=[0, 1, 1, 1, 1, 1])
    named = [fault.rule.partition("=")[0] for fault in plan_model_faults(PlanRecord(tp=2), first_dense)]
    assert [name.rpartition(".")[2] for name in named] == [
        "ffn_hidden_size",
        "moe_shared_expert_intermediate_size",
    ]


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"moe_router_topk": 9}, "moe_router_topk", "use at most 8"),
        ({"moe_router_topk": 1}, "moe_router_topk", "use model.moe_router_pre_softmax=true"),
        ({"moe_layer_freq": [1, 0]}, "moe_layer_freq", "use 6 values, or a whole number"),
        ({"moe_layer_freq": [0] * 6}, "moe_layer_freq", "use a 1 in it, or model.num_moe_experts=null"),
        (
            {"moe_router_enable_expert_bias": True},
            "moe_router_enable_expert_bias",
            "use model.moe_router_score_function=sigmoid, or false",
        ),
        ({"moe_router_group_topk": 2}, "moe_router_group_topk", "use model.moe_router_num_groups 2, 4 or 8"),
        (
            {"moe_router_group_topk": 1, "moe_router_num_groups": 3},
            "moe_router_num_groups",
            "use 1, 2, 4 or 8",
        ),
        (
            {"moe_router_group_topk": 1, "moe_router_num_groups": 8},
            "moe_router_group_topk",
            "use 2",
        ),
        (
            {"moe_router_group_topk": 5, "moe_router_num_groups": 4, "moe_router_topk": 3},
            "moe_router_group_topk",
            "use a number from 2 to 3",
        ),
        ({"moe_token_dispatcher_type": "flex"}, "moe_token_dispatcher_type", "use alltoall or allgather"),
        (
            {"moe_pad_expert_input_to_capacity": True},
            "moe_pad_expert_input_to_capacity",
            "use model.moe_expert_capacity_factor=1.0, or false",
        ),
        (
            {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 4.5},
            "moe_expert_capacity_factor",
            "use at most 4 (num_moe_experts / moe_router_topk)",
        ),
        ({"add_bias_linear": True}, "add_bias_linear", "use false"),
    ],
)
def test_experts_have_megatrons_conditions(changes: dict[str, object], field: str, remedy: str) -> None:
    assert model_faults(expert_model()) == []
    [fault] = model_faults(expert_model(**changes))
    assert fault.field == f"model.{field}"
    assert fault.remedy.startswith(remedy)
    assert model_faults(model(**(changes | {"num_moe_experts": None}))) == [], "of a dense model"


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 6),
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 5),
    st.booleans(),
    st.booleans(),
)
def test_routing_that_is_accepted_can_be_computed(
    experts: int, topk: int, groups: int | None, chosen: int | None, sigmoid: bool, pre_softmax: bool
) -> None:
    """Each token gets topk experts of Megatron's own routing, whatever the logits."""
    function = "sigmoid" if sigmoid else "softmax"
    sizes = expert_model(
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_router_num_groups=groups,
        moe_router_group_topk=chosen,
        moe_router_score_function=function,
        moe_router_pre_softmax=pre_softmax,
    )
    if model_faults(sizes):
        return
    import torch
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    _, chosen_experts = topk_routing_with_score_function(
        torch.randn(16, experts, generator=torch.Generator().manual_seed(experts)),
        topk,
        use_pre_softmax=pre_softmax,
        num_groups=groups,
        group_topk=chosen,
        score_function=function,
    )
    assert chosen_experts.sum(dim=1).tolist() == [topk] * 16


def test_layers_with_experts_are_counted_without_walking_them() -> None:
    for frequency in (1, 2, 3, [0, 1, 1, 0, 1, 0]):
        sizes = expert_model(moe_layer_freq=frequency)
        for start in range(7):
            for end in range(start, 7):
                walked = sum(sizes.is_moe_layer(layer) for layer in range(start, end))
                assert sizes.moe_layers(start, end) == walked
    assert MODEL.moe_layers(0, 6) == 0
    assert not MODEL.is_moe_layer(0)


def test_latent_attention_turns_its_own_positions_and_has_no_groups() -> None:
    latent = model(
        multi_latent_attention=True,
        position_embedding_type="rope",
        num_query_groups=8,
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_pos_emb_head_dim=8,
    )
    assert model_faults(latent) == []
    assert model_faults(dataclasses.replace(latent, hidden_size=60, kv_channels=7)) == []
    [fault] = model_faults(dataclasses.replace(latent, position_embedding_type="learned_absolute"))
    assert (fault.field, fault.remedy) == ("model.position_embedding_type", "use rope")
    [fault] = model_faults(dataclasses.replace(latent, num_query_groups=4))
    assert (fault.field, fault.remedy) == ("model.num_query_groups", "use 8, or leave it out")
    [fault] = model_faults(dataclasses.replace(latent, qk_pos_emb_head_dim=7))
    assert (fault.field, fault.remedy) == ("model.qk_pos_emb_head_dim", "use 6 or 8")
    whole = dataclasses.replace(latent, padded_vocab_size=260)
    assert plan_model_faults(PlanRecord(tp=4), whole) == []
    odd = dataclasses.replace(whole, q_lora_rank=6, kv_lora_rank=15)
    rules = [fault.rule for fault in plan_model_faults(PlanRecord(tp=4), odd)]
    assert rules == [
        "does not divide model.q_lora_rank=6",
        "does not divide model.kv_lora_rank + model.qk_pos_emb_head_dim=23",
    ]


def test_predictions_stay_within_a_sequence() -> None:
    assert model_faults(model(mtp_num_layers=31)) == []
    [fault] = model_faults(model(mtp_num_layers=32))
    assert (fault.field, fault.remedy) == ("model.mtp_num_layers", "use at most 31")


def test_virtual_stages_are_judged_with_everything_else() -> None:
    split = PipelineSplit(virtual_pipeline_model_parallel_size=3)
    plan = PlanRecord(pp=2, microbatches=4)
    assert all_faults(plan, model=MODEL, split=split) == []
    assert fields(all_faults(PlanRecord(pp=2, microbatches=3), model=MODEL, split=split)) == [
        "plan.microbatches"
    ]
    assert fields(all_faults(plan, model=model(num_layers=4), split=split)) == [
        "pipeline.virtual_pipeline_model_parallel_size"
    ]
