"""A provider that builds something else than GPTModel: Megatron's HybridModel, from a pattern of layers.

Train it for some steps, on one rank or split over several:

    python examples/hybrid_provider.py
    torchrun --nproc-per-node 2 examples/hybrid_provider.py --tp 2
    torchrun --nproc-per-node 2 examples/hybrid_provider.py --pp 2 --steps 5
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

import mixle_megatron
from mixle_megatron.layers.norm import TorchNorm
from mixle_megatron.models.decoder_spec import torch_layer_spec
from mixle_megatron.models.initialisation import Initialisation, initialise
from mixle_megatron.models.provider import ModelProvider, SessionTerms
from mixle_megatron.models.vocabulary import exclude_padding_from_softmax
from mixle_megatron.process_groups import MegatronGroups
from mixle_megatron.rules import ModelDimensions, padded_vocab_size
from mixle_megatron.translate import Host

if importlib.util.find_spec("megatron.core.models.hybrid"):
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    SPEC, PATTERN, BETWEEN_STAGES = "hybrid_stack_spec", "hybrid_layer_pattern", "|"
else:  # Megatron-Core 0.16 names the same classes after Mamba, and cuts the pattern by itself
    from megatron.core.models.mamba import MambaModel as HybridModel
    from megatron.core.ssm.mamba_block import MambaStack as HybridStack
    from megatron.core.ssm.mamba_block import MambaStackSubmodules as HybridStackSubmodules

    SPEC, PATTERN, BETWEEN_STAGES = "mamba_stack_spec", "hybrid_override_pattern", ""

ATTENTION, FEED_FORWARD = "*", "-"


@dataclass(frozen=True)
class Hybrid(ModelProvider):
    """A HybridModel of attention and feed-forward layers (a ``mixle_megatron`` ModelProvider).

    Attributes:
        pattern: one character for each layer: ``*`` attention, ``-`` feed-forward.
        hidden_size: width of the residual stream.
        num_attention_heads: heads of each attention layer.
        seq_length: the longest sequence.
        vocab_size: token ids.
        seed: what the initial weights are drawn from, the same under every plan.
    """

    pattern: str
    hidden_size: int = 64
    num_attention_heads: int = 4
    seq_length: int = 32
    vocab_size: int = 257
    seed: int = 1234

    def dimensions(self, tp: int) -> ModelDimensions:
        """What the rules about plans and batches are applied to."""
        return ModelDimensions(
            num_layers=len(self.pattern),
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_attention_heads,
            kv_channels=self.hidden_size // self.num_attention_heads,
            ffn_hidden_size=4 * self.hidden_size,
            seq_length=self.seq_length,
            vocab_size=self.vocab_size,
            padded_vocab_size=padded_vocab_size(self.vocab_size, tp),
            max_position_embeddings=self.seq_length,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )

    def faults(self, terms: SessionTerms) -> list[mixle_megatron.Fault]:
        """Layers that this example does not build."""
        if self.pattern and set(self.pattern) <= {ATTENTION, FEED_FORWARD}:
            return []
        rule = f"is not a pattern of {ATTENTION} (attention) and {FEED_FORWARD} (feed-forward)"
        return [mixle_megatron.Fault("pattern", self.pattern, rule, "use *-*- or the like")]

    def transformer_fields(self) -> Mapping[str, Any]:
        """Megatron's fields of the model; those of the plan and the precision are added to them."""
        return {
            "num_layers": len(self.pattern),
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }

    def build_stage(self, config: Any, groups: MegatronGroups, host: Host) -> torch.nn.Module:
        """This rank's layers, with the embedding on the first stage and the output on the last."""
        if groups.chunks > 1:
            rule = "is more than the one chunk of layers that this example builds on a stage"
            raise mixle_megatron.Unsupported([mixle_megatron.Fault("pipeline.chunks", groups.chunks, rule)])
        sizes = self.dimensions(config.tensor_model_parallel_size)
        layers = len(self.pattern) // config.pipeline_model_parallel_size
        stages = [self.pattern[start : start + layers] for start in range(0, len(self.pattern), layers)]
        stage = HybridModel(
            config=config,
            vocab_size=sizes.padded_vocab_size,
            max_sequence_length=self.seq_length,
            pre_process=groups.is_first_stage,
            post_process=groups.is_last_stage,
            position_embedding_type="rope",
            pg_collection=groups.collection,
            **{SPEC: torch_stack_spec(config), PATTERN: BETWEEN_STAGES.join(stages)},
        )
        if groups.is_last_stage:
            add_final_norm(stage.decoder, config)
        exclude_padding_from_softmax(stage, sizes.vocab_size, groups)
        # A layer of this model adds to the residual stream once, and one of GPTModel twice.
        drawn = Initialisation(self.seed, config.init_method_std, num_layers=max(1, len(self.pattern) // 2))
        initialise(stage, drawn, sizes, groups)
        return stage


def torch_stack_spec(config: Any) -> ModuleSpec:
    """The two kinds of layer: each is a half of a GPT layer, with the other half left out.

    These run on every host. Where Transformer Engine is, Megatron's own ``hybrid_stack_spec`` is faster.
    """
    whole = torch_layer_spec(config)
    attention = replace(
        whole.submodules, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp
    )
    feed_forward = replace(
        whole.submodules, input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp
    )
    layers = HybridStackSubmodules(
        attention_layer=ModuleSpec(module=whole.module, submodules=attention),
        mlp_layer=ModuleSpec(module=whole.module, submodules=feed_forward),
    )
    return ModuleSpec(module=HybridStack, submodules=layers, params={"post_layer_norm": False})


def add_final_norm(stack: torch.nn.Module, config: Any) -> None:
    """The last norm, which HybridStack itself builds from Transformer Engine alone."""
    stack.final_norm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)
    stack.post_layer_norm = True


def main(arguments: list[str] | None = None) -> list[float]:
    """Train on sequences that count upwards; return the loss of each step."""
    from mixle.utils.parallel import ParallelPlan

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pattern", default="*-*-", help="* attention, - feed-forward")
    parser.add_argument("--steps", type=int, default=20)
    for axis in ("dp_shard", "tp", "cp", "pp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    chosen = parser.parse_args(arguments)

    plan = ParallelPlan(dp_shard=chosen.dp_shard, tp=chosen.tp, cp=chosen.cp, pp=chosen.pp)
    settings = mixle_megatron.OptimizerSettings(name="adam", lr=1e-3)
    model = Hybrid(chosen.pattern)
    losses = []
    with mixle_megatron.MegatronBackend().prepare(model, plan=plan, optimizer=settings) as session:
        tokens = (torch.arange(8)[:, None] * 7 + torch.arange(model.seq_length + 1)) % model.vocab_size
        own = tokens.chunk(session.data_parallel_size)[session.data_parallel_rank]
        for _ in range(chosen.steps):
            receipt = session.train_batch(own[:, :-1], own[:, 1:])
            losses.append(receipt.loss)
            if session.is_logging_rank:
                print(f"step {receipt.step}  loss {receipt.loss:.4f}")
    return losses


if __name__ == "__main__":
    main()
