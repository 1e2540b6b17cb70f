"""Multi-latent attention without Transformer Engine, right under tensor parallelism too."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch.nn.functional import linear


class TorchLatentAttention(MLASelfAttention):
    """Megatron's MLA with its two down-projections whole on every tensor-parallel rank.

    Megatron's local layers cut them by columns and gather what they give. The positional part of the
    keys is then used by each rank's own heads, and the backward pass of that gather adds nothing up:
    the gradient of the projection misses the other ranks' heads. Transformer Engine's layers hold the
    projections whole, as here, and Megatron's code for that case is right.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config, hidden = self.config, self.config.hidden_size
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, hidden, config.q_lora_rank)
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config, hidden, width)


class WholeLinear(MegatronModule):
    """A linear layer without bias that every tensor-parallel rank holds and applies to its own tokens."""

    def __init__(self, config: Any, input_size: int, output_size: int) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(
            torch.empty(
                output_size, input_size, dtype=config.params_dtype, device=torch.cuda.current_device()
            )
        )
        config.init_method(self.weight)
        # Each rank sees its part of the sequence, so finalize_model_grads has to add the gradients up.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        """``[tokens, batch, input_size]`` to ``[tokens, batch, output_size]``, and no bias."""
        return linear(hidden_states, self.weight), None
