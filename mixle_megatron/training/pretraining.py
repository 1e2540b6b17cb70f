"""The pretraining loop of one rank, from a checked config to a finished or stopped run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from mixle_megatron.backend import MegatronBackend
from mixle_megatron.checkpoint.asynchronous import SaveInProgress
from mixle_megatron.config.schema import Config, decay_steps, effective_plan, pipeline_split
from mixle_megatron.data import GlobalBatchLoader, PrefetchingLoader, RunData, byte_entropies
from mixle_megatron.data.checking import BOUNDS
from mixle_megatron.documents import DocumentBounds
from mixle_megatron.errors import CheckpointError, SessionError
from mixle_megatron.models.gpt import GPT
from mixle_megatron.optimizer_settings import OptimizerSettings
from mixle_megatron.session import MegatronSession
from mixle_megatron.training.evaluating import Evaluations
from mixle_megatron.training.progress import TrainingProgress
from mixle_megatron.training.records import Records, wants_tensorboard
from mixle_megatron.training.reports import Reports
from mixle_megatron.training.resuming import resume
from mixle_megatron.training.run_directory import RunDirectory
from mixle_megatron.training.signals import StopRequest
from mixle_megatron.training.summary import (
    Summary,
    last_evaluation,
    losses_of,
    mean_of_last,
    print_summary,
)

_MOST_SKIPPED = 20


@dataclass(frozen=True)
class Outcome:
    """How a run ended on this rank.

    Attributes:
        step: committed updates.
        stopped_by: the signal that ended it early, or None.
        checkpoint: the checkpoint to go on from, or None.
    """

    step: int
    stopped_by: str | None
    checkpoint: Path | None


def pretrain(
    config: Config,
    data: RunData,
    stop: StopRequest,
    *,
    anew: bool = False,
    reports: Reports | None = None,
    attestation: Mapping[str, Any] | None = None,
) -> Outcome:
    """Run ``config`` on this rank until run.steps are committed or it is asked to stop.

    Args:
        config: checked, with the decay of the run that it goes on from.
        data: what to train on and to evaluate on.
        stop: set by a signal; all ranks end at the same step boundary.
        anew: leave what there is of the run, and set it aside.
        reports: told of updates and checkpoints, on every rank.
        attestation: what a launcher attested of this rank.
    """
    directory = RunDirectory(config)
    tensorboard = wants_tensorboard(config.logging.tensorboard)
    with _session(config, _bounds(config, data), attestation) as session:
        run = PretrainingRun(
            config, data, session, directory, stop, tensorboard=tensorboard, anew=anew, reports=reports
        )
        try:
            return run.run()
        finally:
            run.close()


@contextmanager
def _session(
    config: Config, documents: DocumentBounds | None, attestation: Mapping[str, Any] | None
) -> Iterator[MegatronSession]:
    if config.host.threads_per_rank != "auto":
        torch.set_num_threads(config.host.threads_per_rank)
    starts_group = not dist.is_initialized()
    session = MegatronBackend().prepare(
        GPT(config.model, seed=config.run.seed),
        plan=effective_plan(config).to_parallel_plan(),
        precision=config.precision,
        optimizer=OptimizerSettings.from_section(config.optimizer, decay_steps=decay_steps(config)),
        device=None if config.host.device == "auto" else config.host.device,
        timeout_minutes=config.host.timeout_minutes,
        seed=config.run.seed,
        uneven_batches=False,
        pipeline=pipeline_split(config),
        optimizer_format=config.checkpoint.optimizer_format,
        documents=documents,
        attestation=attestation,
    )
    try:
        yield session
    finally:
        session.close()
        if starts_group and dist.is_initialized():
            dist.destroy_process_group()


def _bounds(config: Config, data: RunData) -> DocumentBounds | None:
    """What the config stops at the end of a document; check_data has seen to it that the end is known."""
    positions, attention = (getattr(config.data, name, False) for name in BOUNDS)
    if not (positions or attention):
        return None
    return DocumentBounds(data.document_end, positions=positions, attention=attention)


class PretrainingRun:
    """One rank's pretraining, with everything that it writes."""

    def __init__(
        self,
        config: Config,
        data: RunData,
        session: MegatronSession,
        directory: RunDirectory,
        stop: StopRequest,
        *,
        tensorboard: bool,
        anew: bool,
        reports: Reports | None,
    ) -> None:
        self._config = config
        self._reports = reports
        self._data = data
        self._session = session
        self._directory = directory
        self._stop = stop
        self._loader = PrefetchingLoader(
            _loader(config, data, session),
            _preparation(session),
            until=config.run.steps * config.batch.global_batch_size,
        )
        self._evaluations = Evaluations(config, data.validation, session)
        self._saved_step = resume(config, session, self._loader, directory, anew=anew)
        self._saving: SaveInProgress | None = None
        self._records = Records(directory, writes=session.is_logging_rank, tensorboard=tensorboard)
        self._progress = TrainingProgress(
            config.logging.progress,
            first=session.step,
            steps=config.run.steps,
            every=config.logging.every,
            shown=session.is_logging_rank,
        )

    def run(self) -> Outcome:
        """Train to the end, or to the step boundary after a signal."""
        began = perf_counter()
        with self._progress:
            stopped_by = self._train()
            if not stopped_by and self._validation_is_due(at_end=True):
                self._evaluate()
            self._save()
            self._finish_saving()
        self._records.close()
        outcome = Outcome(self._session.step, stopped_by, self._checkpoint())
        if self._session.is_logging_rank:
            self._finish(outcome, perf_counter() - began)
        return outcome

    def close(self) -> None:
        """End the thread that reads the data."""
        self._loader.close()

    def _train(self) -> str | None:
        """Commit updates until run.steps; return the name of the signal that ended it before."""
        skipped = 0
        while self._session.step < self._config.run.steps:
            if self._asked_to_stop():
                return self._stop.signal_name or "another rank's signal"
            receipt = self._update()
            if receipt.skipped:
                skipped += 1
                self._report_skipped(receipt, skipped)
                continue
            skipped = 0
            self._records.receipt(receipt)
            if self._reports is not None:
                self._reports.committed(receipt)
            self._progress.update(receipt.step, receipt.loss, receipt.global_tokens)
            self._between_updates()
        return None

    def _update(self) -> Any:
        receipts = [self._session.train_batch(inputs, targets) for inputs, targets in next(self._loader)]
        extra = receipts[-1].extra | {"data_seconds": self._loader.seconds}
        return replace(receipts[-1], extra=extra)

    def _between_updates(self) -> None:
        if self._saving is not None and self._saving.done:
            self._finish_saving()
        if self._validation_is_due():
            self._evaluate()
        every = self._config.checkpoint.every
        if every and self._session.step % every == 0:
            self._save()

    def _report_skipped(self, receipt: Any, number: int) -> None:
        self._progress.say(f"skipped an update after step {receipt.step}: {receipt.extra['reason']}")
        if number >= _MOST_SKIPPED:
            raise SessionError(
                f"{number} updates in a row were skipped ({receipt.extra['reason']}); "
                "go back to the last checkpoint, with a lower learning rate"
            )

    def _asked_to_stop(self) -> bool:
        """Whether any rank was: all of them have to leave the loop at the same step."""
        return self._session.reduce_world(float(bool(self._stop)))[0] > 0

    def _validation_is_due(self, *, at_end: bool = False) -> bool:
        every = self._config.evaluation.every
        if not every or not len(self._evaluations):
            return False
        due = self._session.step % every == 0
        return not due if at_end else due

    def _evaluate(self) -> None:
        with self._progress.pause():
            evaluations = self._evaluations.run()
        for each in evaluations:
            self._records.evaluation(self._session.step, each)
            self._progress.say(f"step {self._session.step}  {each}")

    def _save(self) -> None:
        step = self._session.step
        if not self._config.checkpoint.every or self._saved_step == step:
            return
        self._finish_saving()
        with self._progress.pause():
            self._saving = self._session.save_checkpoint(
                str(self._directory.checkpoint(step)),
                loader_state=self._loader.state_dict(),
                asynchronous=self._config.checkpoint.asynchronous,
                afterwards=partial(self._announce, step),
            )
        self._saved_step = step
        if self._saving is None:
            self._say_saved()

    def _finish_saving(self) -> None:
        """Wait for the checkpoint that is being written, if any."""
        if self._saving is not None:
            with self._progress.pause():
                self._saving.wait()
            self._saving = None
            self._say_saved()

    def _say_saved(self) -> None:
        self._progress.say(f"step {self._saved_step}  checkpoint {self._checkpoint()}")
        if self._reports is not None and self._saved_step is not None:
            self._reports.saved(self._saved_step, self._directory.checkpoint(self._saved_step))

    def _announce(self, step: int) -> None:
        """Name the checkpoint as the one to go on from, and delete old ones; the first rank does."""
        kept = self._config.checkpoint
        try:
            self._directory.announce(step)
            self._directory.delete_old(step, keep=kept.keep, keep_every=kept.keep_every)
        except OSError as error:
            folder = self._directory.checkpoint(step)
            raise CheckpointError(f"cannot announce the checkpoint {folder}: {error}") from error

    def _checkpoint(self) -> Path | None:
        return None if self._saved_step is None else self._directory.checkpoint(self._saved_step)

    def _finish(self, outcome: Outcome, seconds: float) -> None:
        if outcome.stopped_by:
            checkpoint = str(outcome.checkpoint) if outcome.checkpoint else None
            self._directory.write_stopped(
                {"step": outcome.step, "signal": outcome.stopped_by, "checkpoint": checkpoint}
            )
        title = f"{self._config.run.name}: " + (
            f"stopped by {outcome.stopped_by} at step {outcome.step} of {self._config.run.steps}"
            if outcome.stopped_by
            else "finished"
        )
        if self._config.logging.progress != "off":
            print_summary(title, summarise(self._directory, self._data, outcome.checkpoint, seconds))


def summarise(directory: RunDirectory, data: RunData, checkpoint: Path | None, seconds: float) -> Summary:
    """What the run came to over all its starts; ``seconds`` is the time of this one."""
    losses = losses_of(directory.receipts)
    unigram, bigram = (None, None) if data.text is None else byte_entropies(data.text)
    return Summary(
        steps=len(losses),
        first_loss=losses[0][0] if losses else None,
        last_loss=losses[-1][0] if losses else None,
        mean_of_last=mean_of_last(losses),
        validation_loss=last_evaluation(directory.evaluations),
        unigram_entropy=unigram,
        bigram_entropy=bigram,
        tokens=sum(tokens for _, tokens in losses),
        seconds=seconds,
        checkpoint=checkpoint,
    )


def _loader(config: Config, data: RunData, session: MegatronSession) -> GlobalBatchLoader:
    return GlobalBatchLoader(
        data.training,
        global_batch_size=config.batch.global_batch_size,
        micro_batch_size=config.batch.micro_batch_size,
        data_parallel_rank=session.data_parallel_rank,
        data_parallel_size=session.data_parallel_size,
        gradient_accumulation_steps=session.plan.gradient_accumulation_steps,
        microbatches=session.plan.microbatches,
    )


def _preparation(session: MegatronSession) -> Callable[[list[Any]], list[Any]]:
    """What the data thread makes of batches: for a GPU, tensors that it copies while it computes."""
    if session.device.type != "cuda":
        return list
    return lambda batches: [tuple(torch.from_numpy(part).pin_memory() for part in batch) for batch in batches]
