"""Where mixle's own torch_native backend goes wrong on LM.fit's loop, and this one does not.

Each test measures both. The first halves are facts of mixle 0.8.2: one that fails says that mixle has
moved, and that what the documentation says of it has to be read again.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mixle.models.language_model import LM
from mixle.utils.parallel import get_training_backend
from mixle.utils.parallel.torch_training import TorchDistributedSession
from mixle.utils.parallel.training_contracts import ParallelPlan
from test_causal_lm import (
    BLOCK,
    HEADS,
    LAYERS,
    VOCABULARY,
    WIDTH,
    assert_close,
    causal_lm,
    corpus,
    fit,
    tokens,
)

Parameters = dict[str, torch.Tensor]


def trained(backend: str, **options: Any) -> LM:
    """An LM after one epoch of LM.fit on the tests' text, or on another one in ``options``."""
    import mixle_megatron  # noqa: F401  registers the backend

    lm = LM(VOCABULARY, d_model=WIDTH, n_layer=LAYERS, n_head=HEADS, block=BLOCK, device="cpu")
    lm.module = causal_lm()
    fixed = {"dense": True, "distributed": True, "distributed_backend": backend, "optimizer": "adam"}
    return lm.fit(options.pop("text", corpus()), **fixed, **options)


def parameters_of(module: torch.nn.Module) -> Parameters:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


# Tensor parallelism: what LM.fit leaves, and what can be done with it


def save_after_tensor_parallel_fit(backend: str, folder: str) -> tuple[list[str], str]:
    """Every rank saves its LM; the kinds of its parameters, and the error of LM.from_dict."""
    lm = trained(backend, tp_size=2, batch_size=8)
    lm.save(f"{folder}/rank{dist.get_rank()}.pt")
    kinds = sorted({type(parameter).__name__ for parameter in lm.module.parameters()})
    try:
        LM.from_dict(lm.to_dict())
    except RuntimeError as error:
        return kinds, str(error)
    return kinds, ""


def test_a_tensor_parallel_fit_leaves_a_model_that_saves_and_loads(run_on: Any, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()

    for kinds, error in run_on(2, save_after_tensor_parallel_fit, "torch_native", str(theirs)):
        assert kinds == ["DTensor", "Parameter"]
        assert "mixed torch.Tensor and DTensor" in error
    for rank in range(2):  # in this process there is no mesh at all, as in whoever reads the file later
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            LM.load(str(theirs / f"rank{rank}.pt"))

    assert run_on(2, save_after_tensor_parallel_fit, "megatron", str(ours)) == [(["Parameter"], "")] * 2
    first, second = (parameters_of(LM.load(str(ours / f"rank{rank}.pt")).module) for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    untrained = parameters_of(causal_lm())
    assert not any(torch.equal(first[name], untrained[name]) for name in first)


# Sharded data parallelism in fp32


def error_of_sharded_fit() -> str:
    try:
        trained("torch_native", dp_shard=2, batch_size=4)
    except AttributeError as error:
        return str(error)
    return ""


def test_dp_shard_trains_in_fp32_as_one_rank_does(run_on: Any) -> None:
    # it hands torch's fully_shard None for a mixed precision policy, which FSDP2 reads the dtypes from
    assert run_on(2, error_of_sharded_fit) == ["'NoneType' object has no attribute 'param_dtype'"] * 2

    expected = run_on(1, fit, "torch_native", {}, {})[0]
    results = run_on(2, fit, "megatron", {"dp_shard": 2}, {})
    assert results[0]["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    for result in results:
        assert_close(result["parameters"], expected["parameters"], 1e-4)


# Checkpoints under another number of ranks

UPDATES = (tokens(4), tokens(8)[4:])


def open_on(backend: str, sizes: dict[str, int]) -> Any:
    import mixle_megatron  # noqa: F401

    return get_training_backend(backend).prepare(
        causal_lm(), plan=ParallelPlan(**sizes), device="cpu", optimizer="adam", lr=1e-2
    )


def update(session: Any, rows: torch.Tensor) -> None:
    own = rows[session.data_parallel_rank :: session.data_parallel_size]
    session.train_batch(own[:, :-1], own[:, 1:])


def save_after_one_update(backend: str, path: str) -> None:
    session = open_on(backend, {"dp_replicate": 2})
    update(session, UPDATES[0])
    session.save_checkpoint(path)
    session.close()


def load_and_go_on(backend: str, path: str, allowed: bool) -> tuple[str, Parameters]:
    """One rank loads what two saved and makes the second update; the error, and the parameters."""
    session = open_on(backend, {})
    error = ""
    try:
        session.load_checkpoint(path, allow_world_size_change=allowed)
        update(session, UPDATES[1])
    except RuntimeError as caught:
        error = str(caught)
    session.close()
    return error, parameters_of(session.module)


def two_updates(backend: str) -> Parameters:
    session = open_on(backend, {})
    for rows in UPDATES:
        update(session, rows)
    session.close()
    return parameters_of(session.module)


def test_another_number_of_ranks_may_load_where_that_is_asked_for(run_on: Any, tmp_path: Path) -> None:
    theirs, ours = str(tmp_path / "theirs"), str(tmp_path / "ours")
    run_on(2, save_after_one_update, "torch_native", theirs)
    run_on(2, save_after_one_update, "megatron", ours)

    # the session has no way to say what its refusal asks for
    error, _ = run_on(1, load_and_go_on, "torch_native", theirs, True)[0]
    assert "requires rank_local_transform" in error
    assert list(inspect.signature(TorchDistributedSession.load_checkpoint).parameters) == [
        "self",
        "path",
        "allow_world_size_change",
    ]

    error, found = run_on(1, load_and_go_on, "megatron", ours, True)[0]
    assert error == ""
    assert_close(found, run_on(1, two_updates, "torch_native")[0], 1e-5)
    for backend, path in (("torch_native", theirs), ("megatron", ours)):
        error, _ = run_on(1, load_and_go_on, backend, path, False)[0]
        assert "pass allow_world_size_change=True" in error


# An error while gradients are pending


def interrupted_fit(backend: str) -> str:
    """What comes out of an LM.fit that is interrupted between the two batches of an update."""
    from mixle_megatron.session import MegatronSession

    session_class = {"torch_native": TorchDistributedSession, "megatron": MegatronSession}[backend]
    train = session_class.train_batch

    def interrupted(session: Any, inputs: Any, targets: Any) -> Any:
        if session.state().pending_accumulation:
            raise KeyboardInterrupt("from the user")
        return train(session, inputs, targets)

    try:
        with mock.patch.object(session_class, "train_batch", interrupted):
            trained(backend, dp_replicate=2, batch_size=4, gradient_accumulation_steps=2)
    except (KeyboardInterrupt, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_close_lets_the_error_of_the_loop_through(run_on: Any) -> None:
    hidden = "RuntimeError: training session has pending gradients"
    assert all(error.startswith(hidden) for error in run_on(2, interrupted_fit, "torch_native"))
    assert run_on(2, interrupted_fit, "megatron") == ["KeyboardInterrupt: from the user"] * 2


# Five rows for two replicas

FIVE_ROWS = corpus()[: 5 * (BLOCK + 1)]


def collectives_of_replica(rank: int) -> list[str]:
    """What one of two torch_native replicas asks of their group in an epoch of five rows, one a batch.

    The group is torch's stand-in for tests, whose collectives return at once: a real one would wait
    for the other replica. DistributedDataParallel is real; its hook says when it reduces gradients.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    asked: list[str] = []

    class Observed(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.register_comm_hook(None, reduce_gradients)

    def reduce_gradients(_state, bucket):  # torch refuses annotations that are strings
        asked.append("gradients")
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def all_reduce(tensor: torch.Tensor, group: Any) -> None:
        asked.append(f"{tensor.numel()} sums")

    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        with (
            mock.patch.object(torch.nn.parallel, "DistributedDataParallel", Observed),
            mock.patch.object(dist, "all_reduce", all_reduce),
        ):
            trained("torch_native", text=FIVE_ROWS, dp_replicate=2, batch_size=1)
    finally:
        dist.destroy_process_group()
    return asked


def fit_five_rows(backend: str, sizes: dict[str, int], batch_size: int) -> tuple[Parameters, list[float]]:
    losses: list[float] = []

    def log(_epoch: int, loss: float) -> None:
        losses.append(loss)

    lm = trained(backend, text=FIVE_ROWS, batch_size=batch_size, log=log, **sizes)
    return parameters_of(lm.module), losses


def test_replicas_with_different_numbers_of_rows_finish_their_epoch(run_on: Any) -> None:
    """Ours is one rank's; see also test_replicas_may_run_out_of_data_at_different_times."""
    an_update, the_epoch = ["gradients", "3 sums"], ["2 sums"]
    first, second = collectives_of_replica(0), collectives_of_replica(1)
    assert first == an_update * 3 + the_epoch
    assert second == an_update * 2 + the_epoch  # so the first replica's third update waits for ever

    expected, losses = run_on(1, fit_five_rows, "torch_native", {}, 2)[0]
    results = run_on(2, fit_five_rows, "megatron", {"dp_replicate": 2}, 1)
    assert results[0][1] == pytest.approx(losses, rel=1e-5)
    for parameters, _ in results:
        assert_close(parameters, expected, 1e-4)
