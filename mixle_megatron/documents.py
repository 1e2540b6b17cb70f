"""Where documents begin in rows that hold several, and what of a model stops there.

A row of a packed corpus is documents one after another, each with its end token. As in Megatron-LM's
datasets a document begins after an end token: the token itself belongs to the document that it ends, and
a row begins with a document, or the rest of one, whatever stands before it in the corpus. All of it
follows from the token ids, which every pipeline stage of a replica is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mixle_megatron.errors import Fault
from mixle_megatron.rules import NOT_EXECUTED
from mixle_megatron.rules.data import document_attention_faults
from mixle_megatron.rules.verdict import NOT_HERE


@dataclass(frozen=True)
class DocumentBounds:
    """What stops at the end of a document.

    Attributes:
        end: the token that ends one.
        positions: count positions from each document's start (Megatron-LM's ``reset_position_ids``).
            Learned positions alone are looked up by them; rotary ones depend on distances within the row.
        attention: attend within a document alone (``reset_attention_mask``). Each microbatch then has a
            mask of rows · sequence² elements in the precision of the model, which its layers share.
    """

    end: int
    positions: bool = False
    attention: bool = False

    def position_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Each token's place in its document, or in its row where positions are not asked for.

        Args:
            ids: token ids, int64 ``[rows, sequence]``.

        Returns:
            int64 ``[rows, sequence]``.
        """
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        if not self.positions:
            return places
        begins = self._follows_end(ids)
        return places - places.masked_fill(~begins, 0).cummax(dim=1).values

    def attention_mask(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """What to add to the scores of each token with each: 0 where it attends, else minus infinity.

        Args:
            ids: token ids, int64 ``[rows, sequence]``.
            dtype: of the scores.

        Returns:
            ``[rows, 1, sequence, sequence]``, queries before keys; None where attention is not asked for.
        """
        if not self.attention:
            return None
        document = self._follows_end(ids).cumsum(dim=1)
        visible = (document[:, :, None] == document[:, None, :]).tril_()
        mask = torch.zeros(visible.shape, dtype=dtype, device=ids.device)
        return mask.masked_fill_(~visible, -math.inf)[:, None]

    def _follows_end(self, ids: torch.Tensor) -> torch.Tensor:
        """Whether the token before each is an end, bool ``[rows, sequence]``; before a row is none."""
        return torch.nn.functional.pad(ids[:, :-1] == self.end, (1, 0), value=False)


def bounds_faults(bounds: DocumentBounds, terms: Any, provider: Any, vocab_size: int) -> Iterator[Fault]:
    """Why a session cannot honour the bounds.

    Args:
        bounds: what ``prepare`` was asked for.
        terms: its :class:`~mixle_megatron.models.provider.SessionTerms`.
        provider: of the model; its stages take a mask where ``takes_attention_mask`` is true.
        vocab_size: tokens that the model has.
    """
    if not 0 <= bounds.end < vocab_size:
        rule = f"is not a token id of model.vocab_size={vocab_size}"
        yield Fault("documents.end", bounds.end, rule, f"use 0 to {vocab_size - 1}")
    if not bounds.attention:
        return
    field = "documents.attention"
    yield from document_attention_faults(terms.plan, field)
    if not getattr(provider, "takes_attention_mask", False):
        rule = f"{NOT_EXECUTED}a {type(provider).__name__} is not known to take an attention mask"
        remedy = "train a mixle_megatron.GPT, or a provider with takes_attention_mask = True"
        yield Fault(field, True, rule, remedy)
    if terms.device.type == "cuda" and _has_transformer_engine():
        rule = f"{NOT_HERE}Transformer Engine's attention is causal over the whole row and takes no mask"
        yield Fault(field, True, rule, "leave it out, or use a host without Transformer Engine")


def _has_transformer_engine() -> bool:
    from megatron.core.extensions import transformer_engine

    return bool(transformer_engine.HAVE_TE)
