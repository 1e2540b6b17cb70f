"""The reference of one rank in fp32 itself: the same model in a loop of torch's own.

Megatron's layers compute the logits. Loss, division by tokens, clipping and adam are torch's, and no
schedule, gradient buffer, reduction or optimizer of Megatron's is used: a wrong divisor that every plan
has alike shows here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.func import functional_call

from mixle_megatron.evidence.claims import MODELS, OPTIMIZER, UPDATES, Trial
from mixle_megatron.evidence.trial import Tensors, Update, batch, session_of, without_padding
from mixle_megatron.models.naming import logical_name


def record(trial: Trial, path: str, device: str) -> None:
    """Train, and keep every update at ``path`` as :func:`mixle_megatron.evidence.trial.record` does."""
    rows = MODELS[trial.model]["vocab_size"]
    kept: list[Update] = []
    with session_of(trial, trial.plan, device) as session:
        module = session.module
        weights = {name: each.detach().clone().requires_grad_() for name, each in module.named_parameters()}
        optimizer = torch.optim.AdamW(
            [
                {"params": [each for each in weights.values() if each.dim() > 1]},
                # Megatron decays no biases and norms.
                {"params": [each for each in weights.values() if each.dim() == 1], "weight_decay": 0.0},
            ],
            lr=OPTIMIZER["lr"],
            weight_decay=OPTIMIZER["weight_decay"],
            eps=OPTIMIZER["adam_eps"],
        )

        def named(tensors: Mapping[str, torch.Tensor]) -> Tensors:
            logical = {logical_name(module, name): each.detach() for name, each in tensors.items()}
            return without_padding(logical, rows)

        for update in range(UPDATES):
            optimizer.zero_grad()
            loss = _mean_loss(module, weights, update, session.device)
            loss.backward()
            gradient = named({name: each.grad for name, each in weights.items() if each.grad is not None})
            torch.nn.utils.clip_grad_norm_(weights.values(), OPTIMIZER["clip_grad"])
            optimizer.step()
            kept.append({"loss": loss.item(), "gradient": gradient, "parameters": named(weights)})
    torch.save(kept, path)


def _mean_loss(module: torch.nn.Module, weights: Tensors, update: int, device: torch.device) -> torch.Tensor:
    """The mean over all supervised tokens of the update, in one pass."""
    inputs, targets = (each.to(device) for each in batch(update))
    positions = torch.arange(inputs.shape[1], device=device).expand_as(inputs)
    given = {"input_ids": inputs, "position_ids": positions, "attention_mask": None}
    logits = functional_call(module, weights, (), given)[..., : MODELS["dense"]["vocab_size"]]
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100
    )
