"""What the routers of a mixture of experts did during an update: losses, tokens sent and dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.router import Router

from mixle_megatron.megatron_versions import clear_router_losses, router_losses
from mixle_megatron.stage import Stage


@dataclass(frozen=True)
class RoutingTotals:
    """What all routers of a model did in one update, over all ranks.

    Attributes:
        losses: each auxiliary loss without its coefficient, as a mean over microbatches and layers with
            experts, by Megatron's name for it.
        assignments: (token, expert) pairs that the routers chose and the experts computed.
        dropped: pairs that the routers chose and a capacity factor dropped.
    """

    losses: dict[str, float]
    assignments: int
    dropped: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for ``StepReceipt.extra``."""
        return {**self.losses, "assignments": self.assignments, "dropped": self.dropped}


class RoutingMeter:
    """Counts what the routers of a stage do while they train.

    The losses are Megatron's own records; what is sent and dropped is read from the routing map that
    every router returns.
    """

    def __init__(self, stage: Stage) -> None:
        self._config, self._groups = stage.config, stage.groups
        self._names = tuple(_loss_names(stage.config))
        self._chosen, self._microbatches = 0, 0
        self._kept = torch.zeros((), dtype=torch.int64, device=stage.device)
        self._hooks = [router.register_forward_hook(self._count) for router in routers(stage)]

    def _count(self, router: Any, inputs: Any, outputs: Any) -> None:
        # Recomputed activations pass twice, once of them without gradients.
        if not (router.training and torch.is_grad_enabled()):
            return
        probabilities, routing_map = outputs[:2]
        self._chosen += routing_map.shape[0] * router.topk
        # Where experts are padded to their capacity, the map has tokens that did not choose them.
        # It is counted on the device, which a number here would make the host wait for at every layer.
        self._kept += (routing_map & (probabilities > 0)).sum()

    def add_microbatches(self, count: int) -> None:
        """Say that this replica trained on ``count`` more microbatches."""
        self._microbatches += count if self._groups.speaks_for_replica else 0

    def take(self, sum_over_ranks: Callable[..., tuple[float, ...]]) -> RoutingTotals:
        """The totals since the last call. Collective.

        Args:
            sum_over_ranks: adds numbers up over every rank.
        """
        recorded = router_losses()
        own = [float(recorded[name].sum()) if name in recorded else 0.0 for name in self._names]
        *losses, chosen, kept, microbatches = sum_over_ranks(
            *own, self._chosen, float(self._kept), self._microbatches
        )
        self.clear()
        layers = _expert_layers(self._config)
        scales = {"z_loss": self._groups.collection.tp_cp.size()}  # each rank's mean, and not its part
        means = {
            name: loss / max(microbatches * layers * scales.get(name, 1), 1)
            for name, loss in zip(self._names, losses, strict=True)
        }
        return RoutingTotals(means, int(kept), int(chosen - kept))

    def stop(self) -> None:
        """Count no more."""
        for hook in self._hooks:
            hook.remove()

    def clear(self) -> None:
        """Forget what has been counted."""
        clear_router_losses()
        self._chosen, self._microbatches = 0, 0
        self._kept.zero_()


def routers(stage: Stage) -> Iterator[Any]:
    """The routers of a stage's layers."""
    for chunk in stage.chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Router))


def _loss_names(config: Any) -> Iterator[str]:
    """Megatron's names of the auxiliary losses that ``config`` asks for."""
    kinds = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
    if config.moe_router_load_balancing_type in kinds and config.moe_aux_loss_coeff:
        yield kinds[config.moe_router_load_balancing_type]
    if config.moe_z_loss_coeff is not None:
        yield "z_loss"


def _expert_layers(config: Any) -> int:
    frequency = config.moe_layer_freq
    every = isinstance(frequency, int)
    layers = len(range(0, config.num_layers, frequency)) if every else sum(frequency)
    return layers + (config.mtp_num_layers or 0)
