"""One materialised model, optimizer, mesh and step clock: mixle's DistributedTrainingSession."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from mixle.utils.parallel.training_contracts import (
    BackendCapabilities,
    DistributedUpdate,
    ParallelPlan,
    ParameterLayout,
    StepReceipt,
)
from mixle.utils.parallel.training_launchers import WorkerTopologyAttestation

from mixle_megatron.attestation import attest
from mixle_megatron.checkpoint.asynchronous import SaveInProgress, Saves
from mixle_megatron.checkpoint.manifest import Facts
from mixle_megatron.checkpoint.payload import given_back, saved_payload
from mixle_megatron.checkpoint.reading import judge_session
from mixle_megatron.checkpoint.session_state import restore_session
from mixle_megatron.checkpoint.stored_state import FULLY_RESHARDABLE, OptimizerFormat
from mixle_megatron.checkpoint.weights import judge_weights, load_weights
from mixle_megatron.errors import Fault, SessionError, refuse_if_any
from mixle_megatron.layouts import parameter_layouts
from mixle_megatron.microbatches import Batch, as_token_ids, cut, foreign_id_faults
from mixle_megatron.models.provider import ModelProvider
from mixle_megatron.receipts import PendingUpdate, ReceiptMaker, Sums
from mixle_megatron.replicas import EVALUATING, PADDED, TRAINING, WAITING, Replicas
from mixle_megatron.routing import RoutingMeter
from mixle_megatron.rules.sequence import sequence_faults
from mixle_megatron.stage import Stage, UpdateOutcome
from mixle_megatron.topology import Topology
from mixle_megatron.traffic import TrafficMeter
from mixle_megatron.updates import declared_updates


@dataclass(frozen=True)
class SessionState:
    """The clocks of a session that are not tensors (mixle's ``TorchSessionState``)."""

    step: int
    pending_accumulation: int
    optimizer_receipt: dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """The loss of a batch, summed over every replica.

    Attributes:
        loss_sum: in nats, over ``tokens`` supervised targets.
        tokens: supervised targets.
        examples: rows.
    """

    loss_sum: float
    tokens: int
    examples: int

    @property
    def loss(self) -> float:
        """Mean over the supervised tokens; 0.0 where there are none."""
        return self.loss_sum / max(self.tokens, 1)


class MegatronSession:
    """A model that trains under one plan.

    Every rank of a replica passes the same ``(batch, sequence)`` inputs and targets and gets the
    same receipt. Loss and gradient are the exact mean over all supervised tokens of an update,
    whatever its microbatches, accumulation steps and data-parallel ranks.

    Attributes:
        module: this rank's stage of the model, without Megatron's wrappers; after :meth:`close` the
            module that the caller prepared.
        plan: the plan it runs under.
        capabilities: what the backend executes.
        step: committed updates so far.
        device: where the stage lives.
        precision: ``fp32`` or ``bf16``.
        optimizer: Megatron's optimizer.
        optimizer_receipt: the optimizer's name and settings.
        optimizer_format: how checkpoints hold the optimizer's state: ``fully_reshardable`` loads under
            every plan, ``dp_reshardable`` gathers nothing and loads where data parallelism alone changes.
        scheduler: Megatron's schedule of learning rate and weight decay.
        parameter_layouts: where each parameter of the caller's module lies (:mod:`mixle_megatron.layouts`).
        updates: what one update communicates (:mod:`mixle_megatron.updates`).
        data_parallel_rank: which part of the batch this rank reads.
        data_parallel_size: how many parts there are.
        is_logging_rank: whether this is global rank 0.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        plan: ParallelPlan,
        capabilities: BackendCapabilities,
        provider: ModelProvider,
        device: torch.device,
        precision: str,
        optimizer_receipt: dict[str, Any],
        uneven_batches: bool,
        on_close: Callable[[], None],
    ) -> None:
        self.plan = plan
        self.capabilities = capabilities
        self.device = device
        self.precision = precision
        self.optimizer_receipt = optimizer_receipt
        self.optimizer_format: OptimizerFormat = FULLY_RESHARDABLE
        self.module = stage.module
        self.optimizer = stage.optimizer
        self.scheduler = stage.scheduler
        self.step = 0
        self.stage = stage
        self._provider = provider
        self._dimensions = provider.dimensions(plan.tp)
        self._tokens = self._dimensions.vocab_size if getattr(provider, "pads_vocabulary", True) else None
        self._on_close = on_close
        self._uneven_batches = uneven_batches
        self._replicas = Replicas(stage.groups, device)
        self._receipts = ReceiptMaker(plan, precision, str(optimizer_receipt["name"]))
        self._pending = PendingUpdate()
        self._saves = Saves(stage)
        self._last_loss = 0.0
        self._closed = False
        self._failed = False
        self.parameter_layouts: tuple[ParameterLayout, ...] = parameter_layouts(
            stage, plan, self._dimensions.vocab_size, provider.in_callers_terms
        )
        self.updates: tuple[DistributedUpdate, ...] = declared_updates(plan, stage.communicating)
        self._routing = RoutingMeter(stage) if stage.config.num_moe_experts else None
        self._traffic = TrafficMeter()
        self._traffic.start()
        self._place(dist.get_rank())

    def _place(self, rank: int) -> None:
        coordinate = Topology(self.plan).mixle_coordinate(rank)
        self.coordinate = coordinate
        self.data_parallel_rank = coordinate["dp_replicate"] * self.plan.dp_shard + coordinate["dp_shard"]
        self.data_parallel_size = self.plan.data_parallel_size
        self.is_logging_rank = rank == 0

    # Training

    def train_batch(self, inputs: Any, targets: Any) -> StepReceipt:
        """Add one batch to the update, and commit it when its last batch is there.

        Args:
            inputs: token ids ``(batch, sequence)``, this replica's part; batch may differ between
                replicas and be zero.
            targets: ids to predict, of the same shape; -100 is not supervised.

        Returns:
            The committed update's receipt, or one with ``skipped=True`` while it accumulates.

        Raises:
            SessionError: the session is closed, or failed before.
            Refused: the tensors do not fit the model or the plan.
        """
        self._require_open()
        batch = self._batch(inputs, targets)
        if self._pending.calls == 0:
            self.stage.clear_gradients()
        completes = self._pending.calls + 1 >= self.plan.gradient_accumulation_steps
        with _failing(self):
            self._agree(TRAINING, batch)
            started = perf_counter()
            loss = self.stage.accumulate(batch, completes_update=completes)
            sums = self._replicas.exchange(TRAINING, batch, loss).sums
            self._pending = self._pending.add(sums, perf_counter() - started)
            if self._routing is not None:
                self._routing.add_microbatches(len(batch.microbatches))
            if completes:
                return self._commit()
        return self._uncommitted(sums, "gradient_accumulation")

    def finish_accumulation(self) -> StepReceipt | None:
        """Commit what has accumulated so far; None if there is nothing.

        Replicas whose data ends earlier wait here and take part, with weight zero, in the updates of
        those that go on; the receipt is then that of the update that this replica's last batch is in.
        """
        self._require_open()
        joined = self._join_others()
        with _failing(self):
            return self._commit() if self._pending.calls else joined

    def discard_accumulation(self) -> StepReceipt | None:
        """Forget what has accumulated, without changing parameters or optimizer; None if nothing has."""
        if self._pending.calls == 0:
            return None
        return self._skip("explicit_accumulation_discard")

    def evaluate(self, inputs: Any, targets: Any) -> Evaluation:
        """The loss of a batch without changing anything, summed over all replicas.

        Takes what :meth:`train_batch` takes. Pending gradients stay as they are.
        """
        self._require_open()
        batch = self._batch(inputs, targets)
        with _failing(self):
            self._agree(EVALUATING, batch)
            exchanged = self._replicas.exchange(EVALUATING, batch, self.stage.evaluate(batch))
            if not exchanged.all_are(EVALUATING):
                raise SessionError("some replicas evaluate while others train: call evaluate() on every rank")
        sums = exchanged.sums
        return Evaluation(sums.global_loss, sums.global_tokens, sums.global_examples)

    def _batch(self, inputs: Any, targets: Any) -> Batch:
        inputs, targets = as_token_ids(inputs, targets)
        sequence, longest = inputs.shape[1], self._dimensions.max_position_embeddings
        faults = sequence_faults(self.plan, sequence)
        if sequence > longest:
            faults.append(Fault("sequence", sequence, f"is above model.max_position_embeddings={longest}"))
        refuse_if_any(faults + foreign_id_faults(inputs, targets, self._dimensions.vocab_size))
        pipelined = self.plan.pp > 1
        groups_of = self.plan.pp if len(self.stage.chunks) > 1 else 1
        batch = cut(inputs, targets, self.plan.microbatches, equal=pipelined, multiple=groups_of)
        return batch.to(self.device)

    def _agree(self, doing: int, batch: Batch | None) -> None:
        """Where there are experts, that no batch is padded, and that replicas can exchange tokens."""
        if self._routing is None:
            return
        if self._uneven_batches:
            self._replicas.agree(doing, batch, alike=self.plan.ep > 1)
        elif doing == TRAINING and batch is not None and batch.is_padded:
            raise SessionError(PADDED)  # even batches are the same on every replica, and so is this

    def _join_others(self) -> StepReceipt | None:
        """Take part, with nothing, in every call that other replicas still make.

        Returns the receipt of the update that this replica's own pending tokens went into, or else
        of the last one that was committed meanwhile.
        """
        receipt = None
        while self._uneven_batches and self.data_parallel_size > 1:
            with _failing(self):
                self._agree(WAITING, None)
                exchanged = self._replicas.exchange(WAITING)
                if exchanged.all_are(WAITING):
                    break
                if self._pending.calls == 0:
                    self.stage.clear_gradients()
                self._pending = self._pending.add(exchanged.sums, 0.0)
                if self._pending.calls >= self.plan.gradient_accumulation_steps:
                    committed = self._commit()
                    receipt = receipt if receipt is not None and receipt.local_tokens else committed
            self._saves.raise_failure()  # as the others do in their next call
        return receipt

    def reduce_world(self, *values: float) -> tuple[float, ...]:
        """Sum numbers over every rank, in float64."""
        return self._replicas.sum(*values)

    def reduce_sums(self, *values: float) -> tuple[float, ...]:
        """Sum numbers over the replicas, in float64, as mixle's session does.

        Every rank of a replica passes the same numbers, so each stands for its share of them.
        """
        ranks_of_a_replica = self.plan.world_size // self.plan.data_parallel_size
        return tuple(value / ranks_of_a_replica for value in self.reduce_world(*values))

    def _commit(self) -> StepReceipt:
        """Commit the update, and then finish a checkpoint that every rank has written meanwhile.

        All ranks come here at once. A checkpoint's failure waits for the next call: the receipt is due.
        """
        receipt = self._update()
        self._saves.poll()
        self._traffic.take()
        return receipt

    def _update(self) -> StepReceipt:
        pending = self._pending
        if pending.sums.global_tokens == 0:
            return self._skip("no_supervised_tokens")
        if not math.isfinite(pending.sums.global_loss):
            return self._skip("non_finite_loss")
        started = perf_counter()
        self.stage.reduce_gradients(pending.sums.global_tokens)
        reduced = perf_counter()
        outcome = self.stage.update()
        seconds = {
            "forward_backward": pending.forward_backward_seconds,
            "reduction": reduced - started,
            "optimizer": perf_counter() - reduced,
        }
        if outcome.committed:
            self._require_finite(outcome)
            self.step += 1
            self._last_loss = pending.sums.mean_loss
        return self._receipt_of(outcome, seconds)

    def _receipt_of(self, outcome: UpdateOutcome, seconds: dict[str, float]) -> StepReceipt:
        pending = self._pending
        extra = {
            "grad_norm": outcome.grad_norm,
            "learning_rate": outcome.learning_rate,
            "loss_scale": outcome.loss_scale,
            "seconds": seconds,
            "partial_accumulation": pending.calls < self.plan.gradient_accumulation_steps,
        }
        if self._routing is not None:
            extra["experts"] = self._routing.take(self.reduce_world).as_dict()
        if not outcome.committed:
            extra["reason"] = "gradient_overflow"
        receipt = self._receipts.receipt(
            self.step,
            pending.sums,
            calls=pending.calls,
            loss=pending.sums.mean_loss,
            skipped=not outcome.committed,
            collective_bytes=self._traffic.take(),
            extra=extra,
        )
        self._forget_pending()
        return receipt

    def _require_finite(self, outcome: UpdateOutcome) -> None:
        if outcome.grad_norm is not None and not math.isfinite(outcome.grad_norm):
            raise SessionError(
                f"the gradient norm of update {self.step + 1} is {outcome.grad_norm}: the parameters are "
                "damaged; go back to the last checkpoint, with a lower learning rate"
            )

    def _skip(self, reason: str) -> StepReceipt:
        """Give up the pending update and say why."""
        receipt = self._uncommitted(self._pending.sums, reason)
        self._forget_pending()
        return receipt

    def _uncommitted(self, sums: Sums, reason: str) -> StepReceipt:
        """A receipt of what committed nothing; its loss has to be finite, so it may be an older one."""
        extra: dict[str, Any] = {"reason": reason}
        loss = sums.mean_loss
        if not math.isfinite(loss):
            loss = self._last_loss
            extra["loss_is_last_finite"] = True
        return self._receipts.receipt(
            self.step,
            sums,
            calls=self._pending.calls,
            loss=loss,
            skipped=True,
            collective_bytes=self._traffic.take(),
            extra=extra,
        )

    def _forget_pending(self) -> None:
        """The next update clears the gradients when it begins."""
        self._pending = PendingUpdate()
        if self._routing is not None:
            self._routing.clear()

    def attest(self) -> WorkerTopologyAttestation:
        """This rank's coordinate in Megatron's groups, in mixle's axes; ``prepare`` compared all ranks'."""
        return attest(self.plan, self.stage.groups)

    # Checkpoints

    def state(self) -> SessionState:
        """The clocks of the session."""
        return SessionState(self.step, self._pending.calls, dict(self.optimizer_receipt))

    def save_checkpoint(
        self,
        path: str,
        *,
        loader_state: Any = None,
        typed_scheduler_state: Any = None,
        extra: dict[str, Any] | None = None,
        asynchronous: bool = False,
        afterwards: Callable[[], None] | None = None,
    ) -> SaveInProgress | None:
        """Write everything that this session resumes from into the folder ``path``.

        Args:
            path: a folder that every rank can write; it appears whole or not at all.
            loader_state: the data loader's position on this rank, given back by :meth:`load_checkpoint`.
                This and the next two are plain values, arrays and tensors; it may have mixle's ``to_dict``.
            typed_scheduler_state: mixle's typed scheduler state, of this rank too.
            extra: what else to keep, equal on all ranks.
            asynchronous: return as soon as training may go on, and write meanwhile. The checkpoint has
                its name after a later committed update, or when the next save, load, ``close`` or the
                returned object's ``wait`` returns; what goes wrong raises CheckpointError in the first
                call after it is known, on every rank.
            afterwards: what global rank 0 does when the checkpoint has its name, before it counts as saved:
                in a thread of its own, if it is asynchronous. A CheckpointError is raised on every rank.

        Returns:
            The save that goes on, if it is asynchronous.

        Raises:
            SessionError: gradients are pending, which are not part of a checkpoint.
            CheckpointError: it could not be written, or the last one could not; on every rank.
            TypeError: what is to be kept is more than plain values on some rank; on every rank.
        """
        self._require_open()
        self._join_others()
        self._require_nothing_pending("save_checkpoint()")
        state = {
            "step": self.step,
            "last_loss": self._last_loss,
            "parallel_plan": self.plan.as_dict(),
            "precision": self.precision,
        }
        payload = saved_payload(
            state,
            loader_state=loader_state,
            typed_scheduler_state=typed_scheduler_state,
            extra={"optimizer_receipt": self.optimizer_receipt, **(extra or {})},
        )
        facts = Facts(
            step=self.step,
            plan=self.plan.as_dict(),
            model=asdict(self._dimensions)
            | {name: value for name, value in self._provider.description().items() if value is not None},
            optimizer_format=self.optimizer_format,
            precision=self.precision,
        )
        saving = self._saves.save(
            path, payload, facts, asynchronous=asynchronous, afterwards=afterwards or (lambda: None)
        )
        self._traffic.take()
        return saving

    def load_checkpoint(
        self,
        path: str,
        *,
        allow_world_size_change: bool = True,
        what: Literal["all", "model"] = "all",
        keep_schedule: bool = False,
    ) -> dict[str, Any]:
        """Restore parameters, optimizer, schedules, RNG and the step clock from ``path``.

        Args:
            path: a folder that :meth:`save_checkpoint` wrote, under whatever plan; for the model alone,
                any of Megatron's dist-checkpoints.
            allow_world_size_change: whether another number of ranks may have written it.
            what: ``model`` for the weights alone, into a session that has made no update: its optimizer,
                schedules, generators and step clock stay as they are.
            keep_schedule: go on with the learning rates and weight decay of this session's settings, and
                not with those of the checkpoint, at its step.

        Returns:
            What mixle's sessions return: ``step``, ``loader_state``, ``typed_scheduler_state``, ``extra``,
            ``parallel_plan``, ``saved_world_size`` and so on (:mod:`mixle_megatron.checkpoint.payload`);
            nothing where Megatron alone wrote it.

        Raises:
            CheckpointError: it is not a checkpoint, or it is damaged.
            DoesNotFit: it is not of this session's model and optimizer; every difference is named once.
                After either of these the session is as it was, on every rank.
            SessionError: gradients are pending, or the weights alone come after an update.
        """
        self._require_open()
        self._require_nothing_pending("load_checkpoint()")
        self._saves.finish()
        if what == "model":
            return self._load_weights(path)
        reading = judge_session(
            self.stage, path, self.plan, tokens=self._tokens, other_worlds=allow_world_size_change
        )
        with _failing(self):
            restored = restore_session(self.stage, reading, keep_schedule=keep_schedule)
        self._traffic.take()
        self.step = int(reading.payload["step"])
        self._last_loss = float(reading.payload["last_loss"])
        return given_back(reading.payload, restored)

    def _load_weights(self, path: str) -> dict[str, Any]:
        if self.step:
            raise SessionError("load the weights alone before the first update, which they would undo.")
        weights = judge_weights(self.stage, path, tokens=self._tokens)
        with _failing(self):
            load_weights(self.stage, weights, tokens=self._tokens)
        self._traffic.take()
        return given_back(weights.payload, {}) if weights.payload else {}

    # Life

    def close(self) -> None:
        """End the session: give the trained model back, and the process groups, and the redirections.

        Afterwards ``module`` is the caller's own module with its trained parameters, on every rank, and
        no checkpoint is still being written. Where the session failed, or an exception is on its way,
        nothing is exchanged, the module stays as it was, and an unfinished checkpoint is given up.

        Raises:
            SessionError: gradients are pending, unless an exception is already on its way.
            CheckpointError: the last checkpoint could not be written; all else is done as ever.
        """
        if self._closed:
            return
        failed = self._failed or sys.exc_info()[0] is not None
        if self._pending.calls and not failed:
            raise SessionError(
                "training session has pending gradients; call finish_accumulation() to commit or "
                "discard_accumulation() to discard them before close()."
            )
        self._closed = True
        self._failed = failed
        try:
            if not failed:
                self._join_others()
            self.module = (self._provider.untouched if failed else self._provider.give_back)(self.stage)
            if not failed:
                self._saves.finish()
        finally:
            self._saves.abandon()
            if self._routing is not None:
                self._routing.stop()
            self.stage.release()
            self._traffic.stop()
            self._on_close()

    def __enter__(self) -> MegatronSession:
        return self

    def __exit__(self, *_error: Any) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise SessionError("distributed training session is closed.")
        if self._failed:
            raise SessionError("distributed training session failed in an earlier call; prepare a new one.")
        self._saves.raise_failure()

    def _require_nothing_pending(self, call: str) -> None:
        if self._pending.calls:
            raise SessionError(
                f"finish or discard gradient accumulation before {call}; pending gradients are not state."
            )


class _failing:
    """Mark a session as failed when its step raises: its ranks may have parted company."""

    def __init__(self, session: MegatronSession) -> None:
        self._session = session

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, *_details: Any) -> None:
        if kind is not None:
            self._session._failed = True
