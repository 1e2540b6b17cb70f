"""What a session promises to a caller: its protocols, its clocks, and that it leaves nothing behind."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from small_gpts import (
    SEQUENCE,
    VOCABULARY,
    global_batch,
    parallel_plan,
    section,
    session,
    train_update,
)
from snapshots import message_of


def protocols_and_attributes() -> dict[str, Any]:
    """What mixle's code asks a session and its backend."""
    from mixle.utils.parallel.training_contracts import (
        DistributedTrainingBackend,
        DistributedTrainingSession,
        get_training_backend,
    )

    import mixle_megatron  # noqa: F401  (it registers the backend)

    backend = get_training_backend("megatron")
    with session(dp_shard=2) as opened:
        return {
            "backend": isinstance(backend, DistributedTrainingBackend),
            "session": isinstance(opened, DistributedTrainingSession),
            "rank": opened.data_parallel_rank,
            "size": opened.data_parallel_size,
            "logs": opened.is_logging_rank,
            "optimizer": opened.optimizer_receipt["name"],
            "state": opened.state().step,
            "sums": opened.reduce_sums(1.0, 2.0),
        }


def test_session_and_backend_satisfy_mixles_protocols(run_on) -> None:
    for rank, answer in enumerate(run_on(2, protocols_and_attributes)):
        assert answer == {
            "backend": True,
            "session": True,
            "rank": rank,
            "size": 2,
            "logs": rank == 0,
            "optimizer": "megatron_adam",
            "state": 0,
            "sums": (2.0, 4.0),
        }


def refused_batches(sizes: dict[str, int]) -> dict[str, str]:
    """What is said of batches that do not fit; the session trains on after them."""
    inputs, targets = global_batch(0)
    long = torch.zeros(2, SEQUENCE + 2, dtype=torch.long)
    foreign = inputs.clone()
    foreign[0, 0] = VOCABULARY
    cases = {
        "one dimension": (inputs[0], targets[0]),
        "two shapes": (inputs, targets[:, 1:]),
        "no sequence": (inputs[:, :0], targets[:, :0]),
        "too long": (long, long),
        "not divisible": (inputs[:, :15], targets[:, :15]),
        "foreign input": (foreign, targets),
        "foreign target": (inputs, foreign),
        "negative target": (inputs, targets - 1),
    }
    with session(**sizes) as opened:
        said = {
            name: message_of(partial(opened.train_batch, *case), ValueError) for name, case in cases.items()
        }
        assert message_of(lambda: opened.evaluate(inputs[0], targets[0]), ValueError) == said["one dimension"]
        assert train_update(opened, 0).step == 1
    return said


def test_batches_that_do_not_fit_are_refused_and_the_session_goes_on(run_on) -> None:
    expected = {
        "one dimension": "must have one shape",
        "two shapes": "must have one shape",
        "no sequence": "must have one shape",
        "too long": f"is above model.max_position_embeddings={SEQUENCE}",
        "not divisible": "is not divisible by plan.tp=2",
        "foreign input": f"inputs={VOCABULARY} is not a token id",
        "foreign target": f"targets={VOCABULARY} is not a token id",
        "negative target": "targets=-101 is not a token id",
    }
    for said in run_on(2, refused_batches, {"tp": 2}):
        for name, text in expected.items():
            assert text in said[name], name


def use_after_close() -> list[str]:
    """Every call on a closed session."""
    from mixle_megatron.errors import SessionError

    with session() as opened:
        train_update(opened, 0)
    opened.close()
    batch = global_batch(0)
    calls = [
        lambda: opened.train_batch(*batch),
        lambda: opened.evaluate(*batch),
        opened.finish_accumulation,
        lambda: opened.save_checkpoint("/nowhere"),
        lambda: opened.load_checkpoint("/nowhere"),
    ]
    return [message_of(call, SessionError) for call in calls]


def test_closed_session_refuses_every_call(run_on) -> None:
    (messages,) = run_on(1, use_after_close)
    assert messages == ["distributed training session is closed."] * 5


def close_with_pending() -> dict[str, str]:
    """Close with a pending batch: by itself, and while another exception is on its way."""
    from mixle_megatron.errors import SessionError
    from mixle_megatron.host import installed

    said = {}
    with session(gradient_accumulation_steps=2) as opened:
        opened.train_batch(*global_batch(0))
        said["close"] = message_of(opened.close, SessionError)
        said["save"] = message_of(lambda: opened.save_checkpoint("/nowhere"), SessionError)
        said["load"] = message_of(lambda: opened.load_checkpoint("/nowhere"), SessionError)
        opened.discard_accumulation()

    def fail_with_pending() -> None:
        with session(gradient_accumulation_steps=2) as opened:
            opened.train_batch(*global_batch(0))
            raise KeyError("the caller's own")

    said["other"] = message_of(fail_with_pending, KeyError)
    assert not installed()
    return said


def test_close_refuses_pending_gradients_unless_an_exception_is_on_its_way(run_on) -> None:
    (said,) = run_on(1, close_with_pending)
    assert "finish_accumulation() to commit or discard_accumulation()" in said["close"]
    assert "pending gradients are not state" in said["save"]
    assert "pending gradients are not state" in said["load"]
    assert said["other"] == '"the caller\'s own"'


def fail_in_a_step() -> str:
    """A step that raises, and the next call."""
    from mixle_megatron.errors import SessionError

    with session() as opened:

        def broken(_module: Any, _arguments: Any) -> None:
            raise ArithmeticError("in forward")

        hook = opened.module.register_forward_pre_hook(broken)
        message_of(lambda: train_update(opened, 0), ArithmeticError)
        hook.remove()
        return message_of(lambda: train_update(opened, 0), SessionError)


def test_session_whose_step_raised_is_not_used_again(run_on) -> None:
    assert "failed in an earlier call" in run_on(1, fail_in_a_step)[0]


def shared_callables() -> dict[tuple[str, str], Any]:
    """Every function and class that the session might replace, by module and name."""
    import sys

    import torch.cuda.nvtx

    modules = {name: module for name, module in sys.modules.items() if name.startswith("megatron.core")}
    modules |= {"torch": torch, "cuda": torch.cuda, "random": torch.cuda.random, "nvtx": torch.cuda.nvtx}
    modules |= {"distributed": dist, "c10d": dist.distributed_c10d, "Tensor": torch.Tensor}
    return {
        (module, name): value
        for module, owner in modules.items()
        for name, value in vars(owner).items()
        if callable(value)
    }


def train_and_look_around(sizes: dict[str, int]) -> dict[str, Any]:
    """What a session leaves in the process after it closes."""
    from megatron.core import parallel_state

    from mixle_megatron.host import installed
    from mixle_megatron.host.redirections import REDIRECTIONS
    from mixle_megatron.host.runtime import _resolve

    with session(**sizes) as opened:  # so that everything is imported
        train_update(opened, 0)
    before = shared_callables()
    # What 0.16 alone needs may be there already in another version.
    rows = [each for each in REDIRECTIONS if "0.16" not in each.reason]
    table = [vars(_resolve(each.owner)).get(each.name) for each in rows]
    with session(**sizes) as opened:
        train_update(opened, 0)
        during = shared_callables()
        within = [vars(_resolve(each.owner)).get(each.name) for each in rows]
    after = shared_callables()
    return {
        "redirected": sum(one is not other for one, other in zip(table, within, strict=True)),
        "table": len(rows),
        "wrapped": during["distributed", "all_reduce"] is not before["distributed", "all_reduce"],
        "still changed": [key for key in before if after.get(key) is not before[key]],
        "added": [key for key in after if key not in before],
        "installed": installed(),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "parallel_state": parallel_state.model_parallel_is_initialized(),
    }


def test_close_leaves_nothing_behind(run_on) -> None:
    for found in run_on(2, train_and_look_around, {"tp": 2}):
        assert found["redirected"] == found["table"]
        assert found["wrapped"]
        assert found["still changed"] == []
        assert found["added"] == []
        assert not found["installed"]
        assert not found["parallel_state"]
        assert found["groups"] == 1, "only the caller's default group is left"


def threads_while_open() -> list[int]:
    """Threads of this process in each of four sessions, one after another."""
    counts = []
    for _ in range(4):
        with session(tp=2) as opened:
            train_update(opened, 0)
            counts.append(len(os.listdir("/proc/self/task")))
    return counts


def test_closed_sessions_do_not_pile_up_the_threads_of_their_groups(run_on) -> None:
    for counts in run_on(2, threads_while_open):
        assert counts[3] == counts[2]


def fail_while_building() -> tuple[str, bool, int]:
    """A model that cannot be built, once the groups are there."""
    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.host import installed
    from mixle_megatron.models.gpt import GPT

    class Broken(GPT):
        def build_stage(self, config: Any, groups: Any, host: Any) -> Any:
            raise ArithmeticError("no such model")

    def prepare() -> None:
        MegatronBackend().prepare(Broken(section("gpt2")), plan=parallel_plan(tp=2), device="cpu")

    return message_of(prepare, ArithmeticError), installed(), len(dist.distributed_c10d._world.pg_map)


def test_failed_prepare_leaves_nothing_behind(run_on) -> None:
    assert run_on(2, fail_while_building) == [("no such model", False, 1)] * 2


def train_without_a_launcher() -> tuple[int, bool, int]:
    """One process that nobody launched: the session starts the default group itself, and leaves it."""
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    with session() as opened:
        step = train_update(opened, 0).step
    return step, dist.is_initialized(), dist.get_world_size()


def test_one_process_needs_no_launcher(run_on) -> None:
    assert run_on(1, train_without_a_launcher) == [(1, True, 1)]
