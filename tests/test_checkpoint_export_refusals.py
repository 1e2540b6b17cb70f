"""What an export cannot know, will not write, and finds damaged."""

from __future__ import annotations

import dataclasses
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from exported_models import Tensors, assert_equal, saved_padded
from mixle.models.language_model import LM
from plan_matrix import DENSE
from safetensors import safe_open
from safetensors.torch import load_file
from small_gpts import VOCABULARY
from typer.testing import CliRunner

from mixle_megatron.checkpoint.export import export_checkpoint
from mixle_megatron.checkpoint.export_source import open_checkpoint
from mixle_megatron.checkpoint.manifest import Facts, write_manifest
from mixle_megatron.cli.checkpoint_export import export
from mixle_megatron.config.model import ModelSection
from mixle_megatron.errors import CheckpointError, Refused


@pytest.fixture(scope="module")
def padded(run_on: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """See :func:`exported_models.saved_padded`."""
    path = tmp_path_factory.mktemp("padded") / "checkpoint"
    return path, saved_padded(run_on, path)


# What a manifest tells


def described(checkpoint: Path, folder: Path, **model: Any) -> Path:
    """A copy of the checkpoint, with a manifest that says this of its model."""
    copy = folder / "checkpoint"
    shutil.copytree(checkpoint, copy)
    write_manifest(copy, Facts(2, {"tp": 2}, model, "fully_reshardable", "bf16"))
    return copy


def test_a_manifest_that_tells_the_whole_model_is_enough(
    padded: tuple[Path, Tensors], tmp_path: Path
) -> None:
    copy = described(padded[0], tmp_path, **ModelSection(**DENSE).model_dump(), padded_vocab_size=258)
    export_checkpoint(copy, tmp_path / "out", to="safetensors")
    assert_equal(load_file(tmp_path / "out"), padded[1])
    with safe_open(tmp_path / "out", "pt") as file:
        assert "mixle_megatron.model" in file.metadata()
    export_checkpoint(copy, tmp_path / "lm.pt", to="mixle")
    assert LM.load(str(tmp_path / "lm.pt")).n_head == 4


def test_a_manifest_that_tells_only_sizes_cuts_padding(padded: tuple[Path, Tensors], tmp_path: Path) -> None:
    copy = described(padded[0], tmp_path, vocab_size=VOCABULARY, num_attention_heads=4)
    export_checkpoint(copy, tmp_path / "out", to="safetensors")
    assert_equal(load_file(tmp_path / "out"), padded[1])
    with pytest.raises(Refused, match="--heads must be the number of heads of a mixle CausalLM"):
        export_checkpoint(copy, tmp_path / "lm.pt", to="mixle")
    with pytest.raises(Refused, match="--heads=2 is 4"):
        export_checkpoint(copy, tmp_path / "lm.pt", to="mixle", heads=2)
    export_checkpoint(copy, tmp_path / "lm.pt", to="mixle", heads=4)


def test_an_attention_scale_does_not_get_lost(padded: tuple[Path, Tensors], tmp_path: Path) -> None:
    copy = described(padded[0], tmp_path, vocab_size=VOCABULARY, softmax_scale=0.125)
    with pytest.raises(Refused, match="softmax_scale"):
        export_checkpoint(copy, tmp_path / "lm.pt", to="mixle", heads=4)


# What is refused, and damage


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"to": "safetensors"}, "--vocab-size"),
        ({"to": "safetensors", "vocab_size": 259}, "vocab_size"),
        ({"to": "mixle", "vocab_size": VOCABULARY}, "--heads"),
        ({"to": "mixle", "vocab_size": VOCABULARY, "heads": 5}, "--heads"),
    ],
)
def test_what_no_shape_tells_has_to_be_stated(
    padded: tuple[Path, Tensors], tmp_path: Path, arguments: dict[str, Any], field: str
) -> None:
    with pytest.raises(Refused, match=field):
        export_checkpoint(padded[0], tmp_path / "out", **arguments)
    assert not any(tmp_path.iterdir())


def test_it_writes_over_nothing(padded: tuple[Path, Tensors], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    for out in (tmp_path / "out", tmp_path / "absent" / "out"):
        with pytest.raises(Refused, match="OUT"):
            export_checkpoint(padded[0], out, to="safetensors", vocab_size=VOCABULARY)
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("to", ["safetensors", "mixle"])
@pytest.mark.parametrize("largest", [10_000, 200_000])
def test_a_full_disk_leaves_no_file(
    padded: tuple[Path, Tensors], tmp_path: Path, to: str, largest: int
) -> None:
    """Files may be no larger: of 200,000 bytes each tensor has room, and not all of them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
    try:
        with pytest.raises((OSError, RuntimeError)):
            export_checkpoint(padded[0], tmp_path / "out", to=to, vocab_size=VOCABULARY, heads=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not any(tmp_path.iterdir())


def test_the_config_of_another_run_is_noticed(padded: tuple[Path, Tensors], tmp_path: Path) -> None:
    other = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 16}
    copy = described(padded[0], tmp_path, **ModelSection(vocab_size=VOCABULARY, **other).model_dump())
    with pytest.raises(Refused) as refused:
        export_checkpoint(copy, tmp_path / "out", to="safetensors")
    assert [fault.field for fault in refused.value.faults] == ["model.num_layers", "model.hidden_size"]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="PATH"):
        export_checkpoint(tmp_path, tmp_path / "out", to="safetensors")


@pytest.mark.parametrize("kind", ["missing", "truncated"])
def test_a_damaged_checkpoint_leaves_no_file(padded: tuple[Path, Tensors], tmp_path: Path, kind: str) -> None:
    copy = tmp_path / "checkpoint"
    shutil.copytree(padded[0], copy)
    part = copy / "__1_0.distcp"
    if kind == "missing":
        part.unlink()
    else:
        part.write_bytes(part.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        export_checkpoint(copy, tmp_path / "out", to="safetensors", vocab_size=VOCABULARY)
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_a_part_that_nobody_wrote_is_noticed(padded: tuple[Path, Tensors]) -> None:
    stored = open_checkpoint(padded[0])
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    entry = stored._metadata.state_dict_metadata[stored.tensors[name].key]
    entry.chunks = [chunk for chunk in entry.chunks if tuple(chunk.offsets) != (1, 0, 64)]
    with pytest.raises(CheckpointError, match="does not hold all of"):
        stored.read(name)
    stored.read(name.replace("layers.1", "layers.0"))


def test_values_that_the_optimizer_hides_are_not_replaced_by_rounded_ones(
    padded: tuple[Path, Tensors], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a checkpoint whose optimizer's state is cut by data-parallel ranks and not by name."""
    from mixle_megatron.checkpoint import export_source

    def renamed(path: Path) -> Any:
        metadata = read(path)
        entries = {
            key.replace("optimizer.state.param.", "optimizer.buckets."): entry
            for key, entry in metadata.state_dict_metadata.items()
        }
        return dataclasses.replace(metadata, state_dict_metadata=entries)

    read = export_source.read_metadata
    monkeypatch.setattr(export_source, "read_metadata", renamed)
    options = {"to": "safetensors", "vocab_size": VOCABULARY}
    with pytest.raises(Refused, match="--dtype"):
        export_checkpoint(padded[0], tmp_path / "out", **options)
    export_checkpoint(padded[0], tmp_path / "out", dtype="bf16", **options)
    assert_equal(load_file(tmp_path / "out"), {name: held.bfloat16() for name, held in padded[1].items()})


def test_the_command(padded: tuple[Path, Tensors], tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(export)
    out = str(tmp_path / "out")
    options = ["--to", "safetensors", "--vocab-size", str(VOCABULARY)]
    result = CliRunner().invoke(app, [str(padded[0]), out, *options])
    assert result.exit_code == 0, result.output
    assert f"{out}: {len(padded[1])} tensors" in result.output
    assert len(load_file(out)) == len(padded[1])
