"""fp16's loss scale: losses are multiplied by it, so that small gradients are not lost in 16 bits.

Megatron's optimizer owns the scale. It divides the gradients by it before anything else reads them, skips
an update whose gradients overflowed on any rank, and then lowers it; its schedules multiply the loss.
"""

from __future__ import annotations

from mixle_megatron.stage import Stage


def scale_losses(stage: Stage, precision: str) -> None:
    """Let the schedules of a stage multiply each loss by its optimizer's scale, where there is one."""
    stage.config.grad_scale_func = stage.optimizer.scale_loss if precision == "fp16" else None
