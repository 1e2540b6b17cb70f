"""A session that is saved and loaded goes on as if it had not stopped: to the last bit on the same plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_gpts import session, train_update
from snapshots import differences, message_of, snapshot

LOSS_TOLERANCE = 1e-5

Outcome = tuple[list[float], dict[str, torch.Tensor]]


def losses(opened: Any, updates: range) -> list[float]:
    """Train some updates."""
    return [train_update(opened, update).loss for update in updates]


def save_and_go_on(
    folder: str, saved_at: int, variant: str, optimizer: str, precision: str, sizes: dict[str, int]
) -> Outcome:
    """Save after ``saved_at`` updates; what two more updates give, and what they leave."""
    with session(variant, optimizer, precision=precision, **sizes) as opened:
        losses(opened, range(saved_at))
        opened.save_checkpoint(folder, loader_state={"position": saved_at}, extra={"note": "kept"})
        return losses(opened, range(saved_at, saved_at + 2)), snapshot(opened)


def load_and_go_on(
    folder: str, variant: str, optimizer: str, precision: str, sizes: dict[str, int]
) -> tuple[Outcome, dict[str, Any]]:
    """The same two updates from a session that starts otherwise and loads."""
    with session(variant, optimizer, precision=precision, seed=99, **sizes) as opened:
        train_update(opened, 40)
        payload = opened.load_checkpoint(folder)
        start = opened.step
        assert start == opened.state().step == payload["step"]
        return (losses(opened, range(start, start + 2)), snapshot(opened)), payload


@pytest.mark.parametrize(
    ("sizes", "variant", "optimizer", "precision", "saved_at"),
    [
        ({"dp_shard": 2}, "gpt2", "adam_scheduled", "bf16", 2),
        ({"dp_shard": 2}, "gpt2", "sgd", "fp32", 0),
        ({"tp": 2}, "gpt2", "adam_scheduled", "fp32", 0),
        ({"tp": 2}, "llama", "sgd", "bf16", 2),
        ({"pp": 2}, "gpt2", "adam_scheduled", "fp32", 2),
        ({"pp": 2}, "gpt2_dropout", "sgd", "bf16", 2),
        ({"pp": 2, "dp_shard": 2}, "gpt2", "adam", "bf16", 2),
        ({"tp": 2}, "gpt2_dropout", "adam", "fp32", 2),
    ],
    ids=str,
)
def test_resume_on_the_same_plan_is_exact(
    run_on,
    tmp_path: Path,
    sizes: dict[str, int],
    variant: str,
    optimizer: str,
    precision: str,
    saved_at: int,
) -> None:
    folder, ranks = str(tmp_path / "checkpoint"), torch.tensor(list(sizes.values())).prod().item()
    went_on = run_on(ranks, save_and_go_on, folder, saved_at, variant, optimizer, precision, sizes)
    resumed = run_on(ranks, load_and_go_on, folder, variant, optimizer, precision, sizes)
    for (expected, left), ((actual, found), payload) in zip(went_on, resumed, strict=True):
        assert actual == expected
        assert differences(left, found) == []
        assert payload["step"] == saved_at
        assert payload["loader_state"] == {"position": saved_at}
        assert payload["extra"]["note"] == "kept"
        assert payload["parallel_plan"]["world_size"] == ranks


def relay(folder: str | None, target: str | None, updates: range, sizes: dict[str, int]) -> list[float]:
    """Go on from a checkpoint under another plan, and write the next one."""
    with session("gpt2", "adam_scheduled", **sizes) as opened:
        if folder is not None:
            opened.load_checkpoint(folder)
            assert opened.step == updates.start
        found = losses(opened, updates)
        if target is not None:
            opened.save_checkpoint(target)
    return found


def test_resume_across_plans_keeps_the_curve(run_on, tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    expected = run_on(1, relay, None, None, range(8), {})[0]
    found = run_on(2, relay, None, first, range(2), {"tp": 2})[0]
    found += run_on(4, relay, first, second, range(2, 5), {"pp": 2, "dp_shard": 2})[0]
    found += run_on(1, relay, second, None, range(5, 8), {})[0]
    assert found == pytest.approx(expected, rel=LOSS_TOLERANCE, abs=0)


def save_one(folder: str) -> None:
    """A checkpoint after one update, written over an older one."""
    with session() as opened:
        opened.save_checkpoint(folder)
        train_update(opened, 0)
        opened.save_checkpoint(folder)


def misfits(folder: str, nothing: str, blocked: str) -> dict[str, str]:
    """What is said of folders and sessions that do not fit each other."""
    from mixle_megatron.errors import CheckpointError

    said = {}
    with session() as opened:
        before = snapshot(opened)
        said["empty"] = message_of(lambda: opened.load_checkpoint(nothing), CheckpointError)
        said["absent"] = message_of(lambda: opened.load_checkpoint(nothing + "/absent"), CheckpointError)
        said["blocked"] = message_of(lambda: opened.save_checkpoint(blocked), CheckpointError)
        assert differences(before, snapshot(opened)) == []
        opened.load_checkpoint(folder)
        said["step"] = str(opened.step)
    for name, variant, optimizer in (
        ("layers", "llama", "adam"),
        ("untied", "gpt2_untied", "adam"),
        ("optimizer", "gpt2", "sgd"),
    ):
        with session(variant, optimizer) as opened:
            said[name] = message_of(lambda opened=opened: opened.load_checkpoint(folder), CheckpointError)
    return said


def refuse_other_worlds(folder: str) -> str:
    """Load what one rank saved, where a change of the world's size is not wanted."""
    from mixle_megatron.errors import CheckpointError

    with session(dp_shard=2) as opened:
        said = message_of(
            lambda: opened.load_checkpoint(folder, allow_world_size_change=False), CheckpointError
        )
        opened.load_checkpoint(folder)
        assert opened.step == 1
    return said


def test_what_is_no_checkpoint_or_does_not_fit_is_said(run_on, tmp_path: Path) -> None:
    folder, nothing, blocked = str(tmp_path / "one"), tmp_path / "nothing", tmp_path / "file"
    nothing.mkdir()
    blocked.write_text("in the way")
    run_on(1, save_one, folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "nothing", "one"]
    (said,) = run_on(1, misfits, folder, str(nothing), str(blocked / "checkpoint"))
    assert "is not a Megatron dist-checkpoint" in said["empty"]
    assert "is not a Megatron dist-checkpoint" in said["absent"]
    assert "cannot write the checkpoint" in said["blocked"]
    assert said["step"] == "1"
    for name in ("layers", "untied", "optimizer"):
        assert folder in said[name], name
    assert "output_layer.weight of this session's model is missing" in said["untied"]
    assert "which adam wrote" in said["optimizer"]
    for text in run_on(2, refuse_other_worlds, folder):
        assert "world size 1" in text
        assert "allow_world_size_change" in text
