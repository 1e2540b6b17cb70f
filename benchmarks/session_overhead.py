"""Times a session's step against the shortest hand-written Megatron loop; prints one JSON object.

    OMP_NUM_THREADS=1 python benchmarks/session_overhead.py
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/session_overhead.py    # dp_shard=2

Both train the same model from the same weights on the same batches, in turn, in fp32 on the CPU, and
both read the loss over all ranks and the gradient norm after each update. Their losses have to agree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer.transformer_config import TransformerConfig
from mixle.utils.parallel.training_contracts import ParallelPlan

from mixle_megatron.backend import MegatronBackend
from mixle_megatron.models.decoder_spec import decoder_spec
from mixle_megatron.models.gpt import GPT
from mixle_megatron.optimizer_settings import OptimizerSettings
from mixle_megatron.session import MegatronSession
from mixle_megatron.translate import Host

LIMIT = 1.02
SEQUENCE, VOCABULARY, LEARNING_RATE = 128, 257, 1e-4


class HandWrittenLoop:
    """What a person writes who trains this one model with Megatron-Core under data parallelism."""

    def __init__(self, session: MegatronSession, sizes: dict[str, int]) -> None:
        config = TransformerConfig(
            **sizes,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            calculate_per_token_loss=True,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
        )
        # The very layers of the session: its loop is what is measured here, and not they.
        spec = decoder_spec(config, session.stage.groups, Host.of(session.device))
        module = GPTModel(config, spec, VOCABULARY, SEQUENCE, share_embeddings_and_output_weights=True)
        module.load_state_dict(session.module.state_dict())
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            module,
        )
        settings = OptimizerConfig(
            lr=LEARNING_RATE, weight_decay=0.01, clip_grad=1.0, use_distributed_optimizer=True
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model], use_gloo_process_groups=False)
        self.scheduler = constant_schedule(self.optimizer)
        config.finalize_model_grads_func = finalize_model_grads
        self.positions = torch.arange(SEQUENCE).unsqueeze(0)
        self.model.train()

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        """One update; the mean loss over all ranks, and the gradient norm."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = forward_backward_no_pipelining(
            forward_step_func=self.forward,
            data_iterator=iter([(inputs, targets)]),
            model=self.model,
            num_microbatches=1,
            seq_length=SEQUENCE,
            micro_batch_size=len(inputs),
        )
        _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(increment=1)
        total = losses[0]
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return float(total[0] / total[1]), float(grad_norm)

    def forward(self, batches: Iterator[Any], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        """Megatron's ``forward_step_func``."""
        inputs, targets = next(batches)
        return model(inputs, self.positions.expand_as(inputs), None, labels=targets), summed_loss


def summed_loss(token_losses: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sum over tokens, their count, and both as they are reported."""
    loss, tokens = token_losses.sum(), torch.tensor(token_losses.numel(), dtype=torch.int)
    return loss, tokens, torch.stack([loss.detach(), tokens.float()])


def constant_schedule(optimizer: Any) -> OptimizerParamScheduler:
    """Megatron's schedule at one learning rate and weight decay."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LEARNING_RATE,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=1,
        lr_decay_style="constant",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )


def session_step(
    session: MegatronSession, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[float, float]:
    """One update of the session; what the hand-written loop returns."""
    receipt = session.train_batch(inputs, targets)
    return receipt.loss, receipt.extra["grad_norm"]


def without_meter(session: MegatronSession, step: Callable[..., Any]) -> Callable[..., Any]:
    """``timed`` with the session's traffic meter, which wraps torch.distributed, out of the way."""

    def run(*batch: torch.Tensor) -> Any:
        session._traffic.stop()
        try:
            return timed(step, *batch)
        finally:
            session._traffic.start()

    return run


def timed(step: Callable[..., Any], *batch: torch.Tensor) -> tuple[float, float, Any]:
    """Seconds of wall clock and of this process's CPU, and the step's result; ranks start together."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    result = step(*batch)
    return time.perf_counter() - wall, time.process_time() - cpu, result


def measure(session: MegatronSession, loop: HandWrittenLoop, rows: int, pairs: int, warm_up: int = 3) -> dict:
    """Time both in turn, first one and then the other first."""
    ours, theirs = partial(timed, partial(session_step, session)), without_meter(session, loop.step)
    generator = torch.Generator().manual_seed(session.data_parallel_rank)
    measured, drift = [], 0.0
    for index in range(warm_up + pairs):
        tokens = torch.randint(0, VOCABULARY, (rows, SEQUENCE + 1), generator=generator)
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if index % 2:
            hand, own = theirs(*batch), ours(*batch)
        else:
            own, hand = ours(*batch), theirs(*batch)
        drift = max(drift, abs(own[2][0] / hand[2][0] - 1))
        if index >= warm_up:
            measured.append((own, hand))
    if drift > 1e-5:
        raise RuntimeError(f"the two loops do different steps: their losses differ by {drift:.1e}")
    return summary(measured, drift)


def summary(measured: list[tuple[Any, Any]], drift: float) -> dict[str, float]:
    """Medians over the pairs."""
    return {
        "pairs": len(measured),
        "session_seconds": round(statistics.median(own[0] for own, _ in measured), 4),
        "hand_written_seconds": round(statistics.median(hand[0] for _, hand in measured), 4),
        "ratio": round(statistics.median(own[0] / hand[0] for own, hand in measured), 4),
        "cpu_ratio": round(statistics.median(own[1] / hand[1] for own, hand in measured), 4),
        "largest_loss_difference": drift,
        "limit": LIMIT,
    }


def main() -> None:
    """Measure and print on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"layers": 4, "hidden": 256, "heads": 4, "rows": 8, "pairs": 40}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"num_layers": given.layers, "hidden_size": given.hidden, "num_attention_heads": given.heads}
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    session = MegatronBackend().prepare(
        GPT.of(**sizes, seq_length=SEQUENCE, vocab_size=VOCABULARY, share_embeddings_and_output_weights=True),
        plan=ParallelPlan(dp_shard=ranks),
        device="cpu",
        optimizer=OptimizerSettings(lr=LEARNING_RATE),
    )
    with session:
        figures = measure(session, HandWrittenLoop(session, sizes), given.rows, given.pairs)
    if session.is_logging_rank:
        print(json.dumps({"benchmark": "session_overhead", "ranks": ranks, **vars(given), **figures}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
