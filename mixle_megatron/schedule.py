"""One pass of Megatron's schedules over the microbatches of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)

from mixle_megatron.documents import DocumentBounds
from mixle_megatron.microbatches import NOT_SUPERVISED, Batch, Microbatch, own_part
from mixle_megatron.process_groups import MegatronGroups


class Schedule:
    """Runs forward, or forward and backward, of one stage through the schedule that the plan needs.

    Gradients accumulate in the buffers of the DistributedDataParallel wrappers; reducing them is the
    session's, at the commit.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: Any,
        groups: MegatronGroups,
        documents: DocumentBounds | None = None,
    ) -> None:
        """Choose the schedule.

        Args:
            chunks: the stage's chunks of layers, wrapped; more than one interleaves.
            config: their TransformerConfig.
            groups: this rank's groups.
            documents: what stops at the end of a document; None where nothing does.
        """
        self._chunks = list(chunks)
        self._groups = groups
        # Only predictions of further tokens need the mask; every other module takes labels alone.
        self._passes_mask = bool(config.mtp_num_layers)
        self._documents, self._dtype = documents, config.params_dtype
        pipeline = groups.collection.pp
        if pipeline.size() == 1:
            self._run: Callable[..., Any] = forward_backward_no_pipelining
            return
        interleaves = len(self._chunks) > 1
        self._run = partial(
            forward_backward_pipelining_with_interleaving
            if interleaves
            else forward_backward_pipelining_without_interleaving,
            p2p_communicator=P2PCommunicator(pp_group=pipeline, config=config),
        )

    def forward_backward(self, batch: Batch) -> float:
        """Add the gradient of the batch's summed loss; return that loss, 0.0 off the last stage.

        Under context parallelism it is the loss of this rank's part of the sequences.
        """
        return self._pass(batch, forward_only=False)

    def forward(self, batch: Batch) -> float:
        """The batch's summed loss without gradients; 0.0 on every stage but the last."""
        with torch.no_grad():
            return self._pass(batch, forward_only=True)

    def _pass(self, batch: Batch, *, forward_only: bool) -> float:
        iterators = [iter(batch) for _ in self._chunks]
        one = len(self._chunks) == 1
        losses = self._run(
            forward_step_func=partial(
                forward_step,
                context=self._groups.collection.cp,
                passes_mask=self._passes_mask,
                places=self._places,
            ),
            data_iterator=iterators[0] if one else iterators,
            model=self._chunks[0] if one else self._chunks,
            num_microbatches=len(batch.microbatches),
            seq_length=batch.sequence,
            micro_batch_size=batch.rows,
            forward_only=forward_only,
            pg_collection=self._groups.collection,
        )
        if not losses:
            return 0.0
        return float(torch.stack(losses).sum(dtype=torch.float64))

    def _places(self, microbatch: Microbatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The positions of a microbatch's tokens, and its attention mask: None where that is causal."""
        if self._documents is None:
            return microbatch.positions(), None
        ids = microbatch.inputs
        return self._documents.position_ids(ids), self._documents.attention_mask(ids, self._dtype)


def forward_step(
    data: Iterator[Microbatch],
    model: torch.nn.Module,
    *,
    context: Any,
    passes_mask: bool,
    places: Callable[[Microbatch], tuple[torch.Tensor, torch.Tensor | None]],
) -> tuple[torch.Tensor, Any]:
    """Megatron's ``forward_step_func``: run one microbatch, and say how to get its loss.

    Args:
        data: the microbatches.
        model: a chunk of the stage.
        context: the context-parallel group, whose ranks each see their part of every sequence.
        passes_mask: whether the model is told which targets are supervised, for losses of its own.
        places: gives the positions of whole sequences, and the attention mask or None.

    Returns:
        The stage's output (each token's loss on the last stage), and the function from it to
        ``(summed loss, token count, the loss to report)``.
    """
    microbatch = next(data)
    own = partial(own_part, rank=context.rank(), ranks=context.size())
    targets = own(microbatch.targets)
    supervised = targets != NOT_SUPERVISED
    # An ignored target has to name some row of the vocabulary; its loss is then masked out.
    labels = targets.masked_fill(~supervised, 0)
    mask = {"loss_mask": supervised.float()} if passes_mask else {}
    positions, attention_mask = places(microbatch)
    output = model(own(microbatch.inputs), own(positions), attention_mask, labels=labels, **mask)
    return output, partial(summed_loss, supervised)


def summed_loss(supervised: torch.Tensor, token_losses: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The sum over supervised tokens of ``token_losses``, both ``[rows, sequence]``.

    Megatron's schedules take the count and the loss to report as the second and third value.
    """
    loss = token_losses.float().masked_fill(~supervised, 0.0).sum()
    return loss, supervised.sum().to(torch.int), loss.detach()
