"""The closed form of activations against what autograd keeps, and schedules against walking them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_gpts import LLAMA, parallel_plan

from mixle_megatron.activations import ActivationTerms, LayerActivations
from mixle_megatron.config.model import ModelSection
from mixle_megatron.config.schema import dimensions_of
from mixle_megatron.memory import PARAMETER_BYTES, stage_activations
from mixle_megatron.passes_in_flight import ChunkActivations, most_in_flight
from mixle_megatron.pipeline_split import EVEN, PipelineSplit

SEQUENCE, VOCABULARY, ROWS = 64, 256, 2
SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": SEQUENCE,
    "vocab_size": VOCABULARY,
}
EXPERTS = LLAMA | {"num_moe_experts": 4, "moe_ffn_hidden_size": 40, "moe_layer_freq": [0, 1, 1, 1]}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block"}
WITHIN_DOCUMENTS = "attention within documents"
MODELS: dict[str, dict[str, Any]] = {
    "gelu": {},
    "relu without biases": {"activation_func": "relu", "add_bias_linear": False},
    "SwiGLU, grouped queries": LLAMA,
    "norms of heads": LLAMA | {"qk_layernorm": True},
    "latent": LLAMA
    | {
        "num_query_groups": 4,
        "multi_latent_attention": True,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "qk_layernorm": True,
    },
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    WITHIN_DOCUMENTS: {},
    "predictions": LLAMA | {"mtp_num_layers": 1, "share_embeddings_and_output_weights": False},
    "experts": EXPERTS,
    "shared experts": EXPERTS | {"moe_shared_expert_intermediate_size": 56},
    "selective": LLAMA | {"recompute_granularity": "selective"},
    "selective, whole heads": {"recompute_granularity": "selective"},
    "full": LLAMA | FULL,
    "full in twos": FULL | {"recompute_num_layers": 2},
    "full, experts": EXPERTS | FULL,
    "a block of two": BLOCK | {"recompute_num_layers": 2},
    "a block of all": BLOCK | {"recompute_num_layers": 4},
}
"""What differs from a small GPT-2."""

HALVED = ["gelu", "SwiGLU, grouped queries", "dropout", "experts", "full", "selective"]
"""Those that are also measured in bf16, of which torch keeps some tensors in fp32."""

PLANS: list[tuple[dict[str, int], PipelineSplit, str, list[str]]] = [
    ({}, EVEN, "fp32", list(MODELS)),
    ({}, EVEN, "bf16", HALVED),
    ({"tp": 2}, EVEN, "fp32", ["gelu", "SwiGLU, grouped queries", "full", "experts"]),
    ({"pp": 2, "microbatches": 4}, EVEN, "fp32", ["gelu", "full", "selective"]),
    ({"pp": 2, "microbatches": 4}, PipelineSplit(2), "fp32", ["gelu", "full"]),
    ({"dp_shard": 2, "ep": 2}, EVEN, "fp32", ["experts"]),
]


def section(name: str) -> ModelSection:
    """The ``model`` section of one of :data:`MODELS`."""
    return ModelSection(**(SIZES | MODELS[name]))


def measured(
    names: list[str], precision: str, sizes: dict[str, int], split: PipelineSplit
) -> tuple[int, dict[str, int]]:
    """This rank's stage, and the most that it keeps of each model at one time."""
    from kept_activations import most_kept

    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.documents import DocumentBounds
    from mixle_megatron.models.gpt import GPT

    rows, kept = ROWS * sizes.get("microbatches", 1), {}
    for name in names:
        with MegatronBackend().prepare(
            GPT(section(name)),
            plan=parallel_plan(**sizes),
            precision=precision,
            device="cpu",
            pipeline=split,
            documents=DocumentBounds(0, attention=True) if name == WITHIN_DOCUMENTS else None,
        ) as opened:
            kept[name] = most_kept(opened, rows, SEQUENCE, VOCABULARY)
    return opened.coordinate["pp"], kept


def expected(name: str, precision: str, plan: Any, split: PipelineSplit, stage: int) -> int:
    """What the closed form says of it."""
    model = section(name)
    terms = ActivationTerms(
        micro_batch_size=ROWS,
        element_bytes=PARAMETER_BYTES[precision],
        activation_func=model.activation_func,
        recompute_granularity=model.recompute_granularity,
        recompute_method=model.recompute_method,
        recompute_num_layers=model.recompute_num_layers,
        hidden_dropout=model.hidden_dropout > 0,
        attention_dropout=model.attention_dropout > 0,
        document_mask=name == WITHIN_DOCUMENTS,
    )
    return stage_activations(LayerActivations(dimensions_of(model, plan.tp), plan, terms), split, stage)[1]


@pytest.mark.parametrize(
    ("sizes", "split", "precision", "names"),
    PLANS,
    ids=["alone", "alone in bf16", "tp", "pp", "interleaved", "ep"],
)
def test_autograd_keeps_what_the_formula_says(
    run_on, sizes: dict[str, int], split: PipelineSplit, precision: str, names: list[str]
) -> None:
    """Within a tenth."""
    plan = parallel_plan(**sizes)
    for stage, found in run_on(plan.world_size, measured, names, precision, sizes, split):
        for name, kept in found.items():
            says = expected(name, precision, plan, split, stage)
            assert says == pytest.approx(kept, rel=0.1), (name, stage, says / kept)


def walked(chunks: list[ChunkActivations], pp: int, stage: int, microbatches: int) -> tuple[int, int]:
    """The same, pass by pass, in the order of Megatron's interleaved schedule."""
    order = [chunk for _ in range(0, microbatches, pp) for chunk in range(len(chunks)) for _ in range(pp)]
    ahead = min(2 * (pp - stage - 1) + (len(chunks) - 1) * pp, len(order))
    held: Counter[int] = Counter(order[:ahead])
    passes = size = 0
    for number, backward in enumerate(order):
        held.update(order[ahead + number : ahead + number + 1])
        passes = max(passes, held.total())
        rebuilt = chunks[-1 - backward].rebuilt
        size = max(size, rebuilt + sum(chunks[chunk].kept * count for chunk, count in held.items()))
        held[len(chunks) - 1 - backward] -= 1
    return passes, size


CHUNKS = st.builds(ChunkActivations, kept=st.integers(0, 9), rebuilt=st.integers(0, 9))


@given(
    chunks=st.lists(CHUNKS, min_size=2, max_size=5),
    pp=st.integers(2, 5),
    turns=st.integers(1, 4),
    data=st.data(),
)
def test_passes_in_flight_are_those_of_the_interleaved_schedule(
    chunks: list[ChunkActivations], pp: int, turns: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, pp - 1))
    assert most_in_flight(chunks, pp, stage, pp * turns) == walked(chunks, pp, stage, pp * turns)


def test_passes_in_flight_of_one_chunk_a_stage() -> None:
    chunk = [ChunkActivations(10, 3)]
    assert [most_in_flight(chunk, 4, stage, 8) for stage in range(4)] == [(4, 43), (3, 33), (2, 23), (1, 13)]
    assert most_in_flight(chunk, 4, 0, 2) == (2, 23), "no more than there are microbatches"
    assert most_in_flight(chunk, 1, 0, 8) == (1, 13), "without a pipeline each is backward at once"


def test_fused_layers_keep_what_the_paper_counts() -> None:
    """Its first equation, s b h (34 + 5 a s / h) in 16 bits, whose second term is what attention drops here.

    Statistics of norms and the one number for each row of scores are not in the paper.
    """
    model = dimensions_of(section("gelu"), 1)
    terms = ActivationTerms(micro_batch_size=ROWS, element_bytes=2, hidden_dropout=True, fused=True)
    plan = parallel_plan()
    parts = LayerActivations(model, plan, terms)
    tokens, hidden, heads = ROWS * SEQUENCE, model.hidden_size, model.num_attention_heads
    assert parts.layer(False) == 34 * tokens * hidden + tokens * (2 * 2 * 4 + 4 * heads)
    halved = LayerActivations(model, parallel_plan(tp=2, cp=2), terms)
    assert halved.layer(False) * 4 == parts.layer(False)
    assert halved.tokens * 2 == tokens
