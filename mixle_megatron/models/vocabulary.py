"""Padding of the vocabulary, so that tensor parallelism divides it, without any effect on the loss."""

from __future__ import annotations

from typing import Any

import torch

from mixle_megatron.process_groups import MegatronGroups


def exclude_padding_from_softmax(module: torch.nn.Module, vocab_size: int, groups: MegatronGroups) -> None:
    """Give the padded logits of ``module.output_layer`` probability zero.

    Sixteen padded rows of zeros would add ``log(272 / 256)`` to the loss of a vocabulary of 256.
    With a logit of minus infinity they add nothing, and their gradient is exactly zero, so that the
    rows stay at the zero they start from.

    Args:
        module: a stage; nothing is done where it has no output layer.
        vocab_size: rows of the vocabulary that a user sees.
        groups: this rank's groups; logits are sharded over tp on their last dimension.
    """
    output_layer = getattr(module, "output_layer", None)
    if output_layer is None:
        return
    rows = output_layer.output_size // groups.collection.tp.size()
    real_rows = min(max(vocab_size - rows * groups.collection.tp.rank(), 0), rows)
    if real_rows == rows:
        return

    def mask_padding(_layer: torch.nn.Module, _inputs: Any, output: tuple[torch.Tensor, Any]) -> Any:
        logits, bias = output
        padding = torch.arange(rows, device=logits.device) >= real_rows
        return logits.masked_fill(padding, float("-inf")), bias

    output_layer.register_forward_hook(mask_padding)
