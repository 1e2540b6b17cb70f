"""mixle's own ``CausalLM`` as Megatron's GPTModel, and back into the very same module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from mixle_megatron.config.model import ModelSection
from mixle_megatron.config.schema import dimensions_of
from mixle_megatron.errors import Fault
from mixle_megatron.models.causal_lm_names import LOGIT_FACTOR, from_megatron, is_qkv, mixle_name, to_megatron
from mixle_megatron.models.gpt import GPT, build_gpt_stage
from mixle_megatron.models.initialisation import shard
from mixle_megatron.models.naming import logical_name
from mixle_megatron.models.placement import PlacedParameter
from mixle_megatron.models.provider import SessionTerms
from mixle_megatron.models.whole_parameters import whole_parameters
from mixle_megatron.process_groups import MegatronGroups
from mixle_megatron.rules.dimensions import ModelDimensions
from mixle_megatron.stage import Stage
from mixle_megatron.translate import Host


@dataclass(frozen=True)
class WrappedCausalLM:
    """A ``mixle.models.transformer.CausalLM`` that a session trains.

    The module itself stays as it is while the session is open. When the session is closed it gets the
    trained parameters, on every rank and in the dtype that it had.

    Attributes:
        module: mixle's module; its shared embedding and its buffers are left as they are.
    """

    module: torch.nn.Module

    takes_attention_mask = True
    """As :class:`GPT` does."""

    def dimensions(self, tp: int) -> ModelDimensions:
        """The model's sizes, its vocabulary padded for ``tp``."""
        return dimensions_of(self._section(), tp)

    def faults(self, terms: SessionTerms) -> list[Fault]:
        """What Megatron cannot represent of the module."""
        scales = {bool(block.attn.mup_attention) for block in self.module.blocks}
        faults = []
        if len(scales) > 1:
            rule = "differs between blocks, and Megatron scales the attention of all layers alike"
            faults.append(
                Fault("module.blocks.*.attn.mup_attention", sorted(scales), rule, "use one for all")
            )
        policy = self.module.gradient_checkpointing
        if not isinstance(policy, bool) and len(policy) != len(self.module.blocks):
            rule = f"has not one entry for each of the {len(self.module.blocks)} blocks"
            faults.append(Fault("module.gradient_checkpointing", list(policy), rule, "use one bool"))
        return faults

    def transformer_fields(self) -> Mapping[str, Any]:
        """Fields of TransformerConfig: LayerNorm, biases everywhere, exact GELU, learned positions."""
        fields = dict(GPT(self._section()).transformer_fields())
        if self.module.blocks[0].attn.mup_attention:
            # muP attention (Tensor Programs V, table 3): 1/head_dim and not its square root
            fields["softmax_scale"] = 1.0 / fields["kv_channels"]
        return fields

    def build_stage(self, config: Any, groups: MegatronGroups, host: Host) -> torch.nn.Module:
        """This rank's stage with the module's parameters, one whole parameter at a time."""
        sizes = self.dimensions(config.tensor_model_parallel_size)
        stage = build_gpt_stage(config, self._section(), sizes, groups, host)
        _multiply_logits(stage, self.module.mup_output_multiplier)
        _checkpoint_layers(stage, self.module.gradient_checkpointing)
        own: dict[str, list[tuple[str, torch.nn.Parameter]]] = {}
        for name, parameter in stage.named_parameters():
            logical = logical_name(stage, name)
            own.setdefault(mixle_name(logical), []).append((logical, parameter))
        with torch.no_grad():
            for name, whole in _of_first_rank(self.module, host.device):
                for logical, parameter in own.get(name, ()):
                    parameter.copy_(shard(to_megatron(logical, whole, sizes), parameter, groups))
        return stage

    def description(self) -> Mapping[str, Any]:
        """The ``model`` section of a config for it, and what muP adds that no config can say."""
        described = self._section().model_dump(mode="json")
        described[LOGIT_FACTOR] = float(self.module.mup_output_multiplier)
        scale = self.transformer_fields().get("softmax_scale")
        return described if scale is None else described | {"softmax_scale": scale}

    def in_callers_terms(self, placed: PlacedParameter) -> PlacedParameter:
        """The parameter as mixle's module has it: by its name there, and by its order of rows."""
        names = ("tok.weight", "head.weight") if placed.names else ()
        stride = 3 if is_qkv(placed.name) else placed.tensor_stride
        return replace(placed, name=mixle_name(placed.name), names=names, tensor_stride=stride)

    def give_back(self, stage: Stage) -> torch.nn.Module:
        """Put the trained parameters into mixle's module; collective, one whole parameter at a time."""
        sizes = self.dimensions(stage.config.tensor_model_parallel_size)
        theirs = dict(self.module.named_parameters())
        with torch.no_grad():
            for logical, whole in whole_parameters(stage):
                parameter = theirs[mixle_name(logical)]
                parameter.copy_(from_megatron(logical, whole, sizes))
        return self.module

    def untouched(self, stage: Stage) -> torch.nn.Module:
        """mixle's module as it was at ``prepare``."""
        return self.module

    def _section(self) -> ModelSection:
        module = self.module
        return ModelSection(
            num_layers=module.n_layer,
            hidden_size=module.d_model,
            num_attention_heads=module.n_head,
            seq_length=module.block,
            vocab_size=module.vocab,
            layernorm_epsilon=module.ln.eps,
        )


def is_causal_lm(module: Any) -> bool:
    """Whether the module is mixle's own language model, whose structure the name map knows."""
    from mixle.models.transformer import CausalLM

    return type(module) is CausalLM


def _of_first_rank(module: torch.nn.Module, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that global rank 0's module has, one at a time, on every rank.

    A module that is built on each rank need not be the same on all of them; torch's own wrappers
    take rank 0's too.
    """
    for name, parameter in module.named_parameters():
        whole = parameter.detach().to(device, copy=True)
        if dist.get_world_size() > 1:
            dist.broadcast(whole, src=0)
        yield name, whole


def _multiply_logits(stage: torch.nn.Module, multiplier: torch.Tensor) -> None:
    """muP's readout: logits times width_base / width, before the padding of the vocabulary is masked."""
    factor = float(multiplier)
    if factor == 1.0 or not hasattr(stage, "output_layer"):
        return

    def multiply(_layer: torch.nn.Module, _inputs: Any, output: tuple[torch.Tensor, Any]) -> Any:
        logits, bias = output
        return logits * factor, bias

    stage.output_layer.register_forward_hook(multiply, prepend=True)


def _checkpoint_layers(stage: torch.nn.Module, policy: Any) -> None:
    """Recompute the activations of the chosen layers in the backward pass, as mixle's policy says."""
    for layer in stage.decoder.layers:
        number = layer.layer_number - 1
        if policy if isinstance(policy, bool) else policy[number]:
            layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Any) -> Any:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed
