"""Virtual stages, uneven ones and Megatron's layout string; further predictions and latent attention."""

from __future__ import annotations

from typing import Any

import pytest
from plan_matrix import DENSE, MIXTURE, plan_name, train, world_size
from test_plan_matrix import assert_same

MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "mixture": MIXTURE,
    "latent attention": DENSE
    | {
        "multi_latent_attention": True,
        "position_embedding_type": "rope",
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 6,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
    },
    "low-rank queries": DENSE
    | {
        "multi_latent_attention": True,
        "position_embedding_type": "rope",
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "qk_layernorm": True,
        "add_bias_linear": False,
    },
    "one more prediction": DENSE
    | {
        "mtp_num_layers": 1,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
    },
    "two more with experts": MIXTURE | {"mtp_num_layers": 2, "share_embeddings_and_output_weights": False},
}

MODELS |= {name: DENSE | {"activation_func": name} for name in ("squared_relu", "quick_gelu")}

VIRTUAL = {"virtual_pipeline_model_parallel_size": 2}
FIRST = {"num_layers_in_first_pipeline_stage": 1}
LAST = {"num_layers_in_last_pipeline_stage": 1}

CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("dense", {"pp": 2}, VIRTUAL),
    ("dense", {"pp": 2, "microbatches": 2}, VIRTUAL),
    ("dense", {"pp": 2, "tp": 2}, VIRTUAL),
    ("dense", {"pp": 2, "dp_shard": 2}, VIRTUAL),
    ("dense", {"pp": 2, "cp": 2}, VIRTUAL),
    ("dense", {"pp": 2}, FIRST),
    ("dense", {"pp": 2}, LAST),
    ("dense", {"pp": 2}, {"pipeline_model_parallel_layout": "Ettt|tL"}),
    ("dense", {"pp": 2}, {"pipeline_model_parallel_layout": "E|tt|tt|L"}),
    ("mixture", {"pp": 2, "dp_shard": 2, "ep": 2}, VIRTUAL),
    ("mixture", {"pp": 2, "tp": 2, "etp": 2}, FIRST),
    ("squared_relu", {"tp": 2}, {}),
    ("quick_gelu", {"dp_shard": 2}, {}),
    ("latent attention", {"tp": 2, "cp": 2}, {}),
    ("latent attention", {"pp": 2, "dp_shard": 2}, VIRTUAL),
    ("low-rank queries", {"tp": 2}, {}),
    ("low-rank queries", {"tp": 2, "pp": 2}, {}),
    ("one more prediction", {"tp": 2, "pp": 2}, {}),
    ("one more prediction", {"pp": 2, "dp_shard": 2}, {}),
    ("one more prediction", {"pp": 2}, {"pipeline_model_parallel_layout": "Ettt|tmL"}),
    ("two more with experts", {"dp_shard": 2, "ep": 2}, {}),
    ("two more with experts", {"pp": 2, "tp": 2}, {}),
]


@pytest.mark.parametrize(
    ("model", "plan", "pipeline"),
    [pytest.param(*case, id=f"{case[0]}: {plan_name(case[1])} {case[2]}") for case in CASES],
)
def test_trains_as_on_one_rank(
    run_on: Any, model: str, plan: dict[str, int], pipeline: dict[str, Any]
) -> None:
    (expected,) = run_on(1, train, MODELS[model], {}, None, 3)
    microbatches = plan.get("microbatches")
    if microbatches is not None and "mixture" not in model:
        (expected,) = run_on(1, train, MODELS[model], {"microbatches": microbatches}, None, 3)
    results = run_on(world_size(plan), train, MODELS[model], plan, pipeline, 3)
    assert all(result == results[0] for result in results)
    assert_same(results[0], expected, 1e-4 if "num_moe_experts" in MODELS[model] else 1e-5)
