"""Mixtures of experts: every option under plans that split it, and the layer itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plan_matrix import DENSE, MICRO_BATCH, MIXTURE, batch, plan_name, train, world_size
from test_plan_matrix import assert_same

from mixle_megatron.config.model import ModelSection
from mixle_megatron.errors import SessionError

OPTIONS: dict[str, dict[str, Any]] = {
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "sigmoid with expert bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_aux_loss_coeff": 0.0,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
    },
    "shared experts and first dense": {
        "moe_shared_expert_intermediate_size": 16,
        "moe_layer_freq": [0, 1, 1, 1],
        "gated_linear_unit": True,
        "activation_func": "silu",
    },
    "every second layer": {"moe_layer_freq": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "loss of each sequence": {"moe_router_load_balancing_type": "seq_aux_loss"},
    "router in fp64": {"moe_router_dtype": "fp64", "moe_grouped_gemm": True},
}

PLANS = [
    {"dp_shard": 2, "ep": 2},
    {"tp": 2, "etp": 2},
    {"tp": 2, "dp_shard": 2, "ep": 2},
    {"cp": 2, "dp_replicate": 2, "ep": 2, "etp": 2},
]


@pytest.mark.parametrize("plan", PLANS, ids=plan_name)
@pytest.mark.parametrize("option", OPTIONS)
def test_option_trains_as_on_one_rank(run_on: Any, option: str, plan: dict[str, int]) -> None:
    model = MIXTURE | OPTIONS[option]
    (expected,) = run_on(1, train, model, {}, None, 3)
    results = run_on(world_size(plan), train, model, plan, None, 3)
    assert all(result == results[0] for result in results)
    assert_same(results[0], expected, 1e-4)


@pytest.mark.parametrize("pads", [False, True])
def test_a_capacity_drops_tokens_and_says_how_many(run_on: Any, pads: bool) -> None:
    model = MIXTURE | {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": pads}
    (expected,) = run_on(1, train, model, {}, None, 3)
    results = run_on(2, train, model, {"dp_shard": 2, "ep": 2}, None, 3)
    assert_same(results[0], expected, 1e-4)
    tokens = 4 * 2 * model["seq_length"] * model["num_layers"] * 2  # microbatches, rows, two experts each
    for update in expected:
        experts = update["experts"]
        assert experts["dropped"] > 0
        assert experts["assignments"] + experts["dropped"] == tokens
        if not pads:
            assert sum(map(sum, update["routing"])) == experts["assignments"]


# The layer itself

FORCED = MIXTURE | {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.0,
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_router_topk": 1,
}
"""Experts that a bias can force every token to."""


def layer(plan: dict[str, int], favourite: int | None) -> tuple[list[Any], list[float], dict[str, Any]]:
    """One update by plain gradient descent with every token sent to ``favourite``, where one is given.

    Returns tokens per expert, moments of the experts' outputs over all ranks, and by logical name this
    rank's part of every parameter of a layer with experts, with the dimension and the rank it is cut by.
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.models.gpt import GPT
    from mixle_megatron.optimizer_settings import OptimizerSettings
    from mixle_megatron.plan_record import PlanRecord

    replicas = plan.get("dp_replicate", 1) * plan.get("dp_shard", 1)
    opened = MegatronBackend().prepare(
        GPT(ModelSection(**FORCED), seed=7),
        plan=PlanRecord(**plan, microbatches=4 // replicas).to_parallel_plan(),
        optimizer=OptimizerSettings(name="sgd", lr=1.0, sgd_momentum=0.0, clip_grad=0.0, weight_decay=0.0),
        device="cpu",
    )
    moments = torch.zeros(3, dtype=torch.float64)
    counts = torch.zeros(FORCED["num_layers"], FORCED["num_moe_experts"], dtype=torch.long)

    def add(_module: Any, _inputs: Any, outputs: Any) -> None:
        given = outputs[0].detach().double()
        moments.add_(torch.stack([given.sum(), given.pow(2).sum(), given.abs().pow(3).sum()]))

    with opened:
        for module in opened.module.modules():
            if isinstance(module, MoELayer):
                module.register_forward_hook(add)
                number = module.layer_number - 1
                module.router.register_forward_hook(partial(count, counts[number]))
                if favourite is not None:
                    module.router.expert_bias[favourite] = 100.0
        inputs, targets = batch(FORCED["seq_length"], 0)
        own = slice(opened.data_parallel_rank, None, opened.data_parallel_size)
        own_inputs = torch.cat(inputs.split(MICRO_BATCH)[own])
        opened.train_batch(own_inputs, torch.cat(targets.split(MICRO_BATCH)[own]))
        for total in (moments, counts):
            dist.all_reduce(total)
        expert_rank = opened.stage.groups.collection.expt_tp.rank()
        parts = {
            name: (parameter.detach().clone(), getattr(parameter, "partition_dim", -1), expert_rank)
            for name, parameter in opened.stage.named_parameters()
            if ".mlp." in name
        }
        return counts.tolist(), moments.tolist(), parts


def count(counts: torch.Tensor, _router: Any, _inputs: Any, outputs: Any) -> None:
    """Add up where a router sends its tokens."""
    counts.add_(outputs[1].sum(0))


@pytest.mark.parametrize("favourite", [None, 2])
@pytest.mark.parametrize(
    "plan",
    [
        {"dp_shard": 2, "ep": 2},
        {"dp_shard": 4, "ep": 4},
        {"tp": 2},
        {"tp": 2, "etp": 2},
        {"dp_shard": 2, "cp": 2, "ep": 2, "etp": 2},
        {"tp": 2, "dp_shard": 2, "ep": 2, "etp": 2},
    ],
    ids=plan_name,
)
def test_tokens_outputs_and_gradients_of_experts(
    run_on: Any, plan: dict[str, int], favourite: int | None
) -> None:
    ((counts, moments, whole),) = run_on(1, layer, {}, favourite)
    if favourite is not None:
        assert all(expert == 0 for row in counts for n, expert in enumerate(row) if n != favourite)
    etp = plan.get("etp", 1)
    for own_counts, own_moments, parts in run_on(world_size(plan), layer, plan, favourite):
        assert own_counts == counts
        assert own_moments == pytest.approx(moments, rel=1e-5, abs=1e-4)
        assert len(parts) > 0
        for name, (part, dim, rank) in parts.items():
            expected = whole[name][0]
            if dim >= 0 and ".experts." in name:
                expected = expected.chunk(etp, dim)[rank]
            difference = (part - expected).abs().max()
            assert difference <= 1e-6 + 1e-5 * expected.abs().max(), f"{name}: {difference:.1e}"


# What cannot be done


def batches_of_other_shapes(plan: dict[str, int], rows: list[int], uneven_batches: bool = True) -> str:
    """What a session says when replica r gets ``rows[r]`` rows."""
    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.models.gpt import GPT
    from mixle_megatron.plan_record import PlanRecord

    model = GPT(ModelSection(**MIXTURE), seed=7)
    plan_of_two = PlanRecord(**plan, microbatches=2).to_parallel_plan()
    opened = MegatronBackend().prepare(model, plan=plan_of_two, device="cpu", uneven_batches=uneven_batches)
    inputs, targets = batch(MIXTURE["seq_length"], 0)
    count = rows[opened.data_parallel_rank]
    try:
        opened.train_batch(inputs[:count], targets[:count])
    except SessionError as error:
        return str(error)
    finally:
        opened.close()
    return "trained"


@pytest.mark.parametrize(
    ("plan", "rows", "says"),
    [
        ({"dp_shard": 2}, [4, 2], "trained"),
        ({"dp_shard": 2}, [4, 0], "multiple of plan.microbatches rows"),
        ({"dp_shard": 2, "ep": 2}, [4, 2], "as many batches of the same shape"),
        ({"pp": 2}, [3], "multiple of plan.microbatches rows"),
    ],
)
def test_batches_that_experts_cannot_take_are_refused_on_every_rank(
    run_on: Any, plan: dict[str, int], rows: list[int], says: str
) -> None:
    for answer in run_on(2, batches_of_other_shapes, plan, rows):
        assert says in answer


def test_padding_is_refused_where_batches_are_said_to_be_even_too(run_on: Any) -> None:
    for answer in run_on(2, batches_of_other_shapes, {"pp": 2}, [3], False):
        assert "multiple of plan.microbatches rows" in answer


def train_then_run_out(plan: dict[str, int]) -> str:
    """Replica 0 trains twice, replica 1 once."""
    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.models.gpt import GPT
    from mixle_megatron.plan_record import PlanRecord

    model = GPT(ModelSection(**MIXTURE), seed=7)
    opened = MegatronBackend().prepare(model, plan=PlanRecord(**plan).to_parallel_plan(), device="cpu")
    inputs, targets = batch(MIXTURE["seq_length"], 0)
    try:
        for _ in range(2 - opened.data_parallel_rank):
            opened.train_batch(inputs[:2], targets[:2])
        opened.finish_accumulation()
    except SessionError as error:
        return str(error)
    finally:
        opened.close()
    return f"step {opened.step}"


def test_a_replica_without_batches_left_waits_unless_it_would_have_to_exchange_tokens(run_on: Any) -> None:
    assert run_on(2, train_then_run_out, {"dp_replicate": 2}) == ["step 2"] * 2
    for answer in run_on(2, train_then_run_out, {"dp_replicate": 2, "ep": 2}):
        assert "some have none left" in answer


def test_dense_models_have_no_routing_in_their_receipts(run_on: Any) -> None:
    (updates,) = run_on(1, train, DENSE, {}, None, 1)
    assert updates[0]["experts"] is None
