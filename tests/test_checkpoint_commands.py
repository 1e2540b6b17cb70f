"""``mixle-megatron checkpoint inspect`` and ``verify``: what they print, and their exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_checkpoints import STEP, facts, save_by_megatron_alone, small_checkpoint
from typer.testing import CliRunner, Result

from mixle_megatron.checkpoint.inspection import inspect
from mixle_megatron.checkpoint.iterations import iteration_name
from mixle_megatron.checkpoint.manifest import versions, write_manifest
from mixle_megatron.cli.checkpoint_tables import printable
from mixle_megatron.cli.main import app

Shapes = dict[str, tuple[int, ...]]


def run(*arguments: str | Path) -> Result:
    """``mixle-megatron checkpoint ...`` in this process, which never has a process group."""
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert not dist.is_initialized()
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


@pytest.fixture(scope="module")
def saved(run_on, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Shapes]:
    """A run's folder with one checkpoint, and the shapes of the module's parameters."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    shapes = small_checkpoint(run_on, folder / "checkpoints" / iteration_name(STEP))
    return folder, shapes


@pytest.fixture
def copy(saved: tuple[Path, Shapes], tmp_path: Path) -> Path:
    """A copy of the checkpoint's folder, in a run's folder of its own."""
    return Path(shutil.copytree(saved[0], tmp_path / "tiny")) / "checkpoints" / iteration_name(STEP)


def inspected(path: Path) -> dict:
    result = run("inspect", path, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# inspect

NORMS = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
"""Norms before a linear layer go by Transformer Engine's names, which has one layer for both."""


def test_json_has_every_parameter_with_its_global_shape(saved: tuple[Path, Shapes]) -> None:
    """A parameter of the two layers, which are alike, lies in one tensor."""
    folder, shapes = saved
    expected: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        for ours, in_checkpoints in NORMS.items():
            name = name.replace(ours, in_checkpoints)
        if "decoder.layers.0." in name:
            expected[name.replace(".0.", ".")] = [2, *shape]
        elif "decoder.layers.1." not in name:
            expected[name] = list(shape)
    found = inspected(folder)
    assert {tensor["name"]: tensor["shape"] for tensor in found["parameters"]} == expected
    numbers = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert found["totals"]["parameters"] == numbers
    assert found["totals"]["parameter_bytes"] == 4 * numbers
    assert found["totals"]["optimizer_bytes"] == 2 * 4 * numbers  # moments: in fp32 values are the model's
    assert {tensor["dtype"] for tensor in found["parameters"]} == {"float32"}
    layered = {tensor["shards"] for tensor in found["parameters"] if "decoder.layers" in tensor["name"]}
    assert layered == {2}


def test_json_has_what_megatron_reads(saved: tuple[Path, Shapes]) -> None:
    from megatron.core import dist_checkpointing

    folder = saved[0] / "checkpoints" / iteration_name(STEP)
    theirs = dist_checkpointing.load_tensors_metadata(str(folder))
    found = inspected(folder)
    ours = {tensor["name"]: tensor for tensor in found["parameters"] + found["optimizer"]}
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name]["shape"] == list(tensor.global_shape)
        assert ours[name]["dtype"] == str(tensor.dtype).removeprefix("torch.")


def test_json_has_the_manifests_facts_and_the_files(saved: tuple[Path, Shapes]) -> None:
    found, folder = inspected(saved[0]), saved[0] / "checkpoints" / iteration_name(STEP)
    assert (found["manifest"], found["notes"], found["path"]) == (True, [], str(folder))
    for name in ("step", "plan", "model", "optimizer_format", "precision"):
        assert found[name] == getattr(facts(), name)
    assert found["versions"] == versions()
    assert found["files"] == {path.name: path.stat().st_size for path in folder.iterdir()}
    assert found["totals"]["file_bytes"] == sum(found["files"].values())
    assert found["objects"]["random"] > 0


def test_tables_have_the_same(saved: tuple[Path, Shapes]) -> None:
    result = run("inspect", saved[0])
    assert result.exit_code == 0, result.output
    for words in (
        "fully_reshardable",
        "dp_shard 2",
        f"torch {versions()['torch']}",
        "embedding.word_embeddings.weight",
        "257 x 32",
        "optimizer.state.exp_avg_sq.decoder.layers.mlp.linear_fc2.weight",
        "2 x 32 x 128",
        "__1_0.distcp",
        "Parameters: 34,208 in 133.62 KiB",
    ):
        assert words in result.stdout, words


def test_without_a_manifest_the_common_state_tells(copy: Path) -> None:
    (copy / "manifest.json").unlink()
    found = inspected(copy)
    assert (found["manifest"], found["step"], found["precision"]) == (False, STEP, "fp32")
    assert found["plan"]["dp_shard"] == 2
    assert found["versions"] is None
    assert found["notes"] == [f"{copy} has no manifest.json"]


def test_a_checkpoint_of_megatron_alone_is_inspected(run_on, tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000007"
    run_on(2, save_by_megatron_alone, str(folder))
    found = inspected(folder)
    assert found["parameters"] == [
        {"name": "decoder.weight", "shape": [8, 3], "dtype": "float32", "shards": 2, "bytes": 96}
    ]
    assert (found["step"], found["precision"]) == (7, "bf16")
    assert found["plan"] == {"tp": 2, "pp": 1, "world_size": 2}
    assert list(found["objects"])[-1] == "rng_state"
    result = run("verify", folder)
    assert result.exit_code == 1
    assert "complete by its own metadata, but not verified" in result.stderr


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    for command in ("inspect", "verify"):
        for path, words in ((tmp_path, "holds no checkpoint"), (tmp_path / "absent", "is no folder")):
            result = run(command, path)
            assert result.exit_code == 2
            assert words in result.stderr
            assert "Traceback" not in result.output


def test_what_cannot_be_inspected_is_refused_in_one_message(copy: Path) -> None:
    (copy / ".metadata").write_bytes(b"no pickle")
    result = run("inspect", copy)
    assert result.exit_code == 2
    assert "cannot be inspected" in result.stderr
    assert "Traceback" not in result.output


def test_the_newest_of_a_run_is_meant_whole_or_not(copy: Path) -> None:
    run_folder = copy.parent.parent
    newer = shutil.copytree(copy, copy.with_name(iteration_name(STEP + 1)))
    assert inspected(run_folder)["path"] == inspected(copy.parent)["path"] == str(newer)
    (newer / ".metadata").unlink()
    assert run("verify", run_folder).exit_code == 1
    assert run("verify", copy).exit_code == 0
    shutil.rmtree(newer)
    newer.mkdir()
    assert run("verify", run_folder).exit_code == 1


def test_names_cannot_steer_the_terminal(copy: Path) -> None:
    (copy / "\x1b[31mred").write_text("")
    for command in ("inspect", "verify"):
        result = run(command, copy)
        assert "\x1b" not in result.output
        assert r"\x1b[31mred" in result.output
    assert printable("straße 重み") == "straße 重み"


# verify


def test_a_whole_checkpoint_is_said_to_be(saved: tuple[Path, Shapes]) -> None:
    result = run("verify", saved[0])
    assert result.exit_code == 0, result.output
    folder = saved[0] / "checkpoints" / iteration_name(STEP)
    files = len(list(folder.iterdir())) - 1
    assert result.stdout.startswith(f"{folder}: whole ({files} files, ")
    assert result.stderr == ""


def test_each_damaged_file_is_named(copy: Path) -> None:
    for file in sorted(copy.iterdir()):
        original = file.read_bytes()
        for content in (b"", original[:-1], original[:-1] + bytes([original[-1] ^ 1]), None):
            if content is None:
                file.unlink()
            else:
                file.write_bytes(content)
            result = run("verify", copy)
            assert result.exit_code == 1
            assert str(file) in result.stderr
            assert result.stdout == ""
            file.write_bytes(original)
    assert run("verify", copy).exit_code == 0


def test_json_has_each_damage(copy: Path) -> None:
    folder = str(copy)
    whole = run("verify", copy, "--json")
    assert whole.exit_code == 0
    assert json.loads(whole.stdout) == {"path": folder, "whole": True, "damage": []}
    (copy / "__1_0.distcp").write_bytes(b"")
    damaged = run("verify", copy, "--json")
    assert damaged.exit_code == 1
    (found,) = json.loads(damaged.stdout)["damage"]
    assert (found["file"], found["kind"]) == ("__1_0.distcp", "truncated")


def test_a_manifest_of_what_was_never_complete_does_not_help(copy: Path) -> None:
    (copy / "__1_0.distcp").unlink()
    write_manifest(copy, facts())
    result = run("verify", copy)
    assert result.exit_code == 1
    assert "__1_0.distcp: is missing" in result.stderr


def test_inspection_is_plain_data(saved: tuple[Path, Shapes]) -> None:
    inspection = inspect(saved[0] / "checkpoints" / iteration_name(STEP))
    assert json.loads(json.dumps(inspection.as_dict())) == inspected(saved[0])
