"""Every plan of so many ranks over the seven axes, and one training run under each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from mixle.utils.parallel.training_contracts import ParallelPlan
from small_gpts import OPTIMIZERS, VOCABULARY

from mixle_megatron.config.model import ModelSection

UPDATES = 5
GLOBAL_MICROBATCHES = 4
MICRO_BATCH = 2
MESH = ("dp_replicate", "dp_shard", "tp", "pp", "cp")

DENSE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "vocab_size": VOCABULARY,
    "init_method_std": 0.1,
}

MIXTURE: dict[str, Any] = DENSE | {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
}

MODELS = {"dense": DENSE, "mixture": MIXTURE}


def every_plan(ranks: int, *, experts: bool, largest: int = 4) -> Iterator[dict[str, int]]:
    """All plans of ``ranks`` ranks, as the sizes of their axes larger than 1.

    With experts each is listed with every ep that divides the data-parallel ranks and every etp that
    fits beside it; ``largest`` bounds what the models of this module can be cut into.
    """
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for mesh in product(sizes, repeat=len(MESH)):
        plan = dict(zip(MESH, mesh, strict=True))
        world = plan["dp_replicate"] * plan["dp_shard"] * plan["tp"] * plan["pp"] * plan["cp"]
        replicas = plan["dp_replicate"] * plan["dp_shard"]
        fits = max(plan["tp"], plan["pp"], plan["cp"], replicas) <= largest
        if world != ranks or not fits:
            continue
        if not experts:
            yield {axis: size for axis, size in plan.items() if size > 1}
            continue
        of_a_stage = ranks // plan["pp"]
        for ep, etp in product(sizes, repeat=2):
            if replicas % ep == 0 and of_a_stage % (ep * etp) == 0 and max(ep, etp) <= largest:
                yield {axis: size for axis, size in (plan | {"ep": ep, "etp": etp}).items() if size > 1}


def plan_name(plan: dict[str, int]) -> str:
    """Such as ``tp=2 ep=2``."""
    return " ".join(f"{axis}={size}" for axis, size in plan.items()) or "one rank"


def world_size(plan: dict[str, int]) -> int:
    """Ranks of a plan."""
    return ParallelPlan(**plan).world_size


def train(
    model: dict[str, Any],
    plan: dict[str, int],
    pipeline: dict[str, Any] | None = None,
    updates: int = UPDATES,
) -> list[dict[str, Any]]:
    """Train on the same microbatches under any plan; what every update's receipt says, and the routing.

    ``routing`` is how many tokens each expert of each layer got, ``[layers, experts]``, over all ranks.
    """
    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.models.gpt import GPT
    from mixle_megatron.pipeline_split import PipelineSplit

    replicas = plan.get("dp_replicate", 1) * plan.get("dp_shard", 1)
    microbatches = plan.get("microbatches", GLOBAL_MICROBATCHES // replicas)
    opened = MegatronBackend().prepare(
        GPT(ModelSection(**model), seed=7),
        plan=ParallelPlan(**(plan | {"microbatches": microbatches})),
        optimizer=OPTIMIZERS["adam"],
        device="cpu",
        pipeline=PipelineSplit(**(pipeline or {})),
    )
    seen = []
    with opened:
        counts = routing_counts(opened, model)
        for update in range(updates):
            counts.zero_()
            inputs, targets = batch(model["seq_length"], update)
            own = slice(opened.data_parallel_rank, None, opened.data_parallel_size)
            own_inputs = torch.cat(inputs.split(MICRO_BATCH)[own])
            receipt = opened.train_batch(own_inputs, torch.cat(targets.split(MICRO_BATCH)[own]))
            total = counts.clone()
            dist.all_reduce(total)
            seen.append(
                {
                    "loss": receipt.loss,
                    "grad_norm": receipt.extra["grad_norm"],
                    "tokens": receipt.global_tokens,
                    "experts": receipt.extra.get("experts"),
                    "routing": total.tolist(),
                }
            )
    return seen


def batch(sequence: int, update: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one update, every fifth target unsupervised."""
    generator = torch.Generator().manual_seed(100 + update)
    rows = GLOBAL_MICROBATCHES * MICRO_BATCH
    windows = torch.randint(0, VOCABULARY, (rows, sequence + 1), generator=generator)
    targets = windows[:, 1:].clone()
    targets[:, ::5] = -100
    return windows[:, :-1], targets


def routing_counts(opened: Any, model: dict[str, Any]) -> torch.Tensor:
    """A tensor to which the routers of this rank add each token that they send, in training."""
    from megatron.core.transformer.moe.router import Router

    counts = torch.zeros(model["num_layers"], model.get("num_moe_experts") or 1, dtype=torch.long)

    def count(router: Any, _inputs: Any, outputs: Any) -> None:
        if router.training and torch.is_grad_enabled():
            counts[router.layer_number - 1] += outputs[1].sum(0)

    for chunk in opened.stage.chunks:
        for module in chunk.modules():
            further = getattr(module, "is_mtp_layer", False)  # since 0.19; before, numbers go on
            if isinstance(module, Router) and not further and module.layer_number <= len(counts):
                module.register_forward_hook(count)
    return counts
