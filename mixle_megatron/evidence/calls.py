"""What ranks are asked to do, by functions that whoever asks can name without loading torch."""

from __future__ import annotations

from mixle_megatron.evidence.claims import Trial
from mixle_megatron.evidence.record import RankOutcome


def record_one_rank(model: str, path: str, device: str) -> None:
    """On one rank: train ``model`` in fp32, and keep each update at ``path``."""
    from mixle_megatron.evidence.trial import record

    record(Trial(model=model), path, device)


def record_plain_torch(model: str, path: str, device: str) -> None:
    """On one rank: train ``model`` in a loop without Megatron's, and keep each update at ``path``."""
    from mixle_megatron.evidence.plain import record

    record(Trial(model=model), path, device)


def save_checkpoint(trial: Trial, folder: str, device: str) -> None:
    """On the ranks of ``trial.saved_under``: make the first update, and save."""
    from mixle_megatron.evidence.trial import save

    save(trial, folder, device)


def compare(trial: Trial, reference: str, folder: str | None, device: str) -> RankOutcome:
    """On the ranks of ``trial.plan``: train, and hold each update against the one kept at ``reference``."""
    from mixle_megatron.evidence.trial import compare as on_this_rank

    return on_this_rank(trial, reference, folder, device)
