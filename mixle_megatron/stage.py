"""One rank's part of a model in Megatron's wrappers, with its optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.transformer.module import Float16Module

from mixle_megatron.documents import DocumentBounds
from mixle_megatron.megatron_versions import forget_recorded_losses
from mixle_megatron.microbatches import Batch
from mixle_megatron.models.experts import forget_activations, mark_experts
from mixle_megatron.models.naming import logical_name
from mixle_megatron.models.provider import ModelProvider
from mixle_megatron.models.release import marks_of, release
from mixle_megatron.optimizer_settings import OptimizerSettings
from mixle_megatron.optimizers import build_optimizer
from mixle_megatron.pipeline_split import EVEN, PipelineSplit
from mixle_megatron.process_groups import MegatronGroups
from mixle_megatron.random_state import seed_generators
from mixle_megatron.schedule import Schedule
from mixle_megatron.translate import (
    Host,
    ddp_config,
    optimizer_config,
    param_scheduler,
    transformer_config,
)
from mixle_megatron.updates import Communicating


@dataclass(frozen=True)
class UpdateOutcome:
    """What one optimizer update did.

    Attributes:
        committed: False where Megatron skipped it (an overflow under a loss scale).
        grad_norm: L2 norm of the whole gradient before clipping; None where it was skipped.
        learning_rate: that the update was made with.
        loss_scale: that the gradients were computed with.
    """

    committed: bool
    grad_norm: float | None
    learning_rate: float
    loss_scale: float


class Stage:
    """A built stage: the modules, their DistributedDataParallel wrappers, one optimizer and schedules.

    Attributes:
        chunks: the stage's chunks of layers without their wrappers; one, but for virtual stages.
        config: Megatron's TransformerConfig of them.
        groups: this rank's process groups.
        device: where its parameters live.
        optimizer: Megatron's optimizer.
        scheduler: Megatron's OptimizerParamScheduler, counted in committed updates.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: Any,
        plan: Any,
        groups: MegatronGroups,
        host: Host,
        settings: OptimizerSettings,
        precision: str,
        documents: DocumentBounds | None = None,
    ) -> None:
        self.chunks = tuple(chunks)
        self.config = config
        self.groups = groups
        self.device = host.device
        self._transformer_engine = host.transformer_engine
        for chunk in self.chunks:
            mark_experts(chunk)
        self._marks = [marks_of(chunk) for chunk in self.chunks]
        try:
            self._wrap(config, plan, groups, host, settings, precision)
            self._schedule = Schedule(self._parallel, config, groups, documents)
            self._train(True)
        except BaseException:
            self.release()
            raise

    def _wrap(
        self,
        config: Any,
        plan: Any,
        groups: MegatronGroups,
        host: Host,
        settings: OptimizerSettings,
        precision: str,
    ) -> None:
        parallel = ddp_config(plan, host=host)
        self._overlaps = parallel.overlap_grad_reduce
        self._parallel = [
            DistributedDataParallel(
                config,
                parallel,
                chunk if precision == "fp32" else Float16Module(config, chunk),
                # Later chunks are reduced while earlier ones still compute: one bucket each.
                disable_bucketing=number > 0,
                pg_collection=groups.collection,
            )
            for number, chunk in enumerate(self.chunks)
        ]
        self.optimizer = build_optimizer(
            optimizer_config(settings, precision=precision),
            self._parallel,
            groups,
            decays_vectors=settings.decays_vectors,
        )
        self.scheduler = param_scheduler(settings, self.optimizer)
        self._reduction_started = False

    @classmethod
    def build(
        cls,
        provider: ModelProvider,
        plan: Any,
        groups: MegatronGroups,
        host: Host,
        settings: OptimizerSettings,
        precision: str,
        seed: int,
        split: PipelineSplit = EVEN,
        documents: DocumentBounds | None = None,
    ) -> Stage:
        """Build this rank's stage of ``provider``'s model; ``seed`` is what dropout draws from."""
        fields = provider.transformer_fields()
        config = transformer_config(plan, fields, precision=precision, host=host, split=split)
        seed_generators(seed, groups)
        forget_recorded_losses()
        count = split.chunks(plan.pp)
        chunks = [
            provider.build_stage(config, groups.of_chunk(number, count), host) for number in range(count)
        ]
        return cls(chunks, config, plan, groups, host, settings, precision, documents)

    @property
    def module(self) -> torch.nn.Module:
        """The stage without its wrappers; several chunks are a ModuleList."""
        return self.chunks[0] if len(self.chunks) == 1 else torch.nn.ModuleList(self.chunks)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters by their logical names."""
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                yield logical_name(chunk, name), parameter

    @property
    def ties_embeddings(self) -> bool:
        """Whether the output layer is the embedding."""
        return bool(getattr(self.chunks[0], "share_embeddings_and_output_weights", False))

    @property
    def communicating(self) -> Communicating:
        """What of the model decides what a step communicates."""
        return Communicating.of(
            self.config, tied_embedding=self.ties_embeddings, ring_attention=self._transformer_engine
        )

    def clear_gradients(self) -> None:
        """Forget all accumulated gradients."""
        for chunk in self._parallel:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._reduction_started = False

    def accumulate(self, batch: Batch, *, completes_update: bool) -> float:
        """Add a batch's gradient; return its summed loss on the last stage, 0.0 elsewhere.

        Args:
            batch: this replica's microbatches.
            completes_update: whether the commit follows. Only then may the reduction over the
                data-parallel ranks start while the backward pass is still running.
        """
        if not self._overlaps:
            return self._schedule.forward_backward(batch)
        if not completes_update:
            with ExitStack() as unreduced:
                for chunk in self._parallel:
                    unreduced.enter_context(chunk.no_sync())
                return self._schedule.forward_backward(batch)
        waits = [chunk.no_sync for chunk in self._parallel]
        self.config.no_sync_func = waits if len(waits) > 1 else waits[0]
        try:
            self._reduction_started = True
            return self._schedule.forward_backward(batch)
        finally:
            self.config.no_sync_func = None

    def evaluate(self, batch: Batch) -> float:
        """The batch's summed loss in evaluation mode on the last stage, 0.0 elsewhere."""
        self._train(False)
        try:
            return self._schedule.forward(batch)
        finally:
            self._train(True)

    def _train(self, mode: bool) -> None:
        for chunk in self._parallel:
            chunk.train(mode)

    def reduce_gradients(self, global_tokens: int) -> None:
        """Reduce the accumulated gradients over all ranks and divide them by the update's tokens."""
        if self._overlaps and not self._reduction_started:
            for chunk in self._parallel:
                chunk.start_grad_sync()
        finalize_model_grads(self._parallel, None, pg_collection=self.groups.collection)
        for chunk in self._parallel:
            chunk.scale_gradients(1.0 / global_tokens)

    def update(self) -> UpdateOutcome:
        """Clip, step the optimizer and advance the schedules by one."""
        learning_rate = self.learning_rate
        loss_scale = float(self.optimizer.get_loss_scale())
        committed, grad_norm, _ = self.optimizer.step()
        if committed:
            self.scheduler.step(increment=1)
        return UpdateOutcome(
            bool(committed), None if grad_norm is None else float(grad_norm), learning_rate, loss_scale
        )

    def gather_parameters(self) -> None:
        """Give every rank the parameters of which others keep the values, as after an update."""
        for chunk in self._parallel:
            chunk.start_param_sync(force_sync=True)

    def release(self) -> None:
        """Take the modules out of Megatron's wrappers: ordinary ones, with the values that they have."""
        for chunk, marks in zip(self.chunks, self._marks, strict=True):
            forget_activations(chunk)
            release(marks)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return float(self.optimizer.param_groups[0]["lr"])
