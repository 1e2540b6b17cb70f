"""One process writes a checkpoint's model to a file: what the ranks held, to the last bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exported_models import (
    MODELS,
    VIRTUAL,
    Tensors,
    assert_equal,
    config_file,
    opened,
    saved,
    saved_padded,
    train_and_save,
)
from mixle.models.language_model import LM
from plan_matrix import DENSE, batch, plan_name
from safetensors import safe_open
from safetensors.torch import load_file
from small_gpts import VOCABULARY

from mixle_megatron.checkpoint.export import export_checkpoint
from mixle_megatron.checkpoint.manifest import MANIFEST
from mixle_megatron.config.model import ModelSection
from mixle_megatron.errors import Refused


@pytest.fixture(scope="module")
def padded(run_on: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """See :func:`exported_models.saved_padded`."""
    path = tmp_path_factory.mktemp("padded") / "checkpoint"
    return path, saved_padded(run_on, path)


@pytest.fixture(scope="module")
def shared(run_on: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """A checkpoint of a model that is none of mixle's."""
    path = tmp_path_factory.mktemp("shared") / "checkpoint"
    return path, saved(run_on, path, "shared", {})


# Safetensors


@pytest.mark.parametrize(
    ("model", "plan", "split", "precision"),
    [
        ("dense", {"tp": 2, "pp": 2}, None, "fp32"),
        ("dense", {"dp_shard": 2}, None, "bf16"),
        ("dense", {"pp": 2}, VIRTUAL, "fp32"),
        ("untied", {"tp": 2}, None, "bf16"),
        ("llama", {"tp": 2, "dp_shard": 2}, None, "fp32"),
        ("mixture", {"dp_shard": 2, "ep": 2}, None, "fp32"),
        ("shared", {"tp": 2, "etp": 2}, None, "bf16"),
        ("shared", {"pp": 2, "dp_shard": 2, "ep": 2}, None, "fp32"),
        ("predictions", {"pp": 2}, None, "fp32"),
        ("latent", {"tp": 2}, None, "fp32"),
    ],
    ids=lambda value: plan_name(value) if isinstance(value, dict) else str(value),
)
def test_the_file_holds_what_the_ranks_did(
    run_on: Any,
    tmp_path: Path,
    model: str,
    plan: dict[str, int],
    split: dict[str, Any] | None,
    precision: str,
) -> None:
    expected = saved(run_on, tmp_path / "iter_0000002", model, plan, split, precision)
    assert not dist.is_initialized()
    out = tmp_path / "model.safetensors"
    done = export_checkpoint(
        tmp_path / "iter_0000002", out, to="safetensors", config=config_file(tmp_path, model)
    )
    found = load_file(out)
    assert_equal(found, expected)
    assert (done.tensors, done.elements) == (len(found), sum(map(torch.numel, found.values())))
    with safe_open(out, "pt") as file:
        header = file.metadata()
    assert ModelSection(**json.loads(header["mixle_megatron.model"])) == ModelSection(**MODELS[model])
    assert header["mixle_megatron.step"] == "2"


def test_bf16_is_the_rounded_value_and_buffers_keep_their_own(
    shared: tuple[Path, Tensors], tmp_path: Path
) -> None:
    path, held = shared
    export_checkpoint(path, tmp_path / "out", to="safetensors", dtype="bf16")
    rounded = {name: t if name.endswith("expert_bias") else t.bfloat16() for name, t in held.items()}
    assert_equal(load_file(tmp_path / "out"), rounded)


def test_of_a_runs_folder_the_newest_is_meant(padded: tuple[Path, Tensors], tmp_path: Path) -> None:
    path, held = padded
    for step in (2, 11):
        shutil.copytree(path, tmp_path / "checkpoints" / f"iter_{step:07d}")
    shutil.copy(config_file(tmp_path, "dense"), tmp_path / "config.yaml")
    done = export_checkpoint(tmp_path, tmp_path / "out", to="safetensors")
    assert done.source == tmp_path / "checkpoints" / "iter_0000011"
    assert_equal(load_file(tmp_path / "out"), held)  # cut where the run's config says


# Mixle


def logits_after_loading(path: str, inputs: torch.Tensor) -> torch.Tensor:
    """The trained model's own, computed by Megatron on one rank."""
    with opened(DENSE, {}, {}, "fp32") as session:
        session.load_checkpoint(path)
        session.module.eval()
        with torch.no_grad():
            return session.module(inputs, torch.arange(inputs.shape[1]).expand_as(inputs), None)


@pytest.mark.parametrize("knows", ["config", "heads"])
def test_the_exported_models_logits_are_the_trained_ones(
    run_on: Any, padded: tuple[Path, Tensors], tmp_path: Path, knows: str
) -> None:
    path, _ = padded
    facts = {
        "config": {"config": config_file(tmp_path, "dense")},
        "heads": {"heads": 4, "vocab_size": VOCABULARY},
    }[knows]
    export_checkpoint(path, tmp_path / "lm.pt", to="mixle", **facts)
    inputs, _ = batch(DENSE["seq_length"], 9)
    (expected,) = run_on(1, logits_after_loading, str(path), inputs)
    lm = LM.load(str(tmp_path / "lm.pt"))
    with torch.no_grad():
        found = lm.module(inputs, return_all_logits=True)
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-6
    assert [entry.name for entry in tmp_path.iterdir() if entry.suffix != ".yaml"] == ["lm.pt"]


def fit(path: str) -> Tensors:
    """mixle's own fit, which leaves a checkpoint and the trained module."""
    import mixle_megatron  # noqa: F401  registers the backend

    lm = LM(57, d_model=32, n_layer=2, n_head=4, block=16)
    lm.module.mup_output_multiplier.fill_(0.5)
    ids = np.arange(24 * 17) * 7 % 57
    backend = {"distributed": True, "distributed_backend": "megatron", "optimizer": "adam"}
    lm.fit(ids, dense=True, batch_size=8, tp_size=2, checkpoint_path=path, **backend)
    return {name: tensor.clone() for name, tensor in lm.module.state_dict().items()}


def test_what_fit_saved_is_the_module_that_it_trained(run_on: Any, tmp_path: Path) -> None:
    expected = run_on(2, fit, str(tmp_path / "fit"))[0]
    out = tmp_path / "lm.pt"
    export_checkpoint(tmp_path / "fit", out, to="mixle")
    assert_equal(dict(LM.load(str(out)).module.state_dict()), expected)


def test_mixle_refuses_what_its_model_cannot_be(shared: tuple[Path, Tensors], tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        export_checkpoint(shared[0], tmp_path / "out", to="mixle", config=config_file(tmp_path, "shared"))
    assert {fault.field for fault in refused.value.faults} == {
        "model.position_embedding_type",
        "model.normalization",
        "model.activation_func",
        "model.gated_linear_unit",
        "model.add_bias_linear",
        "model.num_moe_experts",
    }
    assert not (tmp_path / "out").exists()


def test_mixle_refuses_shapes_that_its_model_has_not(run_on: Any, tmp_path: Path) -> None:
    """No config tells: each difference is in the tensors."""
    changed = {"ffn_hidden_size": 48, "add_bias_linear": False, "add_qkv_bias": True, "num_layers": 1}
    model = DENSE | changed
    run_on(1, train_and_save, model, {}, {}, "fp32", str(tmp_path / "checkpoint"))
    (tmp_path / "checkpoint" / MANIFEST).unlink()
    with pytest.raises(Refused) as refused:
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "out", to="mixle", heads=4)
    assert [fault.field for fault in refused.value.faults] == [
        "decoder.layers.0.mlp.linear_fc1.bias",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc2.bias",
        "decoder.layers.0.mlp.linear_fc2.weight",
        "decoder.layers.0.self_attention.linear_proj.bias",
    ]
    assert "has shape [48, 32]" in str(refused.value)
