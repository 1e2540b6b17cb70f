"""What stands in for Megatron's code on a CPU to save time computes what that code computes."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import layers, vocab_parallel_cross_entropy
from torch.testing import assert_close

from mixle_megatron.host import cpu_runtime, shorter_exchanges, shorter_paths


def gradients(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The result of the tensors' values, and the gradient of a weighted sum of it for each of them."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    result = function(*leaves)
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape)
    (result * weights).sum().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def linears() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A linear layer by Megatron's own function and by its stand-in, in float64."""
    group = dist.group.WORLD
    original = layers.linear_with_grad_accumulation_and_async_allreduce
    shorter = shorter_paths.linear_in_one_call(original)
    torch.manual_seed(0)
    tensors = [torch.randn(*shape, dtype=torch.float64) for shape in ((5, 2, 8), (6, 8), (6,))]

    def through(function: Any) -> list[torch.Tensor]:
        fixed = {"gradient_accumulation_fusion": False, "allreduce_dgrad": False, "sequence_parallel": False}
        return gradients(lambda *leaves: function(*leaves, **fixed, tp_group=group), *tensors)

    with cpu_runtime():
        return through(original), through(shorter)


def test_a_linear_layer_is_megatrons(run_on: Any) -> None:
    [(megatrons, shorter)] = run_on(1, linears)
    for ours, theirs in zip(shorter, megatrons, strict=True):
        assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


def summed_gradients() -> tuple[bool, torch.Tensor, torch.Tensor]:
    """Where the input's gradient is summed over ranks the stand-in leaves the work to Megatron's function."""
    original = layers.linear_with_grad_accumulation_and_async_allreduce
    shorter = shorter_paths.linear_in_one_call(original)
    weight = torch.full((3, 2), float(dist.get_rank() + 1), requires_grad=True)
    data = torch.ones(4, 1, 2, requires_grad=True)
    with cpu_runtime():
        output = shorter(data, weight, None, False, True, False, tp_group=dist.group.WORLD)
        output.sum().backward()
    return type(output.grad_fn).__name__.startswith("LinearWithGrad"), data.grad, output.detach()


def test_what_is_summed_over_ranks_is_left_to_megatron(run_on: Any) -> None:
    for by_megatron, gradient, _output in run_on(2, summed_gradients):
        assert by_megatron
        assert_close(gradient, torch.full((4, 1, 2), 3.0 * (1 + 2)))


def losses(dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Token losses by Megatron's function and by its stand-in, some logits excluded by minus infinity."""
    torch.manual_seed(1)
    logits, targets = torch.randn(7, 3, 11).to(dtype) * 5, torch.randint(0, 9, (7, 3))
    logits[..., 9:] = float("-inf")
    group = dist.group.WORLD
    shorter = shorter_paths.cross_entropy_in_one_call(vocab_parallel_cross_entropy)
    with cpu_runtime():
        return tuple(
            gradients(lambda leaf, function=function: function(leaf, targets, tp_group=group), logits)
            for function in (vocab_parallel_cross_entropy, shorter)
        )


@pytest.mark.skipif(
    "tp_group" not in inspect.signature(vocab_parallel_cross_entropy).parameters,
    reason="this Megatron does not say whose logits they are, and its own function stays",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_megatrons(run_on: Any, dtype: torch.dtype) -> None:
    [(megatrons, shorter)] = run_on(1, losses, dtype)
    for ours, theirs in zip(shorter, megatrons, strict=True):
        assert ours.dtype == theirs.dtype
        assert_close(ours, theirs, rtol=2e-6, atol=1e-6 if dtype is torch.float32 else 1e-2)


@settings(max_examples=50, deadline=None)
@given(shapes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=6))
def test_the_norm_is_that_of_all_elements(shapes: list[list[int]]) -> None:
    tensors = [torch.randn(shape) * 10.0**index for index, shape in enumerate(shapes)]
    found, per_tensor = shorter_paths.norm_of_all(None)(0, torch.zeros(1), [tensors], False)
    exact = math.sqrt(sum(float((tensor.double() ** 2).sum()) for tensor in tensors))
    assert per_tensor is None
    assert (found.shape, found.dtype) == ((1,), torch.float32)
    assert float(found) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(("most", "expected"), [(math.inf, 3.0), (10.0, 3.0), (1.0, 1.0)])
def test_clipping_is_megatrons(most: float, expected: float) -> None:
    parameter = torch.zeros(9, requires_grad=True)
    parameter.grad = torch.ones(9)
    clip = shorter_paths.clipped_where_finite(clip_grads.clip_grad_by_total_norm_fp32)
    with cpu_runtime():
        clip([parameter], most, float(parameter.grad.norm()))
    assert float(parameter.grad.norm()) == pytest.approx(expected, rel=1e-5)


def exchanges() -> dict[str, Any]:
    """Sums and gathers in a group of this rank alone and in the group of both."""
    rank = dist.get_rank()
    alone = [dist.new_group([each]) for each in range(2)][rank]
    reduce = shorter_exchanges.all_reduce_in_one_round(dist.all_reduce)
    gather = shorter_exchanges.all_gather_unless_alone(dist.all_gather_into_tensor)
    scatter = shorter_exchanges.reduce_scatter_by_parts(dist.reduce_scatter_tensor)
    own, whole, elsewhere, part = (torch.full((2,), rank + 1.0) for _ in range(4))
    reduce(own, group=alone)
    gather(whole, whole, group=alone)
    gather(elsewhere, own, group=alone)
    scatter(part, own, group=alone)
    gathered = torch.zeros(2)
    gather(gathered, torch.full((1,), rank + 1.0), group=dist.group.WORLD)
    found = {"own": own, "whole": whole, "elsewhere": elsewhere, "part": part, "gathered": gathered}
    return {name: tensor.tolist() for name, tensor in found.items()}


def test_a_group_of_one_keeps_what_it_has(run_on: Any) -> None:
    for rank, found in enumerate(run_on(2, exchanges)):
        assert found.pop("gathered") == [1.0, 2.0]
        assert set(map(tuple, found.values())) == {(rank + 1.0, rank + 1.0)}


def both_ways(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What gloo and its stand-ins make of random tensors, of one shape and kind on all ranks."""
    draw, own = random.Random(seed), torch.Generator().manual_seed(seed * 10 + dist.get_rank())
    ranks = dist.get_world_size()
    reduce = shorter_exchanges.all_reduce_in_one_round(dist.all_reduce)
    scatter = shorter_exchanges.reduce_scatter_by_parts(dist.reduce_scatter_tensor)
    pairs = []
    for _ in range(30):
        shape = [
            draw.choice([1, 2, 3, 200]) * ranks,
            *(draw.randint(1, 40) for _ in range(draw.randint(0, 2))),
        ]
        dtype = draw.choice([torch.float32, torch.float64, torch.int64, torch.bfloat16])
        operation = draw.choice([dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN])
        values = (torch.randn(shape, generator=own) * 100).to(dtype)
        gloos, ours = values.clone(), values.clone()
        dist.all_reduce(gloos, op=operation)
        reduce(ours, op=operation)
        pairs.append((gloos, ours))
        gloos, ours = (torch.empty(shape[0] // ranks, *shape[1:], dtype=dtype) for _ in range(2))
        dist.reduce_scatter_tensor(gloos, values.clone())
        scatter(ours, values)
        pairs.append((gloos, ours))
    return pairs


@pytest.mark.parametrize("ranks", [2, 3])
def test_exchanges_are_gloos(run_on: Any, ranks: int) -> None:
    everywhere = run_on(ranks, both_ways, ranks)
    for pairs in everywhere:
        for gloos, ours in pairs:
            rough = gloos.dtype is torch.bfloat16
            assert_close(ours, gloos, rtol=2e-2 if rough else 1e-5, atol=4.0 if rough else 1e-3)
    for reduced in zip(*(pairs[::2] for pairs in everywhere), strict=True):
        assert all(torch.equal(ours, reduced[0][1]) for _gloos, ours in reduced)
