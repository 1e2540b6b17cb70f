"""Where the numbers of a session live: initial weights in shards, optimizer state over dp_shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_gpts import VOCABULARY, session, train_update, whole_weights

Shards = dict[str, tuple[torch.Tensor, int | None, int]]


def initial_shards(variant: str, precision: str, sizes: dict[str, int]) -> tuple[int, Shards]:
    """This rank's tp index; and each parameter with the dimension and stride that it is cut along."""
    from mixle_megatron.models.naming import logical_name

    with session(variant, precision=precision, **sizes) as opened:
        shards = {}
        for name, parameter in opened.module.named_parameters():
            cut = getattr(parameter, "tensor_model_parallel", False)
            dim, stride = (parameter.partition_dim, parameter.partition_stride) if cut else (None, 1)
            shards[logical_name(opened.module, name)] = (parameter.detach().clone(), dim, stride)
        return opened.coordinate["tp"], shards


def whole(parts: list[tuple[torch.Tensor, int | None, int]], name: str) -> torch.Tensor:
    """The parameter that tensor-parallel ranks hold ``parts`` of, without rows of padding."""
    tensor, dim, stride = parts[0]
    if dim is not None:
        strips = [part.chunk(stride, dim) for part, _, _ in parts]
        tensor = torch.cat([rank[strip] for strip in range(stride) for rank in strips], dim)
    vocabulary = name.endswith(("word_embeddings.weight", "output_layer.weight"))
    return tensor[:VOCABULARY] if vocabulary else tensor


def initial_weights(variant: str, precision: str) -> dict[str, torch.Tensor]:
    """All parameters, from one rank."""
    with session(variant, precision=precision) as opened:
        return whole_weights(opened)


@pytest.mark.parametrize(
    ("variant", "sizes", "precision"),
    [
        ("gpt2", {"tp": 2, "pp": 2}, "fp32"),
        ("llama", {"tp": 2, "dp_shard": 2}, "fp32"),
        ("llama", {"pp": 2, "dp_replicate": 2}, "fp32"),
        ("qk_norm", {"tp": 2, "pp": 2}, "bf16"),
    ],
    ids=str,
)
def test_one_seed_is_one_model_to_the_last_bit(
    run_on, variant: str, sizes: dict[str, int], precision: str
) -> None:
    (expected,) = run_on(1, initial_weights, variant, precision)
    found: dict[str, dict[int, Any]] = {}
    for tp, shards in run_on(4, initial_shards, variant, precision, sizes):
        for name, shard in shards.items():
            copy = found.setdefault(name, {}).setdefault(tp, shard)
            assert torch.equal(copy[0], shard[0]), f"copies of {name} differ"
    assert found.keys() == expected.keys()
    for name, by_tp in found.items():
        assert len(by_tp) == sizes.get("tp", 1)
        assert torch.equal(whole([by_tp[tp] for tp in sorted(by_tp)], name), expected[name]), name


def seeds_differ() -> bool:
    """Whether two seeds give two models."""
    with session(seed=1) as opened:
        first = whole_weights(opened)
    with session(seed=2) as opened:
        second = whole_weights(opened)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    return not torch.equal(first[name], second[name])


def test_another_seed_is_another_model(run_on) -> None:
    assert run_on(1, seeds_differ) == [True]


def optimizer_elements(optimizer: str, precision: str, sizes: dict[str, int]) -> int:
    """Numbers that this rank's optimizer keeps: its moments, and in bf16 the fp32 main parameters."""
    with session(optimizer=optimizer, precision=precision, **sizes) as opened:
        train_update(opened, 0)
        total = 0
        for part in opened.optimizer.chained_optimizers:
            for state in part.optimizer.state.values():
                total += sum(value.numel() for key, value in state.items() if key != "step")
            if precision != "fp32":
                total += sum(
                    main.numel() for group in part.optimizer.param_groups for main in group["params"]
                )
        return total


@pytest.mark.parametrize(
    ("optimizer", "precision", "kept"), [("adam", "fp32", 2), ("adam", "bf16", 3), ("sgd", "bf16", 2)]
)
def test_optimizer_state_is_sharded_over_dp_shard_alone(
    run_on, optimizer: str, precision: str, kept: int
) -> None:
    def per_rank(ranks: int, **sizes: int) -> list[int]:
        return run_on(ranks, optimizer_elements, optimizer, precision, sizes)

    (whole_state,) = per_rank(1)
    (weights,) = run_on(1, initial_weights, "gpt2", precision)
    assert whole_state == kept * sum(weight.numel() for weight in weights.values())
    assert per_rank(2, dp_replicate=2) == [whole_state] * 2
    for sharded in (per_rank(2, dp_shard=2), per_rank(4, dp_shard=2, dp_replicate=2)):
        assert sharded == pytest.approx([whole_state / 2] * len(sharded), rel=0.05)
        assert sum(sharded[:2]) == whole_state
