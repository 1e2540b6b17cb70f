"""One rank's part of a model in Megatron's wrappers, with its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.transformer.module import Float16Module

from mixle_megatron.microbatches import Batch
from mixle_megatron.models.provider import ModelProvider
from mixle_megatron.optimizer_settings import OptimizerSettings
from mixle_megatron.optimizers import build_optimizer
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
    """A built stage: the module, its DistributedDataParallel wrapper, its optimizer and schedules.

    Attributes:
        module: the stage without its wrappers.
        config: Megatron's TransformerConfig of it.
        groups: this rank's process groups.
        device: where its parameters live.
        optimizer: Megatron's optimizer.
        scheduler: Megatron's OptimizerParamScheduler, counted in committed updates.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: Any,
        plan: Any,
        groups: MegatronGroups,
        host: Host,
        settings: OptimizerSettings,
        precision: str,
    ) -> None:
        self.module = module
        self.config = config
        self.groups = groups
        self.device = host.device
        wrapped = module if precision == "fp32" else Float16Module(config, module)
        parallel = ddp_config(plan, host=host)
        self._overlaps = parallel.overlap_grad_reduce
        self._parallel = DistributedDataParallel(config, parallel, wrapped, pg_collection=groups.collection)
        self.optimizer = build_optimizer(
            optimizer_config(settings, precision=precision),
            self._parallel,
            groups,
            decays_vectors=settings.decays_vectors,
        )
        self.scheduler = param_scheduler(settings, self.optimizer)
        self._schedule = Schedule(self._parallel, config, groups)
        self._reduction_started = False
        self._parallel.train()

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
    ) -> Stage:
        """Build this rank's stage of ``provider``'s model; ``seed`` is what dropout draws from."""
        config = transformer_config(plan, provider.transformer_fields(), precision=precision, host=host)
        seed_generators(seed, groups)
        module = provider.build_stage(config, groups, host)
        return cls(module, config, plan, groups, host, settings, precision)

    def clear_gradients(self) -> None:
        """Forget all accumulated gradients."""
        self._parallel.zero_grad_buffer()
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
            with self._parallel.no_sync():
                return self._schedule.forward_backward(batch)
        self.config.no_sync_func = self._parallel.no_sync
        try:
            self._reduction_started = True
            return self._schedule.forward_backward(batch)
        finally:
            self.config.no_sync_func = None

    def evaluate(self, batch: Batch) -> float:
        """The batch's summed loss in evaluation mode on the last stage, 0.0 elsewhere."""
        self._parallel.eval()
        try:
            return self._schedule.forward(batch)
        finally:
            self._parallel.train()

    def reduce_gradients(self, global_tokens: int) -> None:
        """Reduce the accumulated gradients over all ranks and divide them by the update's tokens."""
        if self._overlaps and not self._reduction_started:
            self._parallel.start_grad_sync()
        finalize_model_grads([self._parallel], None, pg_collection=self.groups.collection)
        self._parallel.scale_gradients(1.0 / global_tokens)

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

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return float(self.optimizer.param_groups[0]["lr"])
