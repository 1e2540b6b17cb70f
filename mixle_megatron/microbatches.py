"""Cutting the batch of one ``train_batch`` call into microbatches, without changing its loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from mixle_megatron.errors import Fault, Refused

NOT_SUPERVISED = -100
"""torch's ``ignore_index``: a target with this value counts neither in the loss nor as a token."""


@dataclass(frozen=True)
class Microbatch:
    """What one forward pass sees.

    Attributes:
        inputs: token ids, int64 ``[rows, sequence]``.
        targets: ids to predict, int64 ``[rows, sequence]``, :data:`NOT_SUPERVISED` where none is.
    """

    inputs: torch.Tensor
    targets: torch.Tensor

    def positions(self) -> torch.Tensor:
        """Each token's place in its row, int64 ``[rows, sequence]``."""
        sequence = self.inputs.shape[1]
        return torch.arange(sequence, device=self.inputs.device).expand_as(self.inputs)


@dataclass(frozen=True)
class Batch:
    """One replica's part of one ``train_batch`` or ``evaluate`` call.

    Attributes:
        microbatches: at least one; all of one shape where they were asked to be.
        examples: rows that the caller gave, padding not counted.
        tokens: supervised targets that the caller gave.
    """

    microbatches: tuple[Microbatch, ...]
    examples: int
    tokens: int

    @property
    def is_padded(self) -> bool:
        """Whether there are rows that the caller did not give."""
        return sum(len(microbatch.inputs) for microbatch in self.microbatches) != self.examples

    @property
    def rows(self) -> int:
        """Rows of the largest microbatch."""
        return max(len(microbatch.inputs) for microbatch in self.microbatches)

    @property
    def sequence(self) -> int:
        """Tokens of a row."""
        return self.microbatches[0].inputs.shape[1]

    def to(self, device: torch.device) -> Batch:
        """The same batch with its microbatches on ``device``; pinned memory is copied meanwhile."""
        moved = (
            Microbatch(each.inputs.to(device, non_blocking=True), each.targets.to(device, non_blocking=True))
            for each in self.microbatches
        )
        return Batch(tuple(moved), self.examples, self.tokens)

    def __iter__(self) -> Iterator[Microbatch]:
        return iter(self.microbatches)


def as_token_ids(inputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets as int64 tensors, where they are: what is counted on the host stays there.

    Raises:
        Refused: unless both have the same shape ``(batch, sequence)`` and sequence is not zero.
    """
    inputs = torch.as_tensor(inputs, dtype=torch.long)
    targets = torch.as_tensor(targets, dtype=torch.long, device=inputs.device)
    if inputs.shape != targets.shape or inputs.ndim != 2 or inputs.shape[1] == 0:
        shapes = f"{tuple(inputs.shape)} and {tuple(targets.shape)}"
        raise Refused([Fault("inputs, targets", shapes, "must have one shape (batch, sequence)")])
    return inputs, targets


def foreign_id_faults(inputs: torch.Tensor, targets: torch.Tensor, vocab_size: int) -> list[Fault]:
    """Ids that the vocabulary does not have; a tensor-parallel embedding would look them up as zeros."""
    known = {"inputs": inputs, "targets": targets.masked_fill(targets == NOT_SUPERVISED, 0)}
    faults = []
    for name, ids in known.items():
        ends = sorted({int(end) for end in ids.aminmax()}) if ids.numel() else []
        for end in ends:
            if not 0 <= end < vocab_size:
                rule = f"is not a token id of model.vocab_size={vocab_size}"
                faults.append(Fault(name, end, rule, f"use 0 to {vocab_size - 1}"))
    return faults


def cut(inputs: torch.Tensor, targets: torch.Tensor, count: int, *, equal: bool, multiple: int = 1) -> Batch:
    """Cut ``(batch, sequence)`` tensors into at most ``count`` microbatches, as torch.chunk does.

    Args:
        inputs: token ids.
        targets: as ``inputs``.
        count: ``plan.microbatches``.
        equal: give all microbatches the same rows, padded with rows that nothing supervises; the
            pipeline's transfers have one shape.
        multiple: give a multiple of this many microbatches, the last of them without any supervised
            row; the interleaved schedule takes them in groups of pp. It divides ``count``.

    A batch of no rows becomes one unsupervised row, so that a rank without data still takes part
    in every collective of its replica.
    """
    examples, tokens = len(inputs), int((targets != NOT_SUPERVISED).sum())
    if examples == 0:
        inputs, targets = _padded(inputs, targets, 1)
    pieces = min(count, len(inputs))
    if equal:
        rows = -(-len(inputs) // pieces)
        pieces = ceil(len(inputs) / (rows * multiple)) * multiple
        inputs, targets = _padded(inputs, targets, pieces * rows)
    chunks = zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True)
    return Batch(tuple(Microbatch(*pair) for pair in chunks), examples, tokens)


def own_part(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What context-parallel ``rank`` of ``ranks`` holds of ``[rows, sequence]``: Megatron's zigzag.

    The sequence is cut into ``2 · ranks`` chunks, of which a rank holds one from the front and its
    mirror image from the back, so that causal attention costs every rank the same.
    """
    if ranks == 1:
        return tensor
    chunks = tensor.chunk(2 * ranks, dim=1)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim=1)


def _padded(inputs: torch.Tensor, targets: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    missing = rows - len(inputs)
    if missing == 0:
        return inputs, targets
    shape = (missing, inputs.shape[1])
    return (
        torch.cat([inputs, inputs.new_zeros(shape)]),
        torch.cat([targets, targets.new_full(shape, NOT_SUPERVISED)]),
    )
