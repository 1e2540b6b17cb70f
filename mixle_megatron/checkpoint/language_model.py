"""mixle's own language model (``mixle.models.language_model.LM``) as a file, and what fits into it.

``LM.save`` writes plain numbers and a state of tensors with ``torch.save``.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch

from mixle_megatron.config.model import ModelSection
from mixle_megatron.config.schema import dimensions_of
from mixle_megatron.errors import Fault
from mixle_megatron.models.causal_lm_names import LOGIT_FACTOR, from_megatron, mixle_name

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_MODULES_OF_A_LAYER = (
    *("input_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj"),
    *("pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2"),
)
_OUTSIDE_LAYERS = (
    *("embedding.word_embeddings.weight", "embedding.position_embeddings.weight"),
    *("decoder.final_layernorm.weight", "decoder.final_layernorm.bias"),
)
_LOGICAL = {mixle_name(logical): logical for logical in _OUTSIDE_LAYERS}
_LOGICAL_IN_LAYER = {
    mixle_name(f"decoder.layers.0.{module}.{kind}").removeprefix("blocks.0."): f"{module}.{kind}"
    for module in _MODULES_OF_A_LAYER
    for kind in ("weight", "bias")
}

_REQUIRED: dict[str, Any] = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "layernorm_epsilon": 1e-5,
    "activation_func": "gelu",
    "gated_linear_unit": False,
    "add_bias_linear": True,
    "qk_layernorm": False,
    "share_embeddings_and_output_weights": True,
    "num_moe_experts": None,
    "multi_latent_attention": False,
    "mtp_num_layers": None,
}
"""What mixle's CausalLM is, by the names of the ``model`` section."""


def language_model_faults(model: ModelSection) -> list[Fault]:
    """Each way in which a model is not one that mixle's CausalLM can be; dropout only matters in training."""
    sizes = dimensions_of(model)
    wide = sizes.hidden_size
    required = _REQUIRED | {
        "num_query_groups": sizes.num_attention_heads,
        "ffn_hidden_size": 4 * wide,
        "kv_channels": wide // sizes.num_attention_heads,
    }
    return [
        Fault(f"model.{name}", _shown(given), f"is not {_shown(wanted)}, as in mixle's CausalLM")
        for name, wanted in required.items()
        if (given := getattr(sizes, name, getattr(model, name))) != wanted
    ]


def _shown(value: Any) -> str:
    return {None: "none", True: "true", False: "false"}.get(value, str(value))


def logical_name_of(name: str) -> str:
    """The logical name in GPTModel of what mixle's module calls ``name``; unknown names stay as they are."""
    match = _BLOCK.fullmatch(name)
    if match is None:
        return _LOGICAL.get(name, name)
    inner = _LOGICAL_IN_LAYER.get(match[2])
    return name if inner is None else f"decoder.layers.{int(match[1])}.{inner}"


def logical_shapes(model: ModelSection) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of mixle's CausalLM of these sizes, by logical name."""
    from mixle.models.transformer import build_causal_lm

    with torch.device("meta"):
        module = build_causal_lm(**_sizes(model))
    return {logical_name_of(name): tuple(value.shape) for name, value in module.named_parameters()}


def _sizes(model: ModelSection) -> dict[str, int]:
    """The arguments that mixle builds a CausalLM from."""
    return {
        "vocab": model.vocab_size,
        "d_model": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "block": model.max_position_embeddings or model.seq_length,
    }


def write_language_model(
    path: Path,
    model: ModelSection,
    dtype: torch.dtype,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    logit_factor: float,
) -> None:
    """Write what ``LM.load`` reads.

    torch writes a file of tensors that are all there at once. Here they are on disk meanwhile, mapped
    from files beside ``path``, so that the process's own memory holds one at a time.

    Args:
        path: the file to write.
        model: the sizes of the model, which :func:`language_model_faults` finds nothing against.
        dtype: of the parameters in the file.
        tensors: logical names and whole tensors of a GPTModel, all of them, in any order.
        logit_factor: muP's output multiplier.
    """
    sizes = dimensions_of(model)
    with tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as scratch:
        state = {
            mixle_name(logical): _on_disk(Path(scratch) / str(number), shape, dtype)
            for number, (logical, shape) in enumerate(logical_shapes(model).items())
        }
        for logical, whole in tensors:
            state[mixle_name(logical)].copy_(from_megatron(logical, whole, sizes))
        state["head.weight"] = state["tok.weight"]
        state[LOGIT_FACTOR] = torch.tensor(logit_factor)
        torch.save({**_sizes(model), "device": "cpu", "state_dict": state}, path)


def _on_disk(file: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose memory is a file, which need not stay in memory.

    Its room is taken at once: on a full disk a write to mapped memory would end the process.
    """
    with file.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, prod(shape) * dtype.itemsize)
    return torch.from_file(str(file), shared=True, size=prod(shape), dtype=dtype).view(shape)
