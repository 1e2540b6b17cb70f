"""Weights from a file become the checkpoint of step 0, and a run starts from exactly these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from exported_models import assert_equal, config_file, saved
from mixle.models.language_model import LM
from safetensors.torch import load_file, save_file
from small_gpts import VOCABULARY
from tiny_run import CONFIG, overrides, train_here
from typer.testing import CliRunner

from mixle_megatron.checkpoint.export import export_checkpoint
from mixle_megatron.checkpoint.weight_sources import open_weights
from mixle_megatron.cli.checkpoint_export import import_
from mixle_megatron.config.load import load_config
from mixle_megatron.errors import Refused

HEADS, LENGTH = 4, 32


def language_model(heads: int = HEADS) -> LM:
    """An LM of the tiny run's sizes, with parameters that are nobody's defaults."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        lm = LM(VOCABULARY, d_model=32, n_layer=2, n_head=heads, block=LENGTH)
        for parameter in lm.module.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return lm


@pytest.fixture(scope="module")
def lm_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lm") / "lm.pt"
    language_model().save(str(path))
    return path


def run_import(
    source: str, target: str, config: str | None = None, given: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Import on the rank that this process is."""
    from mixle_megatron.training.initial_weights import import_weights

    path = None if config is None else Path(config)
    done = import_weights(Path(source), Path(target), config=path, overrides=given)
    return {"checkpoint": done.checkpoint, "run": done.run, "tensors": done.tensors}


def refusal(source: str, target: str, config: str | None = None, given: tuple[str, ...] = ()) -> Refused:
    """What an import is refused for."""
    try:
        run_import(source, target, config, given)
    except Refused as refused:
        return refused
    raise AssertionError("nothing was refused")


def keys_of_run(folder: Path, *more: str) -> tuple[str, ...]:
    # the standard libraries of both Pythons hold validation text at this fraction
    fixed = ("plan.dp_shard=1", "run.steps=1", "checkpoint.every=0", "data.validation_fraction=0.2")
    return tuple(overrides(folder, *fixed, *more))


# A run


def first_loss(lm: LM, folder: Path) -> float:
    """The mean loss of the run's first update before it, by mixle's module and torch alone."""
    from mixle_megatron.data import GlobalBatchLoader, prepare_text_data

    config = load_config(CONFIG, keys_of_run(folder)).config
    streams = prepare_text_data(
        config.data, seq_length=LENGTH, seed=config.run.seed, cache_dir=folder / ".data"
    )
    rows = config.batch.global_batch_size
    loader = GlobalBatchLoader(
        streams.training_windows(),
        global_batch_size=rows,
        micro_batch_size=rows,
        data_parallel_rank=0,
        data_parallel_size=1,
        gradient_accumulation_steps=1,
        microbatches=1,
    )
    ((inputs, targets),) = loader.update(0)
    with torch.no_grad():
        logits = lm.module(torch.as_tensor(inputs), return_all_logits=True).double()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.as_tensor(targets).flatten()))


@pytest.mark.parametrize(
    ("kind", "ranks", "keys", "tolerance"),
    [
        ("mixle", 1, [], 1e-6),
        ("mixle", 2, ["plan.tp=2"], 1e-6),
        ("safetensors", 2, ["plan.pp=2", "precision=bf16"], 1e-2),
        ("safetensors", 2, ["plan.dp_replicate=2", "optimizer.name=sgd"], 1e-6),
    ],
)
def test_a_run_starts_from_the_weights(
    run_on: Any, lm_file: Path, tmp_path: Path, kind: str, ranks: int, keys: list[str], tolerance: float
) -> None:
    source = lm_file
    if kind == "safetensors":
        run_on(1, run_import, str(lm_file), str(tmp_path / "aside"))
        source = tmp_path / "lm.safetensors"
        export_checkpoint(tmp_path / "aside", source, to="safetensors")
    run = tmp_path / "tiny-gpt"
    given = keys_of_run(tmp_path, *keys)
    (done,) = run_on(1, run_import, str(source), str(run), str(CONFIG), given)
    assert done == {"checkpoint": run / "checkpoints" / "iter_0000000", "run": run, "tensors": 28}
    run_on(ranks, train_here, str(tmp_path), *given)
    (receipt,) = map(json.loads, (run / "receipts.jsonl").read_text().splitlines())
    assert receipt["loss"] == pytest.approx(first_loss(language_model(), tmp_path), rel=tolerance)


def test_a_run_that_differs_does_not_start_from_them(run_on: Any, lm_file: Path, tmp_path: Path) -> None:
    given = keys_of_run(tmp_path)
    run_on(1, run_import, str(lm_file), str(tmp_path / "tiny-gpt"), str(CONFIG), given)
    with pytest.raises(AssertionError, match=r"model\.layernorm_epsilon"):
        run_on(1, train_here, str(tmp_path), *given, "model.layernorm_epsilon=0.1")


def test_a_run_that_has_begun_keeps_its_own(run_on: Any, lm_file: Path, tmp_path: Path) -> None:
    given, run = keys_of_run(tmp_path), tmp_path / "tiny-gpt"
    run_on(1, train_here, str(tmp_path), *given, "checkpoint.every=1")
    (refused,) = run_on(1, refusal, str(lm_file), str(run), str(CONFIG), given)
    assert "has checkpoints already, the newest of step 1" in str(refused)
    assert [entry.name for entry in (run / "checkpoints").glob("iter_*")] == ["iter_0000001"]


def test_a_runs_folder_brings_its_config_along(run_on: Any, lm_file: Path, tmp_path: Path) -> None:
    """Also where the run was moved before its first checkpoint."""
    run_on(1, train_here, str(tmp_path / "before"), *keys_of_run(tmp_path / "before"))
    (tmp_path / "before").rename(tmp_path / "after")
    run = tmp_path / "after" / "tiny-gpt"
    (done,) = run_on(1, run_import, str(lm_file), str(run))
    assert done["run"] == run
    assert load_config(run / "config.yaml").config.run.dir == str(tmp_path / "after")


# A checkpoint by itself


@pytest.mark.parametrize("model", ["dense", "untied", "llama", "shared", "predictions", "latent"])
def test_out_and_in_again_changes_nothing(run_on: Any, tmp_path: Path, model: str) -> None:
    held = saved(run_on, tmp_path / "trained", model, {})
    config = config_file(tmp_path, model)
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    export_checkpoint(tmp_path / "trained", first, to="safetensors", config=config)
    run_on(1, run_import, str(first), str(tmp_path / "imported"))  # the file's header tells the model
    export_checkpoint(tmp_path / "imported", second, to="safetensors", config=config)
    assert_equal(load_file(second), held)


def fit(path: str | None) -> dict[str, torch.Tensor]:
    """One epoch of mixle's fit on two ranks: from the imported checkpoint, or from the LM itself."""
    import mixle_megatron  # noqa: F401  registers the backend

    lm = language_model() if path is None else LM(VOCABULARY, d_model=32, n_layer=2, n_head=4, block=LENGTH)
    ids = np.arange(16 * (LENGTH + 1)) * 7 % VOCABULARY
    options = {"checkpoint_path": path, "resume": path is not None, "tp_size": 2}
    backend = {"distributed": True, "distributed_backend": "megatron", "optimizer": "adam"}
    lm.fit(ids, dense=True, batch_size=8, **options, **backend)
    return {name: tensor.clone() for name, tensor in lm.module.state_dict().items()}


def test_fit_resumes_from_an_imported_language_model(run_on: Any, lm_file: Path, tmp_path: Path) -> None:
    run_on(1, run_import, str(lm_file), str(tmp_path / "imported"))
    assert_equal(run_on(2, fit, str(tmp_path / "imported"))[0], run_on(2, fit, None)[0])


def test_a_folder_that_holds_something_is_left_alone(run_on: Any, lm_file: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (refused,) = run_on(1, refusal, str(lm_file), str(tmp_path))
    assert "is there already" in str(refused)
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine"]


# Mismatches


def weights(lm_file: Path) -> dict[str, torch.Tensor]:
    source = open_weights(lm_file)
    return {name: source.read(name) for name in source.shapes}


def test_every_mismatch_is_named_once(run_on: Any, lm_file: Path, tmp_path: Path) -> None:
    tensors = weights(lm_file)
    del tensors["decoder.layers.1.mlp.linear_fc1.bias"]
    tensors["decoder.layers.2.mlp.linear_fc1.bias"] = torch.zeros(128)
    tensors["embedding.word_embeddings.weight"] = torch.zeros(256, 32)
    save_file(tensors, tmp_path / "changed.safetensors")
    run = tmp_path / "tiny-gpt"
    given = keys_of_run(tmp_path)
    (refused,) = run_on(1, refusal, str(tmp_path / "changed.safetensors"), str(run), str(CONFIG), given)
    assert [(fault.field, fault.rule.split(" in ")[0]) for fault in refused.faults] == [
        (
            "decoder.layers.1.mlp.linear_fc1.bias",
            f"of the config's model is missing from {tmp_path / 'changed.safetensors'}",
        ),
        (
            "decoder.layers.2.mlp.linear_fc1.bias",
            f"of {tmp_path / 'changed.safetensors'} is not part of the config's model",
        ),
        ("embedding.word_embeddings.weight", "has shape [256, 32]"),
    ]
    assert not run.exists()


@pytest.mark.parametrize(
    ("kind", "keys", "faults"),
    [
        ("mixle", ["model.num_attention_heads=8"], {"model.num_attention_heads", "model.num_query_groups"}),
        ("mixle", ["model.activation_func=relu"], {"model.activation_func"}),
        ("header", ["model.layernorm_epsilon=0.1"], {"model.layernorm_epsilon"}),
    ],
)
def test_what_no_shape_tells_is_compared_too(
    run_on: Any, lm_file: Path, tmp_path: Path, kind: str, keys: list[str], faults: set[str]
) -> None:
    source = lm_file
    if kind == "header":
        source = tmp_path / "lm.safetensors"
        section = load_config(CONFIG, keys_of_run(tmp_path)).config.model
        header = {"mixle_megatron.model": section.model_dump_json()}
        save_file(weights(lm_file), source, metadata=header)
    arguments = (str(source), str(tmp_path / "tiny-gpt"), str(CONFIG), keys_of_run(tmp_path, *keys))
    (refused,) = run_on(1, refusal, *arguments)
    assert {fault.field for fault in refused.faults} == faults


def test_a_file_that_describes_no_model_needs_a_config(run_on: Any, lm_file: Path, tmp_path: Path) -> None:
    save_file(weights(lm_file), tmp_path / "bare.safetensors")
    (refused,) = run_on(1, refusal, str(tmp_path / "bare.safetensors"), str(tmp_path / "imported"))
    assert [fault.field for fault in refused.faults] == ["--config"]


# Files


def test_a_folder_of_files_is_one_source(lm_file: Path, tmp_path: Path) -> None:
    tensors = weights(lm_file)
    names = sorted(tensors)
    for number, part in enumerate((names[:9], names[9:])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"model-{number}.safetensors")
    source = open_weights(tmp_path)
    assert_equal({name: source.read(name) for name in source.shapes}, tensors)


def test_names_of_fused_layers_are_known(lm_file: Path, tmp_path: Path) -> None:
    """As a model that Transformer Engine computes calls its norms."""
    tensors = weights(lm_file)
    fused = {
        name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_").replace(
            ".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"
        ): tensor
        for name, tensor in tensors.items()
    }
    save_file(fused, tmp_path / "fused.safetensors")
    source = open_weights(tmp_path / "fused.safetensors")
    assert_equal({name: source.read(name) for name in source.shapes}, tensors)
    both = {name: tensor.clone() for name, tensor in (fused | tensors).items()}
    save_file(both, tmp_path / "twice.safetensors")
    with pytest.raises(Refused) as refused:
        open_weights(tmp_path / "twice.safetensors")
    assert len(refused.value.faults) == 8
    assert "is there twice" in str(refused.value)


class Harmful:
    """An object that runs code when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def test_a_harmful_file_runs_nothing(tmp_path: Path) -> None:
    canary, path = tmp_path / "canary", tmp_path / "lm.pt"
    saved_lm = language_model().to_dict()
    torch.save(saved_lm | {"device": Harmful(canary)}, path)
    with pytest.raises(Refused, match="which are no weights"):
        open_weights(path)
    assert not canary.exists()
    torch.load(path, weights_only=False)
    assert canary.exists()


def changed_state(**changes: Any) -> dict[str, Any]:
    payload = language_model().to_dict()
    return payload | {"state_dict": payload["state_dict"] | changes}


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"text", "is neither safetensors nor"),
        ([1, 2], "is not what mixle's LM.save writes"),
        ({"state_dict": {}}, "is not what mixle's LM.save writes"),
        (language_model().to_dict() | {"n_layer": "two"}, "has sizes that no model has"),
        (changed_state(**{"head.weight": torch.zeros(VOCABULARY, 32)}), "differs from tok.weight"),
        (changed_state(mup_output_multiplier=torch.tensor(0.5)), "multiplies the logits"),
        (changed_state(extra=torch.zeros(3, dtype=torch.int64)), "is not floating point"),
    ],
    ids=range(7),
)
def test_what_is_no_model_is_refused(tmp_path: Path, content: Any, rule: str) -> None:
    path = tmp_path / "file"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(Refused, match=rule):
        open_weights(path)


def test_half_a_file_is_refused(lm_file: Path, tmp_path: Path) -> None:
    (tmp_path / "cut").write_bytes(lm_file.read_bytes()[:-1000])
    with pytest.raises(Refused):
        open_weights(tmp_path / "cut")
    save_file(weights(lm_file), tmp_path / "whole.safetensors")
    (tmp_path / "cut").write_bytes((tmp_path / "whole.safetensors").read_bytes()[:-10])
    with pytest.raises(Refused):
        open_weights(tmp_path / "cut")


# The command


def invoke(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(import_)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_the_command(run_on: Any, lm_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "tiny-gpt"
    arguments = [str(lm_file), str(run), *keys_of_run(tmp_path), "--config", str(CONFIG)]
    ((code, output),) = run_on(1, invoke, *arguments)
    assert code == 0, output
    assert f"{run / 'checkpoints' / 'iter_0000000'}: 28 tensors of" in output
    assert f"the run in {run} starts from it" in output
