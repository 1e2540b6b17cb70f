"""Runs that begin from another run's checkpoint, from weights alone, or anew in their own folder."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_run import CONFIG, overrides, train_here

from mixle_megatron.config.load import load_config
from mixle_megatron.errors import Refused
from mixle_megatron.training import run_directory
from mixle_megatron.training.command import checked
from mixle_megatron.training.joining import is_restarted
from mixle_megatron.training.run_directory import RunDirectory

STEPS, SAVED_AT = 8, 4
SHORT = (
    *("plan.dp_shard=1", "evaluation.every=0", "data.validation_fraction=0"),
    *("checkpoint.every=2", "optimizer.warmup_steps=2"),
)


def receipts(folder: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "receipts.jsonl").read_text().splitlines()]


def losses(folder: str | Path) -> list[float]:
    return [receipt["loss"] for receipt in receipts(folder)]


def listing(folder: Path) -> dict[str, bytes]:
    """Everything below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def first(run_on: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps on one rank, with the checkpoints of its last two pairs of steps."""
    folder = tmp_path_factory.mktemp("first")
    return Path(run_on(1, train_here, str(folder), *SHORT, f"run.steps={STEPS}")[0]["folder"])


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"iter_{step:07d}"


def train_and_listen(*arguments: str) -> tuple[str, str]:
    """The run's folder, and what this rank said of it on stderr."""
    with redirect_stderr(io.StringIO()) as said:
        folder = train_here(*arguments)["folder"]
    return folder, said.getvalue()


def begin(folder: Path, origin: Path, *more: str) -> tuple[str, ...]:
    """Arguments of another run that begins from ``origin``."""
    return (str(folder), *SHORT, "run.name=second", f"run.resume.from={origin}", *more)


# Everything


def test_all_goes_on_to_the_last_bit(run_on: Any, first: Path, tmp_path: Path) -> None:
    arguments = begin(tmp_path, checkpoint(first, 6), f"run.steps={STEPS + 2}")
    second = run_on(1, train_here, *arguments)[0]["folder"]
    assert [receipt["step"] for receipt in receipts(second)] == [7, 8, 9, 10]
    assert losses(second)[:2] == losses(first)[6:]
    # the decay that the first run fixed, and not one over the second's steps
    rates = [[receipt["extra"]["learning_rate"] for receipt in receipts(run)] for run in (first, second)]
    assert rates[1][:2] == rates[0][6:]
    stored = yaml.safe_load((Path(second) / "config.yaml").read_text())
    assert stored["optimizer"]["decay_steps"] == STEPS
    assert stored["run"]["resume"] == {"from": str(checkpoint(first, 6)), "what": "all"}


def test_a_run_that_has_its_own_checkpoints_goes_on_from_these(
    run_on: Any, first: Path, tmp_path: Path
) -> None:
    arguments = begin(tmp_path, checkpoint(first, 6))
    run_on(1, train_here, *arguments, f"run.steps={STEPS}")
    elsewhere = [
        "run.resume.from=/no/such/folder" if "resume" in one else one for one in (*arguments, "run.steps=10")
    ]
    second = run_on(1, train_here, *elsewhere)[0]["folder"]
    assert [receipt["step"] for receipt in receipts(second)] == [7, 8, 9, 10]


def test_all_lifts_what_a_run_may_not_change(run_on: Any, first: Path, tmp_path: Path) -> None:
    changes = ("optimizer.lr=0.001", "optimizer.schedule=constant", "batch.global_batch_size=4")
    arguments = begin(tmp_path, first, *changes, "run.seed=7", "run.steps=10", "plan.tp=2", "precision=bf16")
    (second, said), (_, other) = run_on(2, train_and_listen, *arguments)
    assert [receipt["step"] for receipt in receipts(second)] == [9, 10]
    assert {receipt["extra"]["learning_rate"] for receipt in receipts(second)} == {1e-3}
    assert {receipt["global_examples"] for receipt in receipts(second)} == {4}
    assert f"warning: the data is read from its start: run.seed differs from {checkpoint(first, 8)}" in said
    assert other == ""


# Weights alone


def test_weights_alone_are_those_of_an_export(run_on: Any, first: Path, tmp_path: Path) -> None:
    """As if they had been exported and imported, which is another way through the files."""
    from mixle_megatron.checkpoint.export import export_checkpoint
    from mixle_megatron.training.initial_weights import import_weights

    export_checkpoint(first, tmp_path / "weights", to="safetensors")
    given = [*SHORT, "run.steps=3", "run.name=imported"]
    imported = tmp_path / "imported"
    import_weights(
        tmp_path / "weights", imported, config=CONFIG, overrides=tuple(overrides(tmp_path, *given))
    )
    run_on(1, train_here, str(tmp_path), *given)
    arguments = begin(tmp_path, first, "run.resume.what=model", "run.steps=3")
    second = run_on(1, train_here, *arguments)[0]["folder"]
    assert [receipt["step"] for receipt in receipts(second)] == [1, 2, 3]
    assert losses(second) == losses(imported)
    assert losses(second)[0] < losses(first)[0] - 0.3


def test_a_release_of_megatron_is_found_from_its_parent(run_on: Any, first: Path, tmp_path: Path) -> None:
    releases = tmp_path / "releases"
    shutil.copytree(checkpoint(first, 8), releases / "release")
    (releases / "release" / "manifest.json").unlink()
    (releases / "latest_checkpointed_iteration.txt").write_text("release\n")
    arguments = begin(tmp_path, releases, "run.resume.what=model", "run.steps=1", "plan.pp=2")
    second = run_on(2, train_here, *arguments)[0]["folder"]
    assert losses(second)[0] < losses(first)[0] - 0.3


def test_a_damaged_newest_one_is_left_out_and_left_alone(run_on: Any, first: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(first, other)
    shard = min(checkpoint(other, 8).glob("__*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    before = listing(other)
    second, said = run_on(1, train_and_listen, *begin(tmp_path, other, f"run.steps={STEPS + 1}"))[0]
    assert [receipt["step"] for receipt in receipts(second)] == [7, 8, 9]
    assert losses(second)[:2] == losses(first)[6:]
    assert listing(other) == before
    assert f"checkpoint 8 of {other} is damaged and left out" in said


# What is refused before any rank is started


def refused(*given: str) -> dict[str, str]:
    """Each fault by its field, from the files alone."""
    import torch.distributed as dist

    with pytest.raises(Refused) as caught:
        checked(load_config(CONFIG, overrides(*given)))
    assert not dist.is_initialized()
    return {fault.field: str(fault) for fault in caught.value.faults}


def save_outside_of_runs(path: str) -> None:
    from small_checkpoints import save_small

    save_small(path)


@pytest.fixture(scope="module")
def of_a_session(run_on: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("session") / "checkpoint"
    run_on(2, save_outside_of_runs, str(path))
    return path


def test_what_the_files_tell_is_refused_at_once(first: Path, of_a_session: Path, tmp_path: Path) -> None:
    def begun_from(origin: Path, *more: str) -> dict[str, str]:
        return refused(*begin(tmp_path, origin, *more))

    found = begun_from(tmp_path / "nowhere")
    assert "is no folder" in found["run.resume.from"]
    assert found["run.resume.from"].startswith("command line: ")
    assert "holds no checkpoint" in begun_from(tmp_path)["run.resume.from"]

    sizes = ("model.num_layers=4", "model.ffn_hidden_size=96", "model.max_position_embeddings=99")
    named = {size.split("=")[0] for size in sizes}
    found = begun_from(first, *sizes, "optimizer.name=sgd", "run.steps=8")
    assert found.keys() == named | {"optimizer.name", "run.steps"}
    assert f"is 2 in {checkpoint(first, 8)}; use 2" in found["model.num_layers"]
    assert "which adam wrote" in found["optimizer.name"]
    assert "is not above the 8" in found["run.steps"]
    assert begun_from(first, *sizes, "run.resume.what=model").keys() == named

    found = begun_from(of_a_session, "model.seq_length=16")
    assert found.keys() == {"run.resume.what"}
    assert "has no place in the data of a pretraining run; use model" in found["run.resume.what"]


def test_what_megatron_alone_wrote_has_weights_only(first: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(checkpoint(first, 8), alone)
    (alone / "manifest.json").unlink()
    found = refused(*begin(tmp_path, alone, "run.resume.what=model", "model.num_layers=3"))
    assert "is 2 in the checkpoint" in found["model.num_layers"]


def test_a_format_that_does_not_reshard_is_refused_by_axis(run_on: Any, tmp_path: Path) -> None:
    arguments = (str(tmp_path), *SHORT, "checkpoint.optimizer_format=dp_reshardable", "run.steps=2")
    run = Path(run_on(2, train_here, *arguments, "plan.dp_shard=2")[0]["folder"])
    found = refused(*begin(tmp_path, run, "plan.tp=2", "run.steps=4"))
    assert found.keys() == {"plan.tp"}
    assert "only dp_replicate, dp_shard and cp may change" in found["plan.tp"]
    second = run_on(1, train_here, *begin(tmp_path, run, "run.steps=4"))[0]["folder"]
    assert [receipt["step"] for receipt in receipts(second)] == [3, 4]


def mismatched(*arguments: str) -> list[str]:
    """What only the built model tells, on each rank."""
    from mixle_megatron.errors import DoesNotFit

    with pytest.raises(DoesNotFit) as caught:
        train_here(*arguments)
    return [fault.field for fault in caught.value.faults]


def test_what_only_the_model_tells_is_refused_on_every_rank(run_on: Any, first: Path, tmp_path: Path) -> None:
    arguments = begin(tmp_path, first, "model.kv_channels=16", "run.steps=10", "plan.tp=2")
    faults = run_on(2, mismatched, *arguments)
    expected = [
        f"decoder.layers.{layer}.self_attention.linear_{part}"
        for layer in range(2)
        for part in ("proj.weight", "qkv.bias", "qkv.weight")
    ]
    assert [sorted(each) for each in faults] == [expected] * 2
    assert not (tmp_path / "second" / "receipts.jsonl").exists()


# Anew


def begin_anew(folder: str, *more: str) -> dict[str, Any]:
    return train_here(folder, *more, anew=True)


def test_a_run_begins_anew_and_what_it_was_stays_a_run(run_on: Any, tmp_path: Path) -> None:
    shared = (str(tmp_path), *SHORT, "run.steps=4")
    run = Path(run_on(1, train_here, *shared)[0]["folder"])
    before = listing(run)
    run_on(2, begin_anew, *shared, "model.hidden_size=48", "plan.tp=2")
    assert listing(run / "before-1") == {name: text for name, text in before.items() if name != "run.lock"}
    assert len(receipts(run)) == 4
    run_on(1, begin_anew, *shared, f"run.resume.from={run / 'before-1'}", "run.steps=6")
    assert [receipt["step"] for receipt in receipts(run)] == [5, 6]
    assert (run / "before-2" / "checkpoints" / "iter_0000004").is_dir()
    # what was set aside can be gone on with where it lies
    went_on = run_on(1, train_here, str(run), *SHORT, "run.steps=6", "run.name=before-1")[0]
    assert went_on["step"] == 6
    assert losses(run / "before-1")[4:] == losses(run)


def test_a_restart_by_the_launcher_goes_on() -> None:
    assert not is_restarted({})
    assert not is_restarted({"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": ""})
    assert is_restarted({"TORCHELASTIC_RESTART_COUNT": "1"})
    assert is_restarted({"SLURM_RESTART_COUNT": "2"})


PARTS = (
    "receipts.jsonl",
    "evaluations.jsonl",
    "config.yaml",
    "checkpoints/iter_0000004/shard",
    "tensorboard/e",
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(st.sets(st.sampled_from(PARTS), min_size=1), min_size=1, max_size=4),
    crashes=st.lists(st.integers(0, 6), max_size=4),
)
def test_nothing_is_lost_by_setting_aside_whatever_interrupts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: list[set[str]], crashes: list[int]
) -> None:
    shutil.rmtree(tmp_path, ignore_errors=True)
    directory = RunDirectory(load_config(CONFIG, overrides(tmp_path)).config)
    written = []
    for attempt, names in enumerate(parts):
        for name in sorted(names):
            path = directory.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_text(f"{attempt} {name}")
                written.append(f"{attempt} {name}")
        if attempt < len(crashes):
            _set_aside_until(monkeypatch, directory, crashes[attempt])
        else:
            directory.set_aside()
    directory.set_aside()
    assert sorted(text.decode() for text in listing(directory.path).values()) == sorted(written)
    assert all(path.name.startswith("before-") for path in directory.path.iterdir())


class Crash(Exception):
    """The process has ended."""


def _set_aside_until(monkeypatch: pytest.MonkeyPatch, directory: RunDirectory, moves: int) -> None:
    left = iter(range(moves))

    def rename(source: Path, target: Path) -> None:
        if next(left, None) is None:
            raise Crash
        source.rename(target)

    with monkeypatch.context() as patched:
        patched.setattr(run_directory, "rename", rename)
        try:
            directory.set_aside()
        except Crash:
            return
