"""save_checkpoint and load_checkpoint take, mean and return what those of mixle's own session do."""

from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from mixle.utils.parallel.fault_tolerant_training import LoaderState
from mixle.utils.parallel.torch_training import TorchDistributedSession

from mixle_megatron.checkpoint.plain_values import decoded, encoded
from mixle_megatron.session import MegatronSession

BACKENDS = ("torch_native", "megatron")
ROWS = torch.randint(0, 20, (4, 9), generator=torch.Generator().manual_seed(0))


def opened(backend: str, **sizes: int) -> Any:
    from mixle.models.transformer import build_causal_lm
    from mixle.utils.parallel.training_contracts import ParallelPlan, get_training_backend

    import mixle_megatron  # noqa: F401

    torch.manual_seed(0)
    module = build_causal_lm(20, d_model=16, n_layer=1, n_head=2, block=8)
    return get_training_backend(backend).prepare(
        module, plan=ParallelPlan(**sizes), device="cpu", optimizer="adam"
    )


def drawn() -> list[float]:
    """The next number of each generator."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def save_and_load(backend: str, path: str) -> dict[str, Any]:
    """What one rank gives, saves and gets back."""
    session = opened(backend)
    session.train_batch(ROWS[:, :-1], ROWS[:, 1:])
    saved = session.save_checkpoint(
        path,
        loader_state=LoaderState(seed=3, epoch=1, rank=0, world_size=1, batch_idx=4),
        typed_scheduler_state={"kinds": (1, "a"), "array": np.arange(3, dtype=np.int16), 2: np.float32(0.5)},
        extra={"objective": "test", "bytes": b"\x00\xff", "tensor": torch.tensor([[1.5, 2.5]])},
    )
    expected = drawn()
    session.close()
    session = opened(backend)
    random.seed(5)
    np.random.seed(5)
    payload = session.load_checkpoint(path)
    found = drawn()
    step = session.step
    with pytest.raises(TypeError):
        session.save_checkpoint(f"{path}.not", extra={"function": drawn})
    session.close()
    return {"saved": saved, "drawn": (expected, found), "step": step, "payload": payload}


def test_a_session_gives_back_what_mixles_does(run_on: Any, tmp_path: Path) -> None:
    theirs, ours = (run_on(1, save_and_load, name, str(tmp_path / name))[0] for name in BACKENDS)
    for result in (theirs, ours):
        assert result["saved"] is None
        assert result["drawn"][0] == result["drawn"][1]
        assert result["step"] == 1
    expected, found = theirs["payload"], ours["payload"]
    assert expected.keys() <= found.keys()
    for key in ("step", "loader_state", "parallel_plan", "rank_local_state_status", "saved_world_size"):
        assert found[key] == expected[key], key
    for key in ("requires_rank_local_transform", "world_size_changed"):
        assert found[key] is expected[key], key
    assert_same(found["typed_scheduler_state"], expected["typed_scheduler_state"])
    # which optimizer it was is the one thing that the two cannot have alike
    names = [payload["extra"].pop("optimizer_receipt")["name"] for payload in (found, expected)]
    assert names[0] == "megatron_adam"
    assert isinstance(names[1], str)
    assert_same(found["extra"], expected["extra"])
    assert not (tmp_path / "megatron.not").exists()


def assert_same(found: Any, expected: Any) -> None:
    """Of one type and value, all the way down."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, tuple | list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, np.ndarray | torch.Tensor):
        assert (found.dtype, tuple(found.shape)) == (expected.dtype, tuple(expected.shape))
        assert found.tolist() == expected.tolist()
    else:
        assert found == expected


@pytest.mark.parametrize("method", ["save_checkpoint", "load_checkpoint"])
def test_the_arguments_are_mixles_and_more(method: str) -> None:
    theirs, ours = (
        inspect.signature(getattr(session, method)).parameters
        for session in (TorchDistributedSession, MegatronSession)
    )
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind
        if (method, name) != ("load_checkpoint", "allow_world_size_change"):  # which is True here
            assert ours[name].default == parameter.default


def save_asynchronously(backend: str, path: str) -> tuple[bool, str, list[str]]:
    session = opened(backend)
    saving = session.save_checkpoint(path, asynchronous=True)
    saving.wait()
    offered = [name for name in ("wait", "done", "path") if hasattr(saving, name)]
    told = saving.done, str(saving.path), offered
    session.load_checkpoint(path)
    session.close()
    return told


def test_an_asynchronous_save_is_waited_for_alike(run_on: Any, tmp_path: Path) -> None:
    for name in BACKENDS:
        path = str(tmp_path / name)
        assert run_on(1, save_asynchronously, name, path) == [(True, path, ["wait", "done", "path"])]


# What is a rank's own


def keep_of_rank(backend: str, path: str, differ: bool) -> Any:
    import torch.distributed as dist

    session = opened(backend, dp_replicate=2)
    own = dist.get_rank() if differ else 7
    session.save_checkpoint(path, loader_state={"rank": own}, typed_scheduler_state=[own])
    payload = session.load_checkpoint(path)
    session.close()
    return payload["loader_state"], payload["typed_scheduler_state"], payload["rank_local_state_status"]


def load_on_one(path: str) -> dict[str, Any]:
    session = opened("megatron")
    payload = session.load_checkpoint(path)
    session.close()
    return payload


@pytest.mark.parametrize("differ", [True, False])
def test_each_rank_gets_its_own_state(run_on: Any, tmp_path: Path, differ: bool) -> None:
    theirs, ours = (run_on(2, keep_of_rank, name, str(tmp_path / name), differ) for name in BACKENDS)
    assert ours == theirs
    assert ours == [({"rank": own}, [own], "native") for own in ((0, 1) if differ else (7, 7))]
    (payload,) = run_on(1, load_on_one, str(tmp_path / "megatron"))
    assert payload["world_size_changed"] is True
    assert payload["saved_world_size"] == 2
    assert payload["requires_rank_local_transform"] is differ
    if differ:
        assert payload["loader_state"] is None
        assert [each["loader_state"] for each in payload["rank_local_states"]] == [{"rank": 0}, {"rank": 1}]
    else:
        assert payload["loader_state"] == {"rank": 7}


def keep_what_one_cannot(path: str) -> str:
    import torch.distributed as dist
    from snapshots import message_of

    session = opened("megatron", dp_replicate=2)
    state = {"open": object()} if dist.get_rank() == 1 else {"open": None}
    said = message_of(lambda: session.save_checkpoint(path, loader_state=state), TypeError)
    session.close()
    return said


def test_what_no_checkpoint_keeps_is_refused_on_every_rank(run_on: Any, tmp_path: Path) -> None:
    said = run_on(2, keep_what_one_cannot, str(tmp_path / "checkpoint"))
    expected = "rank 1: loader_state.open is a object, which no checkpoint keeps: give plain values"
    assert said == [expected] * 2
    assert list(tmp_path.iterdir()) == []


# The values themselves

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
numbers = arrays.arrays(
    st.sampled_from([np.float32, np.int64, np.bool_, np.complex64, ">i2"]),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
    elements={"allow_nan": False},
)
tensors = arrays.arrays(np.int32, arrays.array_shapes(min_dims=0, min_side=0, max_side=3)).map(
    lambda array: torch.from_numpy(array).to(torch.bfloat16)
)
values = st.recursive(
    plain | numbers | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.just("__type__"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(value=values)
def test_values_come_back_as_they_were(value: Any) -> None:
    kept = encoded(value, "value")
    assert_plain(kept)
    assert_same(decoded(kept), value)


def assert_plain(value: Any) -> None:
    """What torch's weights-only reader builds without running anything."""
    if isinstance(value, dict):
        assert all(type(key) is str for key in value)
    if isinstance(value, dict | tuple | list):
        for each in value.values() if isinstance(value, dict) else value:
            assert_plain(each)
    else:
        assert value is None or type(value) in (bool, int, float, str)
