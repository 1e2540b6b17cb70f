"""One pass of Megatron's schedules over the microbatches of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
)

from mixle_megatron.microbatches import NOT_SUPERVISED, Batch, Microbatch
from mixle_megatron.process_groups import MegatronGroups


class Schedule:
    """Runs forward, or forward and backward, of one stage through the schedule that the plan needs.

    Gradients accumulate in the buffers of the DistributedDataParallel wrapper; reducing them is the
    session's, at the commit.
    """

    def __init__(self, model: torch.nn.Module, config: Any, groups: MegatronGroups) -> None:
        self._model = model
        self._groups = groups
        pipeline = groups.collection.pp
        if pipeline.size() > 1:
            self._run = partial(
                forward_backward_pipelining_without_interleaving,
                p2p_communicator=P2PCommunicator(pp_group=pipeline, config=config),
            )
        else:
            self._run = forward_backward_no_pipelining

    def forward_backward(self, batch: Batch) -> float:
        """Add the gradient of the batch's summed loss; return that loss, 0.0 off the last stage."""
        return self._pass(batch, forward_only=False)

    def forward(self, batch: Batch) -> float:
        """The batch's summed loss without gradients; 0.0 on every stage but the last."""
        with torch.no_grad():
            return self._pass(batch, forward_only=True)

    def _pass(self, batch: Batch, *, forward_only: bool) -> float:
        losses = self._run(
            forward_step_func=forward_step,
            data_iterator=iter(batch),
            model=self._model,
            num_microbatches=len(batch.microbatches),
            seq_length=batch.sequence,
            micro_batch_size=batch.rows,
            forward_only=forward_only,
            pg_collection=self._groups.collection,
        )
        if not self._groups.is_last_stage:
            return 0.0
        return float(torch.stack(losses).sum(dtype=torch.float64))


def forward_step(data: Iterator[Microbatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Megatron's ``forward_step_func``: run one microbatch, and say how to get its loss.

    Returns:
        The stage's output (each token's loss on the last stage), and the function from it to
        ``(summed loss, token count, the loss to report)``.
    """
    microbatch = next(data)
    sequence = microbatch.inputs.shape[1]
    positions = torch.arange(sequence, device=microbatch.inputs.device).expand_as(microbatch.inputs)
    supervised = microbatch.targets != NOT_SUPERVISED
    # An ignored target has to name some row of the vocabulary; its loss is then masked out.
    labels = microbatch.targets.masked_fill(~supervised, 0)
    output = model(microbatch.inputs, positions, None, labels=labels)
    return output, partial(summed_loss, supervised)


def summed_loss(supervised: torch.Tensor, token_losses: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The sum over supervised tokens of ``token_losses``, both ``[rows, sequence]``.

    Megatron's schedules take the count and the loss to report as the second and third value.
    """
    loss = token_losses.float().masked_fill(~supervised, 0.0).sum()
    return loss, supervised.sum().to(torch.int), loss.detach()
