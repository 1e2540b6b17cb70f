"""The checkpoint that a path of somebody else's names; nothing in its folder is changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mixle_megatron.checkpoint.completeness import damage
from mixle_megatron.checkpoint.iterations import RELEASE, iteration_name, named_by_tracker, step_of, steps_in
from mixle_megatron.checkpoint.newest import find_newest
from mixle_megatron.checkpoint.opening import is_checkpoint
from mixle_megatron.errors import CheckpointError, Fault, Refused


@dataclass(frozen=True)
class Origin:
    """A whole checkpoint.

    Attributes:
        folder: the checkpoint.
        warnings: newer ones that were passed over, and what else is odd, one sentence each.
    """

    folder: Path
    warnings: tuple[str, ...] = ()


def find_origin(path: Path, field: str, *, checksums: bool) -> Origin:
    """The checkpoint in ``path``, or the newest whole one of the run's folder ``path``.

    A folder of Megatron-LM's checkpoints is one of a run too; of one that its tracker file calls a
    ``release``, that is meant.

    Args:
        path: a checkpoint's folder, a run's, or one that holds checkpoints.
        field: what to call the path in a refusal.
        checksums: whether to read every file, or to compare sizes only.

    Raises:
        Refused: there is no checkpoint, or none is whole.
    """
    if not path.is_dir():
        remedy = "name a run's folder {run.dir}/{run.name}, or a checkpoint's"
        raise Refused([Fault(field, str(path), "is no folder", remedy)])
    if is_checkpoint(path) or step_of(path.name) is not None or path.name == RELEASE:
        return _whole(path, path, field, checksums=checksums)
    for checkpoints in (path / "checkpoints", path):
        if named_by_tracker(checkpoints) == RELEASE:
            return _whole(checkpoints / RELEASE, path, field, checksums=checksums)
        if steps_in(checkpoints):
            return _newest(checkpoints, path, field, checksums=checksums)
    raise Refused([Fault(field, str(path), "holds no checkpoint", "name a folder that does")])


def _whole(folder: Path, path: Path, field: str, *, checksums: bool) -> Origin:
    found = [one for one in damage(folder, checksums=checksums, needs_manifest=False) if one.prevents_loading]
    if found:
        rule = f"is damaged: {'; '.join(map(str, found))}"
        raise Refused([Fault(field, str(path), rule, "name another checkpoint")])
    return Origin(folder)


def _newest(checkpoints: Path, path: Path, field: str, *, checksums: bool) -> Origin:
    try:
        choice = find_newest(checkpoints, checksums=checksums)
    except CheckpointError as error:
        raise Refused([Fault(field, str(path), f"cannot be gone on from: {error}")]) from None
    passed_over = [
        f"checkpoint {step} of {path} is damaged and left out: {reason}" for step, reason in choice.damaged
    ]
    return Origin(checkpoints / iteration_name(choice.step), (*passed_over, *choice.warnings))
