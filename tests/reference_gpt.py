"""A GPT, its optimizers and its loss written out in torch float64, with no Megatron in it.

Weights are a plain dictionary by logical name, in Megatron's shapes: query, key and value are one
matrix of rows, for each query group its query heads, then its key, then its value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, gelu, linear, silu

Weights = dict[str, Tensor]

EMBEDDING = "embedding.word_embeddings.weight"
ACTIVATIONS = {"gelu": gelu, "silu": silu}


def layer_norm(x: Tensor, weights: Weights, name: str, model: Any) -> Tensor:
    """LayerNorm or RMSNorm over the last dimension."""
    weight = weights[f"{name}.weight"]
    if model.normalization == "RMSNorm":
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.layernorm_epsilon) * weight
    centred = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + model.layernorm_epsilon)
    return centred * scale * weight + weights[f"{name}.bias"]


def project(x: Tensor, weights: Weights, name: str) -> Tensor:
    """A linear layer, with its bias if it has one."""
    return linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def rotate(x: Tensor, model: Any) -> Tensor:
    """Rotary positions on ``[batch, heads, sequence, channels]``: halves, not neighbours, are pairs."""
    sequence, turned = x.shape[2], int(x.shape[3] * model.rotary_percent)
    frequencies = model.rotary_base ** (-torch.arange(0, turned, 2, dtype=torch.float64) / turned)
    angles = torch.outer(torch.arange(sequence, dtype=torch.float64), frequencies)
    first, second, rest = x.split([turned // 2, turned // 2, x.shape[3] - turned], dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def attention(x: Tensor, weights: Weights, name: str, model: Any) -> Tensor:
    """Causal attention with grouped queries, its softmax written out."""
    batch, sequence, _ = x.shape
    heads = model.num_attention_heads
    groups = model.num_query_groups or heads
    channels = model.kv_channels or model.hidden_size // heads
    mixed = project(x, weights, f"{name}.linear_qkv").view(batch, sequence, groups, -1, channels)
    query, key, value = mixed.split([heads // groups, 1, 1], dim=3)
    if model.qk_layernorm:
        query = layer_norm(query, weights, f"{name}.q_layernorm", model)
        key = layer_norm(key, weights, f"{name}.k_layernorm", model)
    query, key, value = (
        part.expand(-1, -1, -1, heads // groups, -1).flatten(2, 3).transpose(1, 2)
        for part in (query, key, value)
    )
    if model.position_embedding_type == "rope":
        query, key = rotate(query, model), rotate(key, model)
    scores = query @ key.transpose(-1, -2) / math.sqrt(channels)
    future = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
    mixture = scores.masked_fill(future, -math.inf).softmax(-1) @ value
    return project(mixture.transpose(1, 2).flatten(2), weights, f"{name}.linear_proj")


def feed_forward(x: Tensor, weights: Weights, name: str, model: Any) -> Tensor:
    """The two matrices of a layer; a gated one computes the gate in its first half."""
    activation = ACTIVATIONS[model.activation_func]
    wide = project(x, weights, f"{name}.linear_fc1")
    if model.gated_linear_unit:
        gate, value = wide.chunk(2, dim=-1)
        return project(activation(gate) * value, weights, f"{name}.linear_fc2")
    return project(activation(wide), weights, f"{name}.linear_fc2")


def logits(tokens: Tensor, weights: Weights, model: Any) -> Tensor:
    """Scores of every next token, ``[batch, sequence, vocabulary]``."""
    x = embedding(tokens, weights[EMBEDDING])
    if model.position_embedding_type == "learned_absolute":
        x = x + weights["embedding.position_embeddings.weight"][: tokens.shape[1]]
    for index in range(model.num_layers):
        layer = f"decoder.layers.{index}"
        normed = layer_norm(x, weights, f"{layer}.input_layernorm", model)
        x = x + attention(normed, weights, f"{layer}.self_attention", model)
        normed = layer_norm(x, weights, f"{layer}.pre_mlp_layernorm", model)
        x = x + feed_forward(normed, weights, f"{layer}.mlp", model)
    x = layer_norm(x, weights, "decoder.final_layernorm", model)
    return linear(x, weights.get("output_layer.weight", weights[EMBEDDING]))


def mean_loss(tokens: Tensor, targets: Tensor, weights: Weights, model: Any) -> Tensor:
    """Mean cross entropy over the targets that are not -100."""
    return cross_entropy(logits(tokens, weights, model).flatten(0, 1), targets.flatten(), ignore_index=-100)


@dataclass
class Adam:
    """Adam with L2 or decoupled decay, as in the papers, with torch's placing of epsilon."""

    settings: Any

    def __post_init__(self) -> None:
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.count = 0

    def update(self, weights: Weights, gradients: Weights, lr: float) -> None:
        """One step, in place."""
        chosen = self.settings
        beta1, beta2 = chosen.adam_beta1, chosen.adam_beta2
        self.count += 1
        for name, weight in weights.items():
            decay, gradient = decay_of(weight, chosen), gradients[name]
            if chosen.decoupled_weight_decay:
                weight -= lr * decay * weight
            else:
                gradient = gradient + decay * weight
            first, second = self.moments.get(name, (torch.zeros_like(weight), torch.zeros_like(weight)))
            first = beta1 * first + (1 - beta1) * gradient
            second = beta2 * second + (1 - beta2) * gradient**2
            self.moments[name] = first, second
            denominator = (second / (1 - beta2**self.count)).sqrt() + chosen.adam_eps
            weight -= lr * first / (1 - beta1**self.count) / denominator


@dataclass
class Sgd:
    """Gradient descent with momentum; the first step's momentum is the gradient itself."""

    settings: Any

    def __post_init__(self) -> None:
        self.momentum: Weights = {}

    def update(self, weights: Weights, gradients: Weights, lr: float) -> None:
        """One step, in place."""
        for name, weight in weights.items():
            gradient = gradients[name] + decay_of(weight, self.settings) * weight
            self.momentum[name] = self.settings.sgd_momentum * self.momentum.get(name, 0.0) + gradient
            weight -= lr * self.momentum[name]


def decay_of(weight: Tensor, settings: Any) -> float:
    """Weight decay of a parameter: matrices only, no norms and no biases."""
    return settings.weight_decay if weight.dim() > 1 else 0.0


def learning_rate(update: int, settings: Any) -> float:
    """Of update number ``update``, from 0: a linear warm-up from ``init_lr``, then cosine or constant."""
    warmup, last = settings.warmup_steps, settings.decay_steps
    if warmup and update <= warmup:
        return settings.init_lr + (settings.lr - settings.init_lr) * update / warmup
    if settings.schedule == "constant":
        return settings.lr
    part = (update - warmup) / (last - warmup)
    return settings.min_lr + (settings.lr - settings.min_lr) * (math.cos(math.pi * part) + 1) / 2


def train(
    weights: Weights, model: Any, settings: Any, batches: Iterable[tuple[Tensor, Tensor]]
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each update; ``weights`` are those before the first one."""
    weights = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    optimizer = {"adam": Adam, "sgd": Sgd}[settings.name](settings)
    curve = []
    for update, (tokens, targets) in enumerate(batches):
        loss = mean_loss(tokens, targets, weights, model)
        found = torch.autograd.grad(loss, list(weights.values()))
        norm = torch.stack([gradient.norm() for gradient in found]).norm()
        clip = min(1.0, settings.clip_grad / (norm.item() + 1e-6)) if settings.clip_grad else 1.0
        gradients = {name: gradient * clip for name, gradient in zip(weights, found, strict=True)}
        with torch.no_grad():
            optimizer.update(weights, gradients, learning_rate(update, settings))
        curve.append((loss.item(), norm.item()))
    return curve
