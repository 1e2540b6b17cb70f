"""Attention over a sequence that ranks share is attention over the sequence.

References: an explicit softmax in plain torch, Megatron's own cut of a sequence in zigzag order, and
finite differences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from small_gpts import parallel_plan
from torch.autograd.graph import saved_tensors_hooks

EXACT = 1e-10


@dataclass(frozen=True)
class Case:
    """Inputs of one attention, by the length of a chunk; ``wanted`` are those that ask for a gradient."""

    chunk: int
    batch: int
    groups: int
    queries_per_group: int
    key_dim: int
    value_dim: int
    scale: float | None = None
    wanted: tuple[str, ...] = ("query", "key", "value")
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.groups * self.queries_per_group

    @property
    def softmax_scale(self) -> float:
        return self.scale or 1 / math.sqrt(self.key_dim)

    def inputs(self, ranks: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        """Query, key, value and a gradient of the output, for the whole sequence of 2 * ranks chunks."""
        generator = torch.Generator().manual_seed(self.seed)
        shapes = {
            "query": (self.heads, self.key_dim),
            "key": (self.groups, self.key_dim),
            "value": (self.groups, self.value_dim),
            "gradient": (self.heads * self.value_dim,),
        }
        return {
            name: torch.randn(2 * ranks * self.chunk, self.batch, *shape, generator=generator).to(dtype)
            for name, shape in shapes.items()
        }


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any small attention: grouped queries, values narrower and wider than keys, some inputs frozen."""
    names = ["query", "key", "value"]
    return Case(
        chunk=draw(st.integers(1, 9)),
        batch=draw(st.integers(1, 3)),
        groups=draw(st.integers(1, 3)),
        queries_per_group=draw(st.integers(1, 3)),
        key_dim=draw(st.sampled_from([1, 4, 7])),
        value_dim=draw(st.sampled_from([1, 4, 7])),
        scale=draw(st.none() | st.floats(0.1, 2.0)),
        wanted=tuple(draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))),
        seed=draw(st.integers(0, 2**16)),
    )


SMALL = Case(chunk=4, batch=2, groups=2, queries_per_group=2, key_dim=4, value_dim=4)


@contextmanager
def context_parallel_groups() -> Iterator[Any]:
    """Megatron's groups for a plan in which all running ranks share a sequence."""
    from mixle_megatron.host import cpu_runtime
    from mixle_megatron.process_groups import destroy_groups, make_groups

    with cpu_runtime():
        groups = make_groups(parallel_plan(cp=dist.get_world_size()))
        yield groups.collection
        destroy_groups(groups)


def attention(case: Case, pg_collection: Any, *, cp: int, dropout: float = 0.0, **arguments: Any) -> Any:
    """The layer, built as Megatron builds it."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mixle_megatron.layers.attention import TorchAttention

    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.heads * case.key_dim,
        num_attention_heads=case.heads,
        num_query_groups=case.groups,
        kv_channels=case.key_dim,
        attention_dropout=dropout,
        context_parallel_size=cp,
    )
    return TorchAttention(
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=case.scale,
        pg_collection=pg_collection,
        **arguments,
    )


def explicit_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """``softmax(scale * q k^T + causal) v`` as it is written."""
    repeats = query.shape[2] // key.shape[2]
    key, value = (tensor.repeat_interleave(repeats, dim=2) for tensor in (key, value))
    scores = scale * torch.einsum("ibhd,jbhd->bhij", query, key)
    later = torch.ones(len(query), len(key), dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(later, -math.inf).softmax(-1)
    return torch.einsum("bhij,jbhd->ibhd", probabilities, value).flatten(2)


def share_of(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """This rank's part of ``[sequence, ...]``, cut by Megatron."""
    from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank

    return get_pos_emb_on_this_cp_rank(tensor, 0, group).contiguous() if group.size() > 1 else tensor.clone()


def track(inputs: dict[str, torch.Tensor], wanted: tuple[str, ...]) -> list[torch.Tensor]:
    """Query, key and value, with those that are wanted asking for gradients."""
    return [inputs[name].requires_grad_(name in wanted) for name in ("query", "key", "value")]


def largest_differences(
    cases: list[Case], dtype: torch.dtype = torch.float64, cp_comm_type: str | None = None
) -> list[dict[str, float]]:
    """By how much this rank's output and gradients are off, for each case."""
    with context_parallel_groups() as groups:
        return [largest_difference(case, groups, dtype, cp_comm_type=cp_comm_type) for case in cases]


def largest_difference(case: Case, groups: Any, dtype: torch.dtype, **arguments: Any) -> dict[str, float]:
    """By how much this rank's output is off, the one without gradients, and each gradient, twice."""
    cp = groups.cp.size()
    whole = case.inputs(cp, dtype)
    local = {name: share_of(tensor, groups.cp) for name, tensor in whole.items()}
    layer = attention(case, groups, cp=cp, **arguments)
    output = layer(*track(local, case.wanted))
    inputs = [local[name] for name in case.wanted]
    gradients = torch.autograd.grad(output, inputs, local["gradient"], retain_graph=True)
    again = torch.autograd.grad(output, inputs, local["gradient"])
    with torch.no_grad():
        forward_only = layer.eval()(local["query"], local["key"], local["value"])

    whole = {name: tensor.detach().double() for name, tensor in whole.items()}
    expected = explicit_attention(*track(whole, case.wanted), case.softmax_scale)
    expected_gradients = torch.autograd.grad(
        expected, [whole[name] for name in case.wanted], whole["gradient"]
    )
    pairs = {"output": (output, share_of(expected, groups.cp)), "forward_only": (forward_only, output)}
    for name, *both in zip(case.wanted, gradients, expected_gradients, again, strict=True):
        pairs[name] = (both[0], share_of(both[1], groups.cp))
        pairs[f"{name} again"] = (both[2], both[0])
    assert all(actual.dtype is dtype and actual.shape == other.shape for actual, other in pairs.values())
    return {name: (actual - other).abs().max().item() for name, (actual, other) in pairs.items()}


@pytest.mark.parametrize("cp", [1, 2, 4])
@settings(deadline=None, max_examples=5)
@given(drawn=st.lists(cases(), min_size=4, max_size=4))
def test_output_and_gradients_are_those_of_an_explicit_softmax(run_on, cp: int, drawn: list[Case]) -> None:
    for differences in run_on(cp, largest_differences, drawn):
        for case, found in zip(drawn, differences, strict=True):
            assert max(found.values()) < EXACT, (case, found)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_lower_precisions_run(run_on, dtype: torch.dtype, tolerance: float) -> None:
    for (found,) in run_on(2, largest_differences, [SMALL], dtype):
        assert max(found.values()) < tolerance, found


@pytest.mark.parametrize("cp_comm_type", ["p2p", "all_gather"])
def test_ring_and_gather_give_the_same_result(run_on, cp_comm_type: str) -> None:
    for (found,) in run_on(2, largest_differences, [SMALL], torch.float64, cp_comm_type):
        assert max(found.values()) < EXACT, found


def seed_own_generator(group: Any) -> None:
    """Seed what this rank drops attention with, otherwise than the other ranks."""
    from megatron.core import tensor_parallel

    ranks = {"tp_rank": 0, "ep_rank": 0, "etp_rank": 0}
    tensor_parallel.model_parallel_cuda_manual_seed(11 + group.rank(), **ranks)


DROPOUT = 0.2
WATCHED = Case(chunk=16, batch=2, groups=2, queries_per_group=2, key_dim=3, value_dim=64)


def kept_probabilities() -> dict[str, torch.Tensor]:
    """Which of its attention probabilities this rank keeps: ``[rows, batch, heads, columns]`` of 0 and 1.

    All scores are 0 and value j is the j-th unit vector, so that row i of the output is row i of the
    probabilities, each of them 1 / (i + 1) before dropout.
    """
    with context_parallel_groups() as groups:
        cp = groups.cp.size()
        sequence = 2 * cp * WATCHED.chunk
        positions = share_of(torch.arange(sequence), groups.cp)
        query = torch.zeros(len(positions), WATCHED.batch, WATCHED.heads, WATCHED.key_dim)
        key = torch.zeros(len(positions), WATCHED.batch, WATCHED.groups, WATCHED.key_dim)
        units = torch.eye(sequence)[positions][:, None, None]
        value = units.expand(-1, WATCHED.batch, WATCHED.groups, -1)
        layer = attention(WATCHED, groups, cp=cp, dropout=DROPOUT)

        def kept(undropped: float) -> torch.Tensor:
            probabilities = layer(query, key, value).unflatten(2, (WATCHED.heads, sequence))
            return probabilities * undropped * (positions + 1)[:, None, None, None]

        seed_own_generator(groups.cp)
        default = torch.get_rng_state()
        found = {"positions": positions, "first": kept(1 - DROPOUT), "second": kept(1 - DROPOUT)}
        assert torch.equal(torch.get_rng_state(), default)
        seed_own_generator(groups.cp)
        found["first_again"] = kept(1 - DROPOUT)
        layer.eval()
        return found | {"evaluation": kept(1.0)}


def test_dropout_drops_its_share_of_what_is_seen_and_nothing_in_evaluation(run_on) -> None:
    for found in run_on(2, kept_probabilities):
        columns = torch.arange(found["first"].shape[-1])
        seen = (columns <= found["positions"][:, None])[:, None, None].expand_as(found["first"])
        torch.testing.assert_close(found["evaluation"], seen.float())
        for draw in (found["first"], found["second"]):
            torch.testing.assert_close(draw, draw.round())
            assert set(draw.round().unique().tolist()) == {0.0, 1.0}
            assert not draw[~seen].any()
            assert draw[seen].mean().item() == pytest.approx(1 - DROPOUT, abs=0.02)


def test_dropout_is_drawn_anew_by_each_rank_and_again_from_one_seed(run_on) -> None:
    first, second = run_on(2, kept_probabilities)
    independent = DROPOUT**2 + (1 - DROPOUT) ** 2
    for found in (first, second):
        assert torch.equal(found["first"], found["first_again"])
        same = agreement(found["first"], found["second"], found["positions"][0])
        assert same == pytest.approx(independent, abs=0.1)
    late = [found["first"][WATCHED.chunk :] for found in (first, second)]
    assert agreement(*late, second["positions"][WATCHED.chunk]) == pytest.approx(independent, abs=0.05)


def agreement(one: torch.Tensor, other: torch.Tensor, earliest: int) -> float:
    """The share of probabilities that two draws treat alike, up to what their earliest row sees."""
    return (one[..., : earliest + 1].round() == other[..., : earliest + 1].round()).float().mean().item()


def slopes(recomputed: bool) -> tuple[float, float]:
    """This rank's share of a directional derivative under dropout: by autograd, and by differences."""
    from megatron.core import tensor_parallel

    with context_parallel_groups() as groups:
        cp, step = groups.cp.size(), 1e-5
        local = {name: share_of(tensor, groups.cp) for name, tensor in SMALL.inputs(cp).items()}
        inputs = track(local, SMALL.wanted)
        directions = [torch.sin(7 * tensor.detach()) for tensor in inputs]
        layer = attention(SMALL, groups, cp=cp, dropout=DROPOUT)

        def objective(*at: torch.Tensor) -> torch.Tensor:
            seed_own_generator(groups.cp)
            output = tensor_parallel.checkpoint(layer, False, *at) if recomputed else layer(*at)
            return (output * local["gradient"]).sum()

        objective(*inputs).backward()
        by_autograd = sum((tensor.grad * way).sum() for tensor, way in zip(inputs, directions, strict=True))
        with torch.no_grad():
            ahead = objective(*(tensor + step * way for tensor, way in zip(inputs, directions, strict=True)))
            behind = objective(*(tensor - step * way for tensor, way in zip(inputs, directions, strict=True)))
        return by_autograd.item(), ((ahead - behind) / (2 * step)).item()


@pytest.mark.parametrize("recomputed", [False, True])
def test_gradients_are_those_of_the_dropout_that_was_drawn(run_on, recomputed: bool) -> None:
    by_autograd, by_differences = (sum(shares) for shares in zip(*run_on(2, slopes, recomputed), strict=True))
    assert by_autograd == pytest.approx(by_differences, rel=1e-8)


def bytes_sent() -> tuple[int, int, int]:
    """What the receipt counts for one forward and one backward pass, and the size of what is gathered."""
    from mixle_megatron.traffic import TrafficMeter

    with context_parallel_groups() as groups:
        cp = groups.cp.size()
        local = {name: share_of(tensor, groups.cp) for name, tensor in SMALL.inputs(cp).items()}
        layer = attention(SMALL, groups, cp=cp)
        meter = TrafficMeter()
        meter.start()
        output = layer(*track(local, SMALL.wanted))
        forward = meter.take()
        output.backward(local["gradient"])
        backward = meter.take()
        meter.stop()
        whole = cp * (local["key"].nbytes + local["value"].nbytes)
        return forward, backward, whole


@pytest.mark.parametrize("cp", [2, 4])
def test_receipts_count_two_gathers_and_one_reduction(run_on, cp: int) -> None:
    for forward, backward, whole in run_on(cp, bytes_sent):
        assert (forward, backward) == (whole * (cp - 1) // cp, 2 * whole * (cp - 1) // cp)


def kept_for_the_backward_pass() -> tuple[int, list[bool]]:
    """Bytes that this rank keeps after the forward pass, its inputs and output among them.

    And which of the sequences that it gathered are in memory still: after the forward pass, and after
    the backward pass while the graph lives on.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    from mixle_megatron.layers import context_parallel

    kept: dict[int, int] = {}
    gathered: list[StorageWeakRef] = []
    latest_first = context_parallel.latest_first

    def note(packed: Any) -> Any:
        if isinstance(packed, torch.Tensor):
            kept[packed.untyped_storage().data_ptr()] = packed.untyped_storage().nbytes()
        return packed

    def noting(pack: Any, unpack: Any) -> Any:
        return saved_tensors_hooks(lambda tensor: note(pack(tensor)), unpack)

    def gather(*arguments: Any) -> torch.Tensor:
        whole = latest_first(*arguments)
        gathered.append(StorageWeakRef(whole.untyped_storage()))
        return whole

    with context_parallel_groups() as groups, pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_parallel, "latest_first", gather)
        patch.setattr(context_parallel, "saved_tensors_hooks", noting)
        cp = groups.cp.size()
        whole = replace(SMALL, chunk=SMALL.chunk // cp).inputs(cp, torch.float32)
        local = {name: share_of(tensor, groups.cp) for name, tensor in whole.items()}
        inputs = track(local, SMALL.wanted)
        with noting(note, note):
            output = attention(SMALL, groups, cp=cp)(*inputs)
        alive = [not each.expired() for each in gathered]
        output.backward(local["gradient"])
        alive += [not each.expired() for each in gathered]
        for tensor in (*inputs, output):
            note(tensor)
        return sum(kept.values()), alive


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_what_a_rank_keeps_for_the_backward_pass_falls_with_cp(run_on, cp: int) -> None:
    own = (SMALL.heads + 2 * SMALL.groups) * SMALL.key_dim
    outputs = 2 * SMALL.heads * SMALL.key_dim  # as the kernel gives them, and as the layer does
    copies = own if cp == 1 else 0  # beside those that the test holds
    channels = own + copies + outputs
    masks = 0 if cp == 1 else (2 * cp + 3) * SMALL.chunk // cp - 2
    expected = 4 * (2 * SMALL.chunk // cp * SMALL.batch * (channels + SMALL.heads) + masks)
    for kept, alive in run_on(cp, kept_for_the_backward_pass):
        assert kept == expected
        assert alive == ([] if cp == 1 else [False, False, False])


def ask_for_what_is_not_executed() -> None:
    """Every refusal names what it is about."""
    with context_parallel_groups() as groups:
        query, key, value = (torch.zeros(3, 1, heads, 4) for heads in (4, 2, 2))
        layer = attention(SMALL, groups, cp=2)
        attempts = {
            "a2a": lambda: attention(SMALL, groups, cp=2, cp_comm_type="a2a"),
            "no group": lambda: attention(SMALL, None, cp=2),
            "2 ranks": lambda: attention(SMALL, groups, cp=4),
            "3 tokens": lambda: layer(query, key, value),
            "packed": lambda: layer(query[:2], key[:2], value[:2], packed_seq_params=object()),
        }
        for named, attempt in attempts.items():
            with pytest.raises((ValueError, NotImplementedError), match=named):
                attempt()


def test_what_is_not_executed_is_refused(run_on) -> None:
    run_on(2, ask_for_what_is_not_executed)
