"""A checkpoint of any plan goes on under any other, as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plan_matrix import DENSE, GLOBAL_MICROBATCHES, MICRO_BATCH, MIXTURE, batch, plan_name, world_size
from small_gpts import OPTIMIZERS

from mixle_megatron.config.model import ModelSection

Split = dict[str, Any]
VIRTUAL: Split = {"virtual_pipeline_model_parallel_size": 2}
FIRST: Split = {"num_layers_in_first_pipeline_stage": 1}

MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "mixture": MIXTURE,
    "biased, shared and gated": MIXTURE
    | {
        "gated_linear_unit": True,
        "activation_func": "silu",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_aux_loss_coeff": 0.0,
        "moe_shared_expert_intermediate_size": 16,
        "moe_layer_freq": [0, 1, 1, 1],
    },
    "predictions": MIXTURE | {"mtp_num_layers": 1, "share_embeddings_and_output_weights": False},
    "latent": DENSE
    | {
        "multi_latent_attention": True,
        "position_embedding_type": "rope",
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 6,
        "qk_layernorm": True,
        "add_bias_linear": False,
    },
}

PLANS: dict[str, list[tuple[dict[str, int], Split]]] = {
    "dense": [
        ({}, {}),
        ({"dp_shard": 2}, {}),
        ({"tp": 2}, {}),
        ({"pp": 2}, VIRTUAL),
        ({"cp": 2}, {}),
        ({"pp": 2}, FIRST),
        ({"dp_replicate": 2, "dp_shard": 2}, {}),
        ({"tp": 2, "pp": 2}, VIRTUAL),
    ],
    "mixture": [
        ({}, {}),
        ({"dp_shard": 2, "ep": 2}, {}),
        ({"tp": 2, "etp": 2}, {}),
        ({"dp_shard": 4, "ep": 4}, {}),
        ({"tp": 2}, {}),
        ({"pp": 2, "dp_replicate": 2, "ep": 2}, VIRTUAL),
        ({"tp": 2, "dp_shard": 2, "ep": 2, "etp": 2}, {}),
        ({"cp": 2, "dp_shard": 2}, {}),
    ],
    "biased, shared and gated": [({"tp": 2, "pp": 2}, {}), ({"dp_shard": 2, "ep": 2}, {}), ({}, {})],
    "predictions": [({"dp_shard": 2, "ep": 2}, {}), ({"tp": 2, "pp": 2}, {})],
    "latent": [({"tp": 2}, {}), ({"dp_shard": 2, "cp": 2}, {})],
}
"""For each model, plans of which each is saved under and loaded under several others."""

SAVED_AT, UPDATES = 2, 5
STEPS_ASIDE = (0, 1, 3)
"""A plan's checkpoint is loaded under itself, and under those so many places further on."""


def opened(model: str, plan: dict[str, int], split: Split, precision: str) -> Any:
    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.models.gpt import GPT
    from mixle_megatron.pipeline_split import PipelineSplit
    from mixle_megatron.plan_record import PlanRecord

    replicas = plan.get("dp_replicate", 1) * plan.get("dp_shard", 1)
    return MegatronBackend().prepare(
        GPT(ModelSection(**MODELS[model]), seed=7),
        plan=PlanRecord(**plan, microbatches=GLOBAL_MICROBATCHES // replicas).to_parallel_plan(),
        optimizer=OPTIMIZERS["adam_scheduled"],
        precision=precision,
        device="cpu",
        pipeline=PipelineSplit(**split),
    )


def losses(session: Any, model: str, updates: range) -> list[float]:
    """The losses of updates on batches that are the same under every plan."""
    seen = []
    for update in updates:
        inputs, targets = batch(MODELS[model]["seq_length"], update)
        own = slice(session.data_parallel_rank, None, session.data_parallel_size)
        own_inputs = torch.cat(inputs.split(MICRO_BATCH)[own])
        seen.append(session.train_batch(own_inputs, torch.cat(targets.split(MICRO_BATCH)[own])).loss)
    return seen


def train_and_save(model: str, plan: dict[str, int], split: Split, precision: str, path: str) -> list[float]:
    """The losses after the checkpoint that is written on the way."""
    with opened(model, plan, split, precision) as session:
        losses(session, model, range(SAVED_AT))
        session.save_checkpoint(path)
        return losses(session, model, range(SAVED_AT, SAVED_AT + UPDATES))


def load_and_train(model: str, plan: dict[str, int], split: Split, precision: str, path: str) -> list[float]:
    with opened(model, plan, split, precision) as session:
        session.load_checkpoint(path)
        assert session.step == SAVED_AT
        return losses(session, model, range(SAVED_AT, SAVED_AT + UPDATES))


def places(model: str) -> list[Any]:
    names = [f"{plan_name(plan)} {' '.join(map(str, split))}".strip() for plan, split in PLANS[model]]
    return [pytest.param(model, place, id=f"{model}: {name}") for place, name in enumerate(names)]


@pytest.mark.parametrize(("model", "place"), [each for model in PLANS for each in places(model)])
def test_goes_on_under_other_plans(run_on: Any, tmp_path: Path, model: str, place: int) -> None:
    plans = PLANS[model]
    plan, split = plans[place]
    path = str(tmp_path / "checkpoint")
    expected = run_on(world_size(plan), train_and_save, model, plan, split, "fp32", path)[0]
    for aside in STEPS_ASIDE[: len(plans)]:
        other, other_split = plans[(place + aside) % len(plans)]
        found = run_on(world_size(other), load_and_train, model, other, other_split, "fp32", path)[0]
        if aside == 0:
            assert found == expected
        assert found == pytest.approx(expected, rel=1e-5, abs=0), plan_name(other)


@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_bf16_is_exact_on_its_own_plan_and_close_on_another(run_on: Any, tmp_path: Path, model: str) -> None:
    path = str(tmp_path / "checkpoint")
    expected = run_on(2, train_and_save, model, {"dp_shard": 2}, {}, "bf16", path)[0]
    assert run_on(2, load_and_train, model, {"dp_shard": 2}, {}, "bf16", path)[0] == expected
    found = run_on(2, load_and_train, model, {"tp": 2}, {}, "bf16", path)[0]
    assert found == pytest.approx(expected, rel=5e-3, abs=0)
