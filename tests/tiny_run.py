"""The example config, cut down to what a test has time for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parent.parent / "configs" / "tiny_gpt_cpu.yaml"

SMALL = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.seq_length=32",
    "batch.global_batch_size=8",
    "batch.micro_batch_size=2",
    "evaluation.batches=2",
    "data.max_bytes=800000",  # documents differ between Pythons; of so many some are held out in each
    "logging.progress=plain",
    "logging.tensorboard=false",
    "precision=fp32",
)


def overrides(folder: Path | str, *more: str) -> list[str]:
    """Overrides of a small run that writes into ``folder``."""
    return [f"run.dir={folder}", *SMALL, *more]


def train_here(
    folder: str, *more: str, config: str | None = None, stop: bool = False, anew: bool = False
) -> dict[str, Any]:
    """Run the config on the ranks that this process is one of, and say how it ended.

    ``config`` names another file than the example, of which then nothing is cut down.
    """
    from mixle_megatron.config.here import data_request
    from mixle_megatron.config.load import load_config
    from mixle_megatron.data import prepare_data
    from mixle_megatron.training.command import checked
    from mixle_megatron.training.pretraining import pretrain
    from mixle_megatron.training.run_directory import RunDirectory
    from mixle_megatron.training.signals import StopRequest

    given = [f"run.dir={folder}", *more] if config else overrides(folder, *more)
    loaded = checked(load_config(config or CONFIG, given), anew=anew)
    data = prepare_data(data_request(loaded), cache_dir=Path(folder) / ".data")
    request = StopRequest()
    if stop:
        request.signal_name = "SIGTERM"
    outcome = pretrain(loaded, data, request, anew=anew)
    return {"step": outcome.step, "stopped_by": outcome.stopped_by, "folder": str(RunDirectory(loaded).path)}
