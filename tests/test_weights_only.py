"""The weights alone, from checkpoints of a session and of Megatron alone, into any plan and precision."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_matrix import MIXTURE, batch, plan_name, world_size
from small_gpts import OPTIMIZERS
from snapshots import message_of

from mixle_megatron.config.model import ModelSection

VOCABULARY = 257

MODELS: dict[str, dict[str, Any]] = {
    "gated, biased, tied": MIXTURE
    | {
        "num_moe_experts": None,
        "moe_ffn_hidden_size": None,
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": True,
    },
    "experts": MIXTURE
    | {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_aux_loss_coeff": 0.0,
        "share_embeddings_and_output_weights": False,
    },
}

Plan = dict[str, int]
Weights = dict[str, torch.Tensor]


def opened(model: str, plan: Plan, precision: str = "fp32", seed: int = 7) -> Any:
    from mixle.utils.parallel.training_contracts import ParallelPlan

    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.models.gpt import GPT

    return MegatronBackend().prepare(
        GPT(ModelSection(**MODELS[model]), seed=seed),
        plan=ParallelPlan(**plan),
        optimizer=OPTIMIZERS["adam"],
        precision=precision,
        device="cpu",
    )


def train(session: Any, model: str, updates: range) -> list[float]:
    seen = []
    for update in updates:
        inputs, targets = batch(MODELS[model]["seq_length"], update)
        own = slice(session.data_parallel_rank, None, session.data_parallel_size)
        seen.append(session.train_batch(inputs[own], targets[own]).loss)
    return seen


def whole_weights(session: Any) -> Weights:
    """The optimizer's fp32 values, whole, without rows of padding; and the modules' own beside them."""
    from mixle_megatron.models.initialisation import is_vocabulary
    from mixle_megatron.models.whole_parameters import whole_parameters

    weights = {}
    for name, whole in whole_parameters(session.stage):
        rows = VOCABULARY if is_vocabulary(name) else whole.shape[0]
        assert not whole[rows:].any(), f"padding of {name}"
        weights[name] = whole[:rows]
    return weights


def expert_biases(session: Any) -> list[torch.Tensor]:
    buffers = [dict(chunk.named_buffers()) for chunk in session.stage.chunks]
    return [tensor.clone() for of in buffers for name, tensor in of.items() if name.endswith("expert_bias")]


def save_a_session(path: str, model: str, plan: Plan, precision: str, optimizer_format: str) -> Weights:
    with opened(model, plan, precision) as session:
        session.optimizer_format = optimizer_format
        train(session, model, range(2))
        session.save_checkpoint(path)
        return whole_weights(session)


def save_by_megatron_alone(path: str, model: str, plan: Plan, precision: str, _format: str) -> Weights:
    """As Megatron-LM does: the model's sharded state, and arguments that no safe reader makes."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.transformer.enums import AttnBackend

    from mixle_megatron.checkpoint.write_results import kept_in_process

    with opened(model, plan, precision) as session:
        train(session, model, range(2))
        state = {"args": Namespace(attention_backend=AttnBackend.auto, num_layers=4), "iteration": 2}
        for number, chunk in enumerate(session.stage.chunks):
            state[f"model{number}"] = chunk.sharded_state_dict()
        if dist.get_rank() == 0:
            Path(path).mkdir(parents=True)
        dist.barrier()
        with kept_in_process():
            dist_checkpointing.save(state, path)
        dist.barrier()
        return whole_weights(session)


def load(path: str, model: str, plan: Plan, precision: str) -> dict[str, Any]:
    """What weights, losses and clocks a session has that loads the weights alone."""
    with opened(model, plan, precision, seed=99) as session:
        before = session.scheduler.state_dict(), len(session.optimizer.chained_optimizers[0].optimizer.state)
        payload = session.load_checkpoint(path, what="model")
        after = session.scheduler.state_dict(), len(session.optimizer.chained_optimizers[0].optimizer.state)
        assert before == after
        assert session.step == 0
        weights, biases = whole_weights(session), expert_biases(session)
        return {
            "weights": weights,
            "payload": payload,
            "biases": biases,
            "losses": train(session, model, range(5, 7)),
        }


WRITERS = {"session": save_a_session, "Megatron alone": save_by_megatron_alone}
OTHER_PLANS: dict[str, list[Plan]] = {
    "gated, biased, tied": [{"pp": 2}, {"tp": 2, "dp_shard": 2}],
    "experts": [{"dp_shard": 2, "ep": 2}, {"tp": 2, "etp": 2}],
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("model", MODELS)
def test_weights_are_the_same_under_every_plan(run_on: Any, tmp_path: Path, writer: str, model: str) -> None:
    path = str(tmp_path / "checkpoint")
    saved = run_on(2, WRITERS[writer], path, model, {"tp": 2}, "fp32", "fully_reshardable")[0]
    seen = []
    for plan in OTHER_PLANS[model]:
        results = run_on(world_size(plan), load, path, model, plan, "fp32")
        for result in results:
            for name, whole in result["weights"].items():
                assert torch.equal(saved[name], whole), (plan_name(plan), name)
            assert result["payload"].get("step") == (2 if writer == "session" else None)
        held = {name for result in results for name in result["weights"]}  # each rank has experts of its own
        assert held == saved.keys()
        seen.append(results[0]["losses"])
    assert seen[1] == pytest.approx(seen[0], rel=1e-4, abs=0)


@pytest.mark.parametrize(
    ("writer", "optimizer_format", "saved_in", "loaded_in", "exact"),
    [
        ("session", "fully_reshardable", "bf16", "bf16", True),
        ("session", "fully_reshardable", "bf16", "fp32", True),
        ("session", "fully_reshardable", "fp32", "bf16", True),
        ("session", "dp_reshardable", "bf16", "fp32", False),
        ("Megatron alone", "", "bf16", "fp32", False),
    ],
)
def test_main_values_are_taken_where_they_are_whole(
    run_on: Any,
    tmp_path: Path,
    writer: str,
    optimizer_format: str,
    saved_in: str,
    loaded_in: str,
    exact: bool,
) -> None:
    path, model = str(tmp_path / "checkpoint"), "gated, biased, tied"
    saved = run_on(2, WRITERS[writer], path, model, {"dp_shard": 2}, saved_in, optimizer_format)[0]
    found = run_on(1, load, path, model, {}, loaded_in)[0]["weights"]
    for name, whole in saved.items():
        expected = whole if exact else whole.bfloat16().float()
        assert torch.equal(found[name], expected), name


def biases_after(path: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Buffers as they are saved, and as they are loaded."""
    with opened("experts", {}) as session:
        train(session, "experts", range(3))
        session.save_checkpoint(path)
        saved = expert_biases(session)
    return saved, load(path, "experts", {}, "fp32")["biases"]


def test_buffers_are_part_of_the_weights(run_on: Any, tmp_path: Path) -> None:
    saved, found = run_on(1, biases_after, str(tmp_path / "checkpoint"))[0]
    assert len(saved) == 4
    assert any(bias.any() for bias in saved)
    assert all(map(torch.equal, saved, found))


def refusals(path: str, other: str) -> dict[str, str]:
    from mixle_megatron.errors import CheckpointError, DoesNotFit, SessionError

    said = {}
    with opened("experts", {}) as session:
        said["all"] = message_of(lambda: session.load_checkpoint(path), CheckpointError)
        said["other"] = message_of(lambda: session.load_checkpoint(other, what="model"), DoesNotFit)
        train(session, "experts", range(1))
        said["stepped"] = message_of(lambda: session.load_checkpoint(path, what="model"), SessionError)
    return said


def test_what_cannot_be_loaded_is_said(run_on: Any, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("alone", "other")]
    run_on(1, save_by_megatron_alone, paths[0], "experts", {}, "fp32", "")
    run_on(1, save_by_megatron_alone, paths[1], "gated, biased, tied", {}, "fp32", "")
    (said,) = run_on(1, refusals, *paths)
    assert "what='model'" in said["all"]
    assert "output_layer.weight of this session's model is missing" in said["other"]
    assert "before the first update" in said["stepped"]
