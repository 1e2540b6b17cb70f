"""How layers are dealt to stages: the rules and the layers of each stage against Megatron's own."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mixle_megatron.errors import Fault, Refused
from mixle_megatron.pipeline_split import EVEN, MOST_LETTERS, PipelineSplit, parsed_layout
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules import ModelDimensions, interleaving_faults, recompute_faults
from mixle_megatron.rules.pipeline import pipeline_faults

MODEL = ModelDimensions(
    num_layers=8,
    hidden_size=16,
    num_attention_heads=2,
    num_query_groups=2,
    kv_channels=8,
    ffn_hidden_size=32,
    seq_length=8,
    vocab_size=16,
    padded_vocab_size=16,
    max_position_embeddings=8,
)

SIZE = st.integers(1, 4)
OPTIONAL = st.none() | SIZE
SPLITS = st.builds(
    PipelineSplit,
    virtual_pipeline_model_parallel_size=OPTIONAL,
    num_layers_in_first_pipeline_stage=OPTIONAL,
    num_layers_in_last_pipeline_stage=OPTIONAL,
)
CHUNKS = st.lists(st.sampled_from(["t", "tt", "t*3", "(t)*2", "t,t", "m", "tm", "mm", ""]), max_size=4)


@st.composite
def sound_splits(draw: st.DrawFn) -> tuple[PipelineSplit, int, int]:
    """A split, stages and layers that belong together."""
    pp, chunks, size = draw(st.integers(2, 5)), draw(SIZE), draw(SIZE)
    first, last = draw(OPTIONAL), draw(OPTIONAL if pp > 2 else st.none())
    stated = [number for number in (first, last) if number is not None]
    layers = chunks * (sum(stated) + size * (pp - len(stated)))
    uneven = [None if number is None else number * chunks for number in (first, last)]
    return PipelineSplit(chunks if chunks > 1 else draw(st.sampled_from([None, 1])), *uneven), pp, layers


@st.composite
def layouts(draw: st.DrawFn) -> str:
    """Layout strings, most of them nearly right."""
    inside = "|".join(draw(CHUNKS))
    start, end = (
        draw(st.sampled_from(["E", "E", "E", "Et", "", "EE"])),
        draw(st.sampled_from(["L", "L", "|L", ""])),
    )
    return start + inside + end


def faults(split: PipelineSplit, pp: int, layers: int = 8, mtp: int | None = None) -> list[Fault]:
    """What is wrong with a split of a model of so many layers."""
    model = dataclasses.replace(MODEL, num_layers=layers, mtp_num_layers=mtp)
    return pipeline_faults(PlanRecord(pp=pp), model, split)


def megatrons_config(split: PipelineSplit, pp: int, layers: int, mtp: int | None = None) -> Any:
    """Megatron's TransformerConfig of the same split."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mixle_megatron.megatron_names import model_parallel_arguments

    return TransformerConfig(
        num_layers=layers,
        hidden_size=16,
        num_attention_heads=2,
        mtp_num_layers=mtp,
        pipeline_dtype="float32",
        **model_parallel_arguments(PlanRecord(pp=pp), split),
    )


def megatrons_layers(split: PipelineSplit, pp: int, layers: int) -> list[list[range]]:
    """The layers of each chunk as Megatron counts them; this process is no rank of any group."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config, chunks = megatrons_config(split, pp, layers), split.chunks(pp)
    found: list[list[range]] = []
    for stage in range(pp):
        found.append([])
        for chunk in range(chunks):
            place = {"vp_stage": chunk if chunks > 1 else None, "pp_rank": stage}
            start, size = (
                get_transformer_layer_offset(config, **place),
                get_num_layers_to_build(config, **place),
            )
            found[-1].append(range(start, start + size))
    return found


@settings(max_examples=200, deadline=None)
@given(sound_splits())
def test_every_stage_holds_the_layers_that_megatron_gives_it(case: tuple[PipelineSplit, int, int]) -> None:
    split, pp, layers = case
    assert faults(split, pp, layers) == []
    held = [split.stage_layers(layers, pp, stage) for stage in range(pp)]
    assert held == megatrons_layers(split, pp, layers)
    assert split.layers(layers, pp) == [[len(chunk) for chunk in stage] for stage in held]
    assert split.most_layers(layers, pp) == max(len(chunk) for stage in held for chunk in stage)
    in_model_order = [layer for turn in zip(*held, strict=True) for chunk in turn for layer in chunk]
    assert in_model_order == list(range(layers))


@settings(max_examples=300, deadline=None)
@given(layouts(), st.integers(1, 3), st.sampled_from([None, 1, 2]))
def test_a_layout_that_is_accepted_is_one_that_megatron_accepts(text: str, pp: int, mtp: int | None) -> None:
    split = PipelineSplit(pipeline_model_parallel_layout=text)
    layers = "".join(parsed_layout(text)).count("t")
    assume(layers > 0)
    found = faults(split, pp, layers, mtp)
    if found:
        assert all(str(fault) for fault in found)
        return
    layout = megatrons_config(split, pp, layers, mtp).pipeline_model_parallel_layout
    from megatron.core.transformer.enums import LayerType

    counts = [[chunk.count(LayerType.decoder) for chunk in stage] for stage in layout.layout]
    assert split.layers(layers, pp) == counts
    if mtp:
        assert LayerType.mtp in layout.layout[split.prediction_stage(pp)][-1]


@settings(max_examples=300, deadline=None)
@given(SPLITS, st.integers(1, 5), st.integers(1, 24))
def test_what_is_accepted_can_be_built(split: PipelineSplit, pp: int, layers: int) -> None:
    if faults(split, pp, layers):
        return
    if pp > 1:
        megatrons_layers(split, pp, layers)
    else:
        megatrons_config(split, pp, layers)


@settings(max_examples=300, deadline=None)
@given(SPLITS, st.integers(1, 6), st.integers(1, 40))
def test_a_proposed_value_is_accepted(split: PipelineSplit, pp: int, layers: int) -> None:
    """What one refusal proposes must not be refused by the next."""
    for fault in faults(split, pp, layers):
        if not re.fullmatch(r"use [\d, or]+", fault.remedy):
            continue
        for value in map(int, re.findall(r"\d+", fault.remedy)):
            section, name = fault.field.split(".")
            changed = dataclasses.replace(split, **{name: value}) if section == "pipeline" else split
            stages = value if section == "plan" else pp
            again = faults(changed, stages, layers)
            assert fault.field not in [each.field for each in again], f"{fault} -> {value}: {again}"


@pytest.mark.parametrize(
    ("layout", "pp", "words"),
    [
        ("Et*4|t*4L", 2, ""),
        ("E|t*8|L", 3, ""),
        ("Et|(tt|)*3tL", 5, ""),
        ("Et,t,t,t|t*4L", 2, ""),
        ("Et*4|t*4", 2, "does not end with its one L, the loss"),
        ("t*4|Et*4L", 2, "does not begin with its one E, the embedding"),
        ("Et*4|t*4L|", 3, "does not end with its one L"),
        ("Et*4|t*3L", 2, "has 7 t, not model.num_layers=8; use 8 of them, or model.num_layers=7"),
        ("Et*4||t*4L", 3, "has nothing in chunk 2 of 3"),
        ("Et*4|t*2|t*2L", 2, "has 3 chunks, which is no multiple of plan.pp=2; use 2 or 4 chunks"),
        ("Et*4|x*4L", 2, "has x, which means nothing; use E (the embedding)"),
        ("((t)*2)*2", 2, "which means nothing"),
        ("Et*4|t*4L", 1, "has 2 chunks, which plan.pp=1 cannot interleave"),
        ("Et*4|t*4mL", 2, "has 1 m, not model.mtp_num_layers=null; use 0 of them, or model.mtp_num_layers=1"),
        ("E(t|)*99999999L", 2, "stands for more than 100000 letters"),
        ("E(t|)*" + "9" * 5000, 2, "stands for more than"),
        ("E((t*9)*9999|)*999", 2, "has ( or ), which means nothing"),
        ("E(t*9)*9999|t*99999L", 2, "stands for more than"),
    ],
)
def test_layouts(layout: str, pp: int, words: str) -> None:
    found = faults(PipelineSplit(pipeline_model_parallel_layout=layout), pp)
    assert bool(found) == bool(words)
    assert words in "\n".join(map(str, found))
    assert len(str(found)) < 2000


@pytest.mark.parametrize(
    ("layout", "pp", "words"),
    [
        ("Et*4|t*4mmL", 2, ""),
        ("Et*4|t*3mmtL", 2, "has a layer t after a prediction layer m; move every m behind the last t"),
        ("Et*4|t*2|t*2m|mL", 2, "has m in 2 chunks; put every m before the L"),
        ("Et*4|t*4mm|L|", 2, "does not end with its one L"),
        ("Et*2|t*2|t*2|t*2mm|t,L", 5, "has 9 t"),
        ("Et*4|t*2|t*2mm|L", 2, "is not executed by this version: prediction layers use the embedding"),
        ("Et*4|t*4mm|L", 3, "is not executed by this version: prediction layers use the embedding"),
        ("Et*4|t*4|mmL", 3, "is not executed by this version: prediction layers are built like"),
    ],
)
def test_predictions_in_layouts(layout: str, pp: int, words: str) -> None:
    found = faults(PipelineSplit(pipeline_model_parallel_layout=layout), pp, mtp=2)
    assert bool(found) == bool(words)
    assert words in "\n".join(map(str, found))


def test_what_is_stated_together_must_agree() -> None:
    layout = "Et|tt|tt|tttL"
    both = PipelineSplit(pipeline_model_parallel_layout=layout, num_layers_in_first_pipeline_stage=1)
    assert [fault.remedy for fault in faults(both, 2)] == ["leave one of them out"]
    assert faults(PipelineSplit(2, pipeline_model_parallel_layout=layout), 2) == []
    [fault] = faults(PipelineSplit(3, pipeline_model_parallel_layout=layout), 2)
    assert str(fault).endswith(
        "is not the 2 chunks that the layout gives each of plan.pp=2 stages; use 2, or leave it out"
    )


def test_one_stage_has_nothing_to_share() -> None:
    for split in (PipelineSplit(2), PipelineSplit(None, 3), PipelineSplit(None, None, 3)):
        [fault] = faults(split, 1)
        assert "plan.pp=2 or more" in fault.remedy
    assert faults(PipelineSplit(1), 1) == faults(EVEN, 1) == []


def test_uneven_stages_have_numbers_and_values_that_work() -> None:
    [fault] = faults(PipelineSplit(None, 3), 3)
    assert fault == Fault(
        "pipeline.num_layers_in_first_pipeline_stage",
        3,
        "leaves 5 of model.num_layers=8 to 2 stages, which cannot share them equally",
        "use 2, 4 or 6",
    )
    [fault] = faults(PipelineSplit(None, 3, 3), 2)
    rest = "is not the rest of model.num_layers=8 beside pipeline.num_layers_in_last_pipeline_stage=3"
    assert (fault.rule, fault.remedy) == (f"{rest}, with plan.pp=2", "use 5")
    [fault] = faults(PipelineSplit(2, 4, 4), 2)
    assert fault.remedy == "leave num_layers_in_last_pipeline_stage out: that stage holds the rest"
    assert faults(PipelineSplit(2, 4), 2) == []
    [fault] = faults(PipelineSplit(2), 8)
    assert str(fault) == (
        "pipeline.virtual_pipeline_model_parallel_size=2 does not divide the 1 layer(s) of a stage "
        "(model.num_layers=8 / plan.pp=8); use 1"
    )


@settings(max_examples=100)
@given(st.integers(1, 6), SIZE, st.integers(1, 40))
def test_interleaving_wants_groups_of_microbatches(pp: int, chunks: int, microbatches: int) -> None:
    found = interleaving_faults(PlanRecord(pp=pp), PipelineSplit(chunks), microbatches)
    assert bool(found) == (pp > 1 and chunks > 1 and microbatches % pp > 0)
    for fault in found:
        for value in map(int, re.findall(r"\d+", fault.remedy)):
            assert interleaving_faults(PlanRecord(pp=pp), PipelineSplit(chunks), value) == []


def test_interleaving_proposes_what_the_batch_gives() -> None:
    [fault] = interleaving_faults(PlanRecord(pp=2), PipelineSplit(2), 3, sequences=12)
    assert fault.field == "plan.microbatches"
    assert fault.remedy == "use 2, 4 or 6, with batch.micro_batch_size 6, 3 or 2"
    [fault] = interleaving_faults(PlanRecord(pp=4), PipelineSplit(2), 3, sequences=6)
    assert fault.remedy == ""


def test_recomputed_predictions_are_recomputed_singly() -> None:
    def found(method: str, number: int, mtp: int | None) -> list[str]:
        arguments = {"layers_per_stage": 4, "mtp_num_layers": mtp}
        return [fault.field for fault in recompute_faults("full", method, number, **arguments)]

    assert found("uniform", 2, None) == found("uniform", 1, 1) == found("block", 2, 1) == []
    assert found("uniform", 2, 1) == ["model.recompute_num_layers"]


def test_layouts_without_end_are_not_written_out() -> None:
    with pytest.raises(Refused, match="stands for more than"):
        parsed_layout("t*" + str(MOST_LETTERS + 1))
    assert parsed_layout("(t|)*2t*3") == ["t", "t", "ttt"]
    assert parsed_layout("E,t,t") == ["Ett"]


def test_stages_beyond_any_list_are_not_walked() -> None:
    pp = 2**31 - 1
    assert EVEN.stage_layers(pp, pp, pp - 1) == [range(pp - 1, pp)]
    assert PipelineSplit(None, 5).stage_layers(pp + 4, pp, 7) == [range(11, 12)]
