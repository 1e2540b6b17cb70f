"""What does not fit is listed once by name, on every rank, and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_gpts import OPTIMIZERS, SIZES, VARIANTS, session, train_update, whole_weights
from snapshots import differences, snapshot

from mixle_megatron.checkpoint.expected_state import Expected
from mixle_megatron.checkpoint.fitting import model_faults, optimizer_faults
from mixle_megatron.checkpoint.stored_state import Stored
from mixle_megatron.config.model import ModelSection

Shapes = dict[str, tuple[int, ...]]

OTHERS: dict[str, dict[str, Any]] = {
    "layers and kinds of layers": VARIANTS["llama"] | {"num_layers": 4},
    "widths": {"hidden_size": 40, "num_attention_heads": 4},
    "untied": {"share_embeddings_and_output_weights": False},
    "experts": {"num_moe_experts": 2, "moe_ffn_hidden_size": 16, "add_bias_linear": False},
    "vocabulary": {"vocab_size": 259},
}
"""Models that a checkpoint of the small GPT-2 is not of."""

PLANS: dict[str, dict[str, int]] = {
    "dp_shard": {"dp_shard": 2},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
}


def save_small(folder: str, optimizer: str = "adam") -> Shapes:
    """A checkpoint of the small GPT-2, after two updates; the shapes of its parameters."""
    with session("gpt2", optimizer) as opened:
        for update in range(2):
            train_update(opened, update)
        opened.save_checkpoint(folder)
        return {name: tuple(weight.shape) for name, weight in whole_weights(opened).items()}


def shapes_of(fields: dict[str, Any]) -> Shapes:
    """The shapes of a model's parameters, from one rank that holds it."""
    with other_session(fields, "adam", {}) as opened:
        return {name: tuple(weight.shape) for name, weight in whole_weights(opened).items()}


def other_session(fields: dict[str, Any], optimizer: str, plan: dict[str, int]) -> Any:
    from mixle.utils.parallel.training_contracts import ParallelPlan

    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.models.gpt import GPT

    return MegatronBackend().prepare(
        GPT(ModelSection(**(SIZES | fields)), seed=5),
        plan=ParallelPlan(**plan),
        optimizer=OPTIMIZERS[optimizer],
        device="cpu",
    )


def refused(
    folder: str, fields: dict[str, Any], optimizer: str, plan: dict[str, int], updates: int
) -> tuple[list[tuple[str, str]], list[str]]:
    """Each fault's field and text, and what of the session has changed."""
    from mixle_megatron.errors import CheckpointError, DoesNotFit

    with other_session(fields, optimizer, plan) as opened:
        for update in range(updates):
            train_update(opened, update)
        before = snapshot(opened)
        with pytest.raises(CheckpointError) as caught:
            opened.load_checkpoint(folder)
        changed = differences(before, snapshot(opened))
        train_update(opened, updates)  # and it can be gone on with
    assert isinstance(caught.value, DoesNotFit)
    return [(fault.field, str(fault)) for fault in caught.value.faults], changed


@pytest.fixture(scope="module")
def small(run_on: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Shapes]:
    """A checkpoint, and the shapes of its model."""
    folder = str(tmp_path_factory.mktemp("small") / "checkpoint")
    return folder, run_on(1, save_small, folder)[0]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("plan", PLANS)
def test_every_mismatch_is_named_once_on_every_rank(
    run_on: Any, small: tuple[str, Shapes], other: str, plan: str
) -> None:
    folder, stored = small
    own = run_on(1, shapes_of, OTHERS[other])[0]
    differing = {name for name in stored.keys() | own.keys() if stored.get(name) != own.get(name)}
    for faults, changed in run_on(2, refused, folder, OTHERS[other], "adam", PLANS[plan], 0):
        assert [field for field, _ in faults] == sorted({field for field, _ in faults}, key=by_number)
        assert {field for field, _ in faults} == differing
        for field, text in faults:
            assert folder in text
            if field in stored and field in own:
                assert str(list(stored[field])) in text
                assert str(list(own[field])) in text
        assert changed == []


def by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


@pytest.mark.parametrize(("writer", "reader"), [("sgd", "adam"), ("adam", "sgd")])
def test_another_optimizer_is_refused_by_the_name_of_who_wrote_it(
    run_on: Any, tmp_path: Path, writer: str, reader: str
) -> None:
    folder = str(tmp_path / "checkpoint")
    run_on(1, save_small, folder, writer)
    for faults, changed in run_on(2, refused, folder, {}, reader, {"dp_shard": 2}, 1):
        assert [field for field, _ in faults] == ["optimizer"]
        assert f"which {writer} wrote" in faults[0][1]
        assert "what='model'" in faults[0][1]
        assert changed == []


def test_padding_of_the_vocabulary_is_no_mismatch(run_on: Any, small: tuple[str, Shapes]) -> None:
    folder, _ = small
    assert run_on(2, step_after_loading, folder, {"tp": 2}) == [2, 2]


def step_after_loading(folder: str, plan: dict[str, int]) -> int:
    with other_session({}, "adam", plan) as opened:
        opened.load_checkpoint(folder)
        return opened.step


# The comparison itself

names = st.sampled_from([f"decoder.layers.{layer}.{kind}" for layer in (0, 2, 10) for kind in "abc"])
shapes = st.dictionaries(names, st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=9)


@given(ours=shapes, theirs=shapes)
def test_differences_of_the_model_are_those_of_two_tables(ours: Shapes, theirs: Shapes) -> None:
    expected = Expected(shapes=ours, keys={name: name for name in ours})
    stored = Stored(shapes=theirs, keys={name: name for name in theirs})
    faults = model_faults(expected, stored, "there", tokens=None, stored_tokens=None)
    named = [fault.field for fault in faults]
    assert named == sorted(set(named), key=by_number)
    assert set(named) == {name for name, _ in ours.items() ^ theirs.items()}


@given(ours=shapes, theirs=shapes, moments=shapes)
def test_differences_of_the_optimizer_are_named_once_for_all_that_it_keeps(
    ours: Shapes, theirs: Shapes, moments: Shapes
) -> None:
    expected = Expected(shapes=ours, trained=set(ours))
    stored = Stored()
    stored.optimizer |= {"param": theirs, "exp_avg": moments}
    kinds = ("param", "exp_avg")
    faults = optimizer_faults(expected, stored, "there", optimizer="adam", kinds=kinds, writer="adam")
    named = [fault.field for fault in faults]
    assert named == sorted(set(named), key=by_number)
    wrong = ours.items() ^ theirs.items() | ours.items() ^ moments.items()
    assert set(named) == {name for name, _ in wrong}


@pytest.mark.parametrize(
    ("rows", "ours", "theirs", "fits"),
    [
        (260, 257, 257, True),
        (257, 257, None, True),
        (260, 257, None, True),
        (260, 257, 260, False),
        (256, 257, None, False),
        (50304, 257, None, False),
        (50304, 50257, None, True),
        (264, None, None, True),
        (264, None, 257, True),
    ],
)
def test_rows_of_tokens_are_compared_as_far_as_they_are_known(
    rows: int, ours: int | None, theirs: int | None, fits: bool
) -> None:
    name = "embedding.word_embeddings.weight"
    expected = Expected(shapes={name: (258, 8)}, keys={name: name}, padded={name})
    stored = Stored(shapes={name: (rows, 8)}, keys={name: name})
    faults = model_faults(expected, stored, "there", tokens=ours, stored_tokens=theirs)
    assert (faults == []) == fits


def test_a_tensor_under_another_key_is_said_to_be() -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    expected = Expected(shapes={name: (4, 8)}, keys={name: "decoder.layers.mlp.linear_fc1.weight"})
    stored = Stored(shapes={name: (4, 8)}, keys={name: name})
    (fault,) = model_faults(expected, stored, "there", tokens=None, stored_tokens=None)
    assert fault.field == name
    assert "reads it from decoder.layers.mlp.linear_fc1.weight" in str(fault)
