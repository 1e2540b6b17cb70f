"""mixle's CausalLM on Megatron and back: exact before training, equal to mixle's own backend after it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mixle.models.language_model import LM
from mixle.models.transformer import build_causal_lm
from mixle.utils.parallel.training_contracts import ParallelPlan

from mixle_megatron.errors import Refused, SessionError, Unsupported

VOCABULARY, WIDTH, LAYERS, HEADS, BLOCK = 57, 32, 2, 4, 16
PLANS: dict[str, tuple[int, dict[str, int]]] = {
    "one rank": (1, {}),
    "dp_replicate=2": (2, {"dp_replicate": 2}),
    "dp_shard=2": (2, {"dp_shard": 2}),
    "tp=2": (2, {"tp": 2}),
    "pp=2": (2, {"pp": 2}),
    "cp=2": (2, {"cp": 2}),
    "tp=2 pp=2": (4, {"tp": 2, "pp": 2}),
}


def causal_lm(kind: str = "plain") -> Any:
    """A CausalLM with parameters that are nobody's defaults."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        module = build_causal_lm(VOCABULARY, WIDTH, LAYERS, HEADS, BLOCK)
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    if kind == "mup":
        for block in module.blocks:
            block.attn.mup_attention = True
        module.mup_output_multiplier.fill_(0.25)
    if kind == "recomputed":
        module.gradient_checkpointing = [True, False]
    return module


def tokens(rows: int = 3) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, BLOCK + 1), generator=torch.Generator().manual_seed(5))


def open_session(module: Any, sizes: dict[str, int], **options: Any) -> Any:
    from mixle.utils.parallel import get_training_backend

    import mixle_megatron  # noqa: F401  registers the backend

    return get_training_backend("megatron").prepare(
        module, plan=ParallelPlan(**sizes), device="cpu", **options
    )


def logits_difference(kind: str, dtype: torch.dtype, sizes: dict[str, int]) -> float:
    """The largest difference of this rank's logits from mixle's, relative to mixle's largest."""
    from mixle_megatron.models.causal_lm import WrappedCausalLM
    from mixle_megatron.translate import Host, transformer_config

    module = causal_lm(kind).to(dtype)
    expected = module(tokens()[:, :-1], return_all_logits=True)
    session = open_session(causal_lm(kind), sizes)
    provider, groups = WrappedCausalLM(module), session.stage.groups
    host = Host.of(torch.device("cpu"))
    config = transformer_config(session.plan, provider.transformer_fields(), precision="fp32", host=host)
    config = dataclasses.replace(config, params_dtype=dtype, pipeline_dtype=dtype)
    stage = provider.build_stage(config, groups, host)
    inputs = tokens()[:, :-1]
    with torch.no_grad():
        got = stage(inputs, torch.arange(BLOCK).expand_as(inputs), None)
    session.close()
    width, rank = got.shape[-1], groups.collection.tp.rank()
    own = expected[..., rank * width : (rank + 1) * width]
    assert torch.isinf(got[..., own.shape[-1] :]).all()
    return float((got[..., : own.shape[-1]] - own).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kind", ["plain", "mup", "recomputed"])
@pytest.mark.parametrize("plan", ["one rank", "tp=2"])
def test_logits_are_mixles_before_training(run_on: Any, kind: str, plan: str) -> None:
    ranks, sizes = PLANS[plan]
    assert max(run_on(ranks, logits_difference, kind, torch.float64, sizes)) <= 1e-13
    assert max(run_on(ranks, logits_difference, kind, torch.float32, sizes)) <= 1e-6


def round_trip(sizes: dict[str, int]) -> list[str]:
    """Names of parameters that opening and closing a session changed, or replaced."""
    module = causal_lm()
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in module.named_parameters()}
    session = open_session(module, sizes)
    session.close()
    assert session.module is module
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter is not before[name][0] or not torch.equal(parameter, before[name][1])
    ]


@pytest.mark.parametrize("plan", PLANS)
def test_the_round_trip_without_training_is_exact(run_on: Any, plan: str) -> None:
    ranks, sizes = PLANS[plan]
    assert run_on(ranks, round_trip, sizes) == [[]] * ranks


def fit(backend: str, sizes: dict[str, int], options: dict[str, Any], kind: str = "plain") -> dict[str, Any]:
    """LM.fit on a text; its losses, and the parameters that it leaves."""
    import mixle_megatron  # noqa: F401

    data_parallel = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    lm = LM(VOCABULARY, d_model=WIDTH, n_layer=LAYERS, n_head=HEADS, block=BLOCK, device="cpu")
    lm.module = causal_lm(kind)
    names = {"tp": "tp_size", "pp": "pp_size", "cp": "cp_size"}
    losses: list[float] = []
    lm.fit(
        corpus(),
        dense=True,
        distributed=True,
        distributed_backend=backend,
        batch_size=8 // data_parallel,
        lr=3e-3,
        log=lambda _epoch, loss: losses.append(loss),
        **{names.get(axis, axis): size for axis, size in sizes.items()},
        **({"epochs": 2, "optimizer": "adam"} | options),
    )
    tied = lm.module.head.weight is lm.module.tok.weight
    parameters = {name: parameter.detach().clone() for name, parameter in lm.module.named_parameters()}
    return {"losses": losses, "parameters": parameters, "tied": tied, "used": use(lm)}


def assert_close(parameters: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], most: float) -> None:
    """Every parameter is within ``most`` of the expected one, but for the biases of keys.

    A key's bias shifts all scores of a query alike, which a softmax does not see: its gradient is
    rounding and nothing else, and adam makes a full step of it in either direction.
    """
    for name, parameter in parameters.items():
        difference = (parameter - expected[name]).abs()
        if name.endswith("attn.qkv.bias"):
            difference = difference.view(3, -1)[[0, 2]]
        assert difference.max() <= most, f"{name} differs by {difference.max():.1e}"


def corpus() -> np.ndarray:
    """Tokens with structure to learn: 24 rows of a noisy cycle."""
    rng = np.random.default_rng(0)
    return (np.arange(24 * (BLOCK + 1)) * 7 + rng.integers(0, 3, size=24 * (BLOCK + 1))) % VOCABULARY


def use(lm: LM) -> dict[str, Any]:
    """What a user does with a trained model."""
    again = LM.from_dict(lm.to_dict())
    prompt = list(range(8))
    same = [torch.equal(a, b) for a, b in zip(again.module.parameters(), lm.module.parameters(), strict=True)]
    pickled = pickle.loads(pickle.dumps(lm.module))
    return {
        "reloaded": all(same),
        "pickled": type(pickled) is type(lm.module),
        "generated": len(again.generate(prompt, 3)) > 0,
        "copied": type(copy.deepcopy(lm.module)) is type(lm.module),
    }


@pytest.fixture(scope="module")
def native(run_on: Any) -> dict[str, Any]:
    """mixle's own backend on one rank."""
    return run_on(1, fit, "torch_native", {}, {})[0]


@pytest.mark.parametrize("plan", PLANS)
def test_fit_is_mixles_own_on_every_plan(run_on: Any, native: dict[str, Any], plan: str) -> None:
    ranks, sizes = PLANS[plan]
    results = run_on(ranks, fit, "megatron", sizes, {})
    assert results[0]["losses"] == pytest.approx(native["losses"], rel=1e-5)
    for result in results:
        assert result["tied"]
        assert all(result["used"].values()), result["used"]
        for name, parameter in result["parameters"].items():
            assert torch.equal(parameter, results[0]["parameters"][name]), f"{name} differs between ranks"
        assert_close(result["parameters"], native["parameters"], 1e-4)


@pytest.mark.parametrize(("first", "second"), [("dp_shard=2", "tp=2"), ("tp=2 pp=2", "one rank")])
def test_fit_resumes_under_another_plan(
    run_on: Any, native: dict[str, Any], tmp_path: Path, first: str, second: str
) -> None:
    """One epoch under one plan and the second under another are the two epochs of mixle's own backend."""
    path = {"checkpoint_path": str(tmp_path / "checkpoint")}
    (ranks, sizes), (more_ranks, other) = PLANS[first], PLANS[second]
    begun = run_on(ranks, fit, "megatron", sizes, {"epochs": 1} | path)[0]
    ended = run_on(more_ranks, fit, "megatron", other, {"epochs": 2, "resume": True} | path)[0]
    assert begun["losses"] + ended["losses"] == pytest.approx(native["losses"], rel=1e-5)
    assert_close(ended["parameters"], native["parameters"], 1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "sgd_momentum"])
def test_optimizers_are_mixles_of_the_same_name(run_on: Any, optimizer: str) -> None:
    options = {"optimizer": optimizer, "max_grad_norm": 0.5}
    expected = run_on(1, fit, "torch_native", {}, options)[0]
    result = run_on(2, fit, "megatron", {"dp_shard": 2}, options)[0]
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert_close(result["parameters"], expected["parameters"], 1e-4)


@pytest.mark.parametrize("kind", ["mup", "recomputed"])
def test_mup_and_gradient_checkpointing_train_as_mixles(run_on: Any, kind: str) -> None:
    expected = run_on(1, fit, "torch_native", {}, {}, kind)[0]
    result = run_on(2, fit, "megatron", {"tp": 2}, {}, kind)[0]
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.02), ("fp16", 0.002)])
def test_half_precisions_train_and_give_fp32_back(
    run_on: Any, native: dict[str, Any], precision: str, tolerance: float
) -> None:
    result = run_on(2, fit, "megatron", {"dp_shard": 2}, {"precision": precision})[0]
    assert {parameter.dtype for parameter in result["parameters"].values()} == {torch.float32}
    assert result["losses"] == pytest.approx(native["losses"], rel=tolerance)
    assert result["losses"] != native["losses"]


def test_a_second_fit_goes_on_from_the_first(run_on: Any) -> None:
    assert run_on(2, fit_twice)[0]


def fit_twice() -> bool:
    import mixle_megatron  # noqa: F401

    lm = LM(VOCABULARY, d_model=WIDTH, n_layer=LAYERS, n_head=HEADS, block=BLOCK, device="cpu")
    lm.module = causal_lm()
    losses: list[float] = []
    for _ in range(2):
        lm.fit(
            corpus(),
            dense=True,
            distributed=True,
            distributed_backend="megatron",
            batch_size=4,
            dp_replicate=2,
            log=lambda _epoch, loss: losses.append(loss),
        )
    return not losses or losses[1] < losses[0]


# Replicas that run out of data at different times


def uneven(sizes: dict[str, int], accumulation: int) -> tuple[dict[str, torch.Tensor], float]:
    """Five rows dealt to two replicas, one row a call, as LM.fit deals them; the result and the loss."""
    module = causal_lm()
    session = open_session(module, sizes | {"gradient_accumulation_steps": accumulation}, lr=1e-2)
    rows, total, count = tokens(5), 0.0, 0
    for row in rows[session.data_parallel_rank :: session.data_parallel_size]:
        receipt = session.train_batch(row[None, :-1], row[None, 1:])
        if not receipt.skipped:
            total, count = total + receipt.loss * receipt.local_tokens, count + receipt.local_tokens
    receipt = session.finish_accumulation()
    if receipt is not None:
        total, count = total + receipt.loss * receipt.local_tokens, count + receipt.local_tokens
    total, count = session.reduce_sums(total, float(count))
    session.close()
    return {name: p.detach().clone() for name, p in module.named_parameters()}, total / count


def in_plain_torch(updates: list[list[int]]) -> tuple[dict[str, torch.Tensor], float]:
    """The same rows in the updates that they belong to, by the exact token mean, in plain torch."""
    module, rows = causal_lm(), tokens(5)
    adam = torch.optim.Adam(module.parameters(), lr=1e-2)
    total = 0.0
    for update in updates:
        chosen = rows[update]
        logits = module(chosen[:, :-1], return_all_logits=True)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), chosen[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        total += float(loss.detach()) * len(update)
    return {name: p.detach().clone() for name, p in module.named_parameters()}, total / len(rows)


@pytest.mark.parametrize(("accumulation", "updates"), [(1, [[0, 1], [2, 3], [4]]), (2, [[0, 1, 2, 3], [4]])])
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2", "tp=2 dp_shard=2"])
def test_replicas_may_run_out_of_data_at_different_times(
    run_on: Any, plan: str, accumulation: int, updates: list[list[int]]
) -> None:
    ranks, sizes = PLANS.get(plan, (4, {"tp": 2, "dp_shard": 2}))
    expected, mean = in_plain_torch(updates)
    for parameters, loss in run_on(ranks, uneven, sizes, accumulation):
        assert loss == pytest.approx(mean, rel=1e-5)
        assert_close(parameters, expected, 1e-5)


# What is refused, and what an error leaves


@pytest.mark.parametrize("optimizer", ["auto", "muon", "adagrad", object()])
def test_an_optimizer_without_an_equal_is_refused_with_what_to_use(optimizer: Any) -> None:
    with pytest.raises(Refused, match="use adam, adamw, sgd, sgd_momentum or OptimizerSettings"):
        open_session(causal_lm(), {}, optimizer=optimizer)


def test_another_module_is_refused_with_what_is_supported() -> None:
    with pytest.raises(Unsupported, match=r"module=Linear is not a model.*mixle CausalLM"):
        open_session(torch.nn.Linear(2, 2), {})


def test_mup_attention_that_differs_between_blocks_is_refused() -> None:
    module = causal_lm()
    module.blocks[1].attn.mup_attention = True
    with pytest.raises(Refused, match="mup_attention"):
        open_session(module, {})


def fail_after_one_batch() -> tuple[str, bool, bool]:
    """An error in the loop, with gradients pending and ``close()`` in ``finally`` as LM.fit has it."""
    module = causal_lm()
    before = copy.deepcopy(module)
    session = open_session(module, {"dp_shard": 2, "gradient_accumulation_steps": 2})
    error = ""
    try:
        try:
            session.train_batch(tokens()[:, :-1], tokens()[:, 1:])
            raise RuntimeError("the loop's own error")
        finally:
            session.close()
    except RuntimeError as caught:
        error = str(caught)
    same = all(torch.equal(a, b) for a, b in zip(module.parameters(), before.parameters(), strict=True))
    return error, same, session.module is module


def test_an_error_is_not_hidden_by_close_and_leaves_the_module_as_it_was(run_on: Any) -> None:
    assert run_on(2, fail_after_one_batch) == [("the loop's own error", True, True)] * 2


def test_close_with_gradients_pending_is_refused_where_nothing_went_wrong(run_on: Any) -> None:
    assert run_on(1, close_while_pending) == ["SessionError"]


def close_while_pending() -> str:
    session = open_session(causal_lm(), {"gradient_accumulation_steps": 2})
    session.train_batch(tokens()[:, :-1], tokens()[:, 1:])
    try:
        session.close()
    except SessionError as error:
        session.discard_accumulation()
        session.close()
        return type(error).__name__
    return "nothing"
