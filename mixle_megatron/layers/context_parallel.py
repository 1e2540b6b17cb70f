"""Causal attention over sequences that the ranks of a context-parallel group share.

Megatron cuts a sequence of s tokens into ``2 * cp`` chunks, and rank r holds chunk r followed by
chunk ``2 * cp - 1 - r``, so that every rank attends to equally much. The ranks gather their keys and
values, and each attends with its two chunks of queries to all tokens up to the end of the chunk.

What a rank keeps for the backward pass falls as 1 / cp. With h heads and g groups of d channels,
a batch of b sequences and elements of e bytes, a layer's attention keeps

    ``s / cp * b * ((3 * h + 2 * g) * d * e + 4 * h)`` bytes, and one row of a mask for each chunk:

its own queries, keys and values, its outputs as the kernel gives them and as the layer does, and 4
bytes for each row of scores. The gathered keys and values, ``2 * s * b * g * d * e`` bytes whatever cp
is, exist in one layer at a time, where putting them in order takes 2 times as much and adding up their
gradients 4 times: they are dropped after the forward pass and gathered once more for the backward
pass. So a layer sends half as much again as one that keeps them: two all-gathers and one reduce-scatter
of that size. With dropout torch computes the scores explicitly, and keeps them (``s / cp * s * b * h``
elements, several times) and copies of the keys that it scaled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch.autograd.graph import saved_tensors_hooks

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From queries, keys, values and a mask that is added to the scores ``[queries, keys]`` to the
outputs; all but the mask are ``[sequence, batch, heads or groups, head_dim]``."""


def attend_across_ranks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any, attention: Attention
) -> torch.Tensor:
    """Attend from this rank's two chunks to the whole sequence before them, causally.

    Every rank of ``group`` calls this, and runs the backward pass, at the same point.

    Args:
        query: ``[sequence / cp, batch, heads, head_dim]``, this rank's two chunks.
        key: ``[sequence / cp, batch, groups, head_dim]``.
        value: as ``key``.
        group: the context-parallel process group.
        attention: what attends; it is called once for each chunk.

    Returns:
        ``[sequence / cp, batch, heads, head_dim]``, in the order of ``query``.

    Raises:
        ValueError: if this rank's part of the sequence is not two chunks of one length.
    """
    if query.shape[0] % 2:
        raise ValueError(f"the sequence is no multiple of 2 * cp: a rank holds {query.shape[0]} tokens of it")
    whole = latest_first(key, value, group)
    gathered = _GatheredAgain(key.detach(), value.detach(), group)
    with gathered.not_kept(whole):
        outputs = []
        for index, chunk in zip(chunks_of(group.rank(), group.size()), query.chunk(2), strict=True):
            seen = (index + 1) * len(chunk)
            keys, values = whole[-seen:].unbind(1)
            outputs.append(attention(chunk, keys, values, causal_mask(len(chunk), seen, query)))
    context = torch.cat(outputs)
    gathered.surround(whole, context)
    return context


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The indices of the two chunks that a rank of a context-parallel group holds, in their order."""
    return rank, 2 * ranks - 1 - rank


def latest_first(key: torch.Tensor, value: torch.Tensor, group: Any) -> torch.Tensor:
    """Gather the whole sequence, its last token first; the backward pass adds up the ranks' gradients.

    Args:
        key: ``[sequence / cp, batch, groups, head_dim]``, those of this rank's two chunks.
        value: as ``key``.
        group: the context-parallel process group.

    Returns:
        ``[sequence, 2, batch, groups, head_dim]``, keys and values.
    """
    # Reversed, each rank's late chunk comes first: late chunks are in order, early ones against it.
    local = torch.stack([key.flip(0), value.flip(0)], dim=1)
    by_rank = gather_from_sequence_parallel_region(local, group=group)
    late, early = by_rank.unflatten(0, (group.size(), 2, -1)).unbind(1)
    return torch.cat([*late.unbind(), *reversed(early.unbind())])


def causal_mask(queries: int, keys: int, like: torch.Tensor) -> torch.Tensor:
    """What to add to the scores of a sequence's last ``queries`` tokens with its keys, latest first.

    Query i sees key j where ``i + j >= queries - 1``. As that is a matter of the sum alone, all rows
    are windows of one vector, each a step further along: the mask takes memory for one row and not
    for ``queries * keys`` elements. This is why keys are gathered in reversed order.

    Returns:
        ``[queries, keys]``, 0 or minus infinity, in the dtype and on the device of ``like``.
    """
    row = like.new_zeros(queries - 1 + keys)
    row[: queries - 1] = -math.inf
    mask = row.as_strided((queries, keys), (1, 1))
    return mask.contiguous() if like.is_cuda else mask  # CUDA's kernels want aligned rows


@dataclass(frozen=True)
class _Window:
    """Where a tensor that autograd would have kept lies in the gathered keys and values."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _GatheredAgain:
    """Gathered keys and values that are there in the forward pass and again in the backward pass."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, group: Any) -> None:
        self._key = key
        self._value = value
        self._group = group
        self._whole: torch.Tensor | None = None

    @contextmanager
    def not_kept(self, whole: torch.Tensor) -> Iterator[None]:
        """Keep for the backward pass of what is computed inside no view of ``whole``, but where it lay.

        Copies of it are kept, such as the scaled keys of an attention that draws dropout.
        """
        storage = whole.untyped_storage().data_ptr()

        def pack(tensor: torch.Tensor) -> torch.Tensor | _Window:
            if tensor.untyped_storage().data_ptr() != storage:
                return tensor
            return _Window(tensor.shape, tensor.stride(), tensor.storage_offset())

        def unpack(kept: torch.Tensor | _Window) -> torch.Tensor:
            if isinstance(kept, torch.Tensor):
                return kept
            return self._whole.as_strided(kept.shape, kept.stride, kept.offset)

        with saved_tensors_hooks(pack, unpack):
            yield

    def surround(self, whole: torch.Tensor, context: torch.Tensor) -> None:
        """Gather when the gradient of ``context`` comes, and drop when that of ``whole`` has gone.

        Not when the first of them is asked for: all ranks must gather at one point of the pass.
        """
        if context.requires_grad:
            context.register_hook(self._gather)
        if whole.requires_grad:
            whole.register_hook(self._drop)

    def _gather(self, _gradient: torch.Tensor) -> None:
        with torch.no_grad():
            self._whole = latest_first(self._key, self._value, self._group)

    def _drop(self, _gradient: torch.Tensor) -> None:
        self._whole = None
