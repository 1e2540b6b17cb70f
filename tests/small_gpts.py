"""Small GPTs and their batches, for tests that train them on real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from mixle.utils.parallel.training_contracts import ParallelPlan

from mixle_megatron.config.model import ModelSection
from mixle_megatron.optimizer_settings import OptimizerSettings

SEQUENCE = 16
VOCABULARY = 257
ROWS = 12
UNSUPERVISED_ROWS = slice(8, 12)

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": SEQUENCE,
    "vocab_size": VOCABULARY,
    "init_method_std": 0.1,
}

LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation_func": "silu",
    "gated_linear_unit": True,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "add_bias_linear": False,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2_untied": {"share_embeddings_and_output_weights": False},
    "llama": LLAMA | {"share_embeddings_and_output_weights": False},
    "llama_tied": LLAMA,
    "qk_norm": {
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "qk_layernorm": True,
        "num_query_groups": 2,
        "kv_channels": 12,
        "add_bias_linear": False,
        "add_qkv_bias": True,
    },
    "gpt2_recompute_full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "gpt2_recompute_selective": {"recompute_granularity": "selective"},
    "gpt2_dropout": {"hidden_dropout": 0.2, "attention_dropout": 0.2},
}
"""Models by name: what differs from a small GPT-2."""

OPTIMIZERS: dict[str, OptimizerSettings] = {
    "adam": OptimizerSettings(name="adam", lr=1e-3),
    "sgd": OptimizerSettings(name="sgd", lr=0.05),
    "adam_scheduled": OptimizerSettings(
        name="adam",
        lr=2e-3,
        min_lr=1e-4,
        weight_decay=0.3,
        clip_grad=0.5,
        schedule="cosine",
        warmup_steps=3,
        decay_steps=10,
    ),
    "adam_l2": OptimizerSettings(
        name="adam", lr=1e-3, weight_decay=0.1, decoupled_weight_decay=False, clip_grad=0
    ),
}


def section(variant: str) -> ModelSection:
    """The ``model`` section of a variant."""
    return ModelSection(**(SIZES | VARIANTS[variant]))


def global_batch(update: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one update, the same for every plan.

    Every fifth target and the last four rows are not supervised.
    """
    generator = torch.Generator().manual_seed(1000 + update)
    windows = torch.randint(0, VOCABULARY, (ROWS, SEQUENCE + 1), generator=generator)
    inputs, targets = windows[:, :-1].clone(), windows[:, 1:].clone()
    targets[:, ::5] = -100
    targets[UNSUPERVISED_ROWS] = -100
    return inputs, targets


def parallel_plan(**sizes: int) -> ParallelPlan:
    """mixle's plan."""
    return ParallelPlan(**sizes)


@contextmanager
def session(
    variant: str = "gpt2",
    optimizer: str = "adam",
    *,
    precision: str = "fp32",
    seed: int = 1234,
    uneven_batches: bool = True,
    **sizes: int,
) -> Iterator[Any]:
    """A session of a variant under the plan ``sizes`` on the ranks that are running."""
    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.models.gpt import GPT

    opened = MegatronBackend().prepare(
        GPT(section(variant), seed=seed),
        plan=ParallelPlan(**sizes),
        precision=precision,
        optimizer=OPTIMIZERS[optimizer],
        device="cpu",
        uneven_batches=uneven_batches,
    )
    with opened:
        yield opened


def cuts(rows: int, parts: int, shape: str) -> list[slice]:
    """Which of ``rows`` each data-parallel rank reads.

    ``even``: as many each; ``uneven``: two thirds to the first half of the ranks, the rest to the
    others; ``idle``: none to the last rank.
    """
    weights = {
        "even": [1] * parts,
        "uneven": [2 if part < parts / 2 else 1 for part in range(parts)],
        "idle": [1] * (parts - 1) + [0],
    }[shape]
    bounds = [round(rows * sum(weights[:part]) / sum(weights)) for part in range(parts + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]


def train_update(opened: Any, update: int, shape: str = "even") -> Any:
    """Train one update on its global batch, this rank on its cut; return the committing receipt.

    Each of the update's accumulation steps takes an equal part of the batch.
    """
    inputs, targets = global_batch(update)
    steps = opened.plan.gradient_accumulation_steps
    for part_inputs, part_targets in zip(inputs.chunk(steps), targets.chunk(steps), strict=True):
        cut = cuts(len(part_inputs), opened.data_parallel_size, shape)[opened.data_parallel_rank]
        receipt = opened.train_batch(part_inputs[cut], part_targets[cut])
    return receipt


def whole_weights(opened: Any) -> dict[str, torch.Tensor]:
    """The parameters of a one-rank session by logical name."""
    from mixle_megatron.models.naming import logical_name

    module = opened.module
    return {logical_name(module, name): p.detach().clone() for name, p in module.named_parameters()}
