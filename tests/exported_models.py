"""Models that are trained on real ranks, saved, and kept to compare an exported file with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from mixle.utils.parallel.training_contracts import ParallelPlan
from plan_matrix import DENSE, MIXTURE, batch, world_size
from small_gpts import LLAMA, OPTIMIZERS, VOCABULARY

from mixle_megatron.checkpoint.manifest import MANIFEST
from mixle_megatron.checkpoint.portable_names import portable_name
from mixle_megatron.config.model import ModelSection

Tensors = dict[str, torch.Tensor]

SHARED = {
    "gated_linear_unit": True,
    "activation_func": "silu",
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_aux_loss_coeff": 0.0,
    "moe_shared_expert_intermediate_size": 16,
    "moe_layer_freq": [0, 1, 1, 1],
}
LATENT = {
    "multi_latent_attention": True,
    "position_embedding_type": "rope",
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "qk_layernorm": True,
    "add_bias_linear": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "untied": DENSE | {"share_embeddings_and_output_weights": False},
    "llama": DENSE | LLAMA,
    "mixture": MIXTURE,
    "shared": MIXTURE | SHARED,
    "predictions": MIXTURE | {"mtp_num_layers": 1, "share_embeddings_and_output_weights": False},
    "latent": DENSE | LATENT,
}
VIRTUAL = {"virtual_pipeline_model_parallel_size": 2}


def opened(model: dict[str, Any], plan: dict[str, int], split: dict[str, Any], precision: str) -> Any:
    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.models.gpt import GPT
    from mixle_megatron.pipeline_split import PipelineSplit

    return MegatronBackend().prepare(
        GPT(ModelSection(**model), seed=7),
        plan=ParallelPlan(**({"microbatches": 2} | plan)),
        optimizer=OPTIMIZERS["adam"],
        precision=precision,
        device="cpu",
        pipeline=PipelineSplit(**split),
    )


def train_and_save(
    model: dict[str, Any], plan: dict[str, int], split: dict[str, Any], precision: str, path: str
) -> Tensors:
    """Two updates; then this rank's experts and all other tensors, gathered whole from the ranks."""
    from mixle_megatron.models.naming import logical_name
    from mixle_megatron.models.whole_parameters import whole_parameters

    with opened(model, plan, split, precision) as session:
        for update in range(2):
            inputs, targets = batch(model["seq_length"], update)
            session.train_batch(inputs, targets)
        session.save_checkpoint(path)
        tensors = {portable_name(name): whole.clone() for name, whole in whole_parameters(session.stage)}
        for chunk in session.stage.chunks:
            for name, buffer in chunk.named_buffers():
                if name.endswith("expert_bias"):
                    tensors[logical_name(chunk, name)] = buffer.clone()
    for name in tensors:
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            tensors[name] = tensors[name][:VOCABULARY]
    return tensors


def saved(
    run_on: Any,
    path: Path,
    model: str,
    plan: dict[str, int],
    split: dict[str, Any] | None = None,
    precision: str = "fp32",
) -> Tensors:
    """Train and save under a plan; the whole tensors that its ranks had."""
    ranks = run_on(world_size(plan), train_and_save, MODELS[model], plan, split or {}, precision, str(path))
    return {name: tensor for own in ranks for name, tensor in own.items()}


def config_file(folder: Path, model: str) -> Path:
    """A config of that model."""
    path = folder / f"{model}.yaml"
    values = {
        "run": {"name": model, "steps": 2},
        "model": MODELS[model],
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "optimizer": {"name": "adam", "lr": 1e-3},
        "data": {"source": "text", "paths": ["stdlib"], "tokenizer": "byte"},
    }
    path.write_text(yaml.safe_dump(values))
    return path


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)


def saved_padded(run_on: Any, path: Path) -> Tensors:
    """A checkpoint of mixle's kind of model, in bf16, and what its ranks held.

    Its 257 tokens are padded to 258, and like one that Megatron-Core alone wrote it has no manifest.
    """
    held = saved(run_on, path, "dense", {"tp": 2}, precision="bf16")
    (path / MANIFEST).unlink()
    return held
