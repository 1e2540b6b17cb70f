"""What mixtures of experts must satisfy, by themselves and under a plan.

The conditions are those of Megatron's ``TransformerConfig.__post_init__`` and of its modules in
``core/transformer/moe``, said before they are built.
"""

from __future__ import annotations

from collections.abc import Iterator

from mixle_megatron.errors import Fault
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules.dimensions import ModelDimensions
from mixle_megatron.rules.nearest import MOST_LISTED, divisors, listed, use
from mixle_megatron.rules.verdict import NOT_EXECUTED


def expert_faults(model: ModelDimensions, *, prefix: str = "model") -> list[Fault]:
    """Everything that is wrong with the experts alone; none where every layer is dense."""
    if model.num_moe_experts is None:
        return []
    return [
        *_layer_faults(model, prefix),
        *_choice_faults(model, prefix),
        *_group_faults(model, prefix),
        *_dispatch_faults(model, prefix),
        *_bias_faults(model, prefix),
    ]


def _layer_faults(model: ModelDimensions, prefix: str) -> Iterator[Fault]:
    """A list says of each layer whether it has experts, and one of them does."""
    if isinstance(model.moe_layer_freq, int):
        return
    length, field = len(model.moe_layer_freq), f"{prefix}.moe_layer_freq"
    given = f"a list of {length} values"
    if length != model.num_layers:
        rule = f"has not one value for each of {prefix}.num_layers={model.num_layers}"
        yield Fault(field, given, rule, f"use {model.num_layers} values, or a whole number")
    elif not any(model.moe_layer_freq):
        rule = f"gives no layer the experts of {prefix}.num_moe_experts={model.num_moe_experts}"
        yield Fault(field, given, rule, f"use a 1 in it, or {prefix}.num_moe_experts=null")


def _choice_faults(model: ModelDimensions, prefix: str) -> Iterator[Fault]:
    """How many experts a token is sent to, and what their scores and biases are."""
    experts, topk = model.num_moe_experts or 1, model.moe_router_topk
    if topk > experts:
        rule = f"is more than {prefix}.num_moe_experts={experts}"
        yield Fault(f"{prefix}.moe_router_topk", topk, rule, f"use at most {experts}")
    softmax = model.moe_router_score_function == "softmax"
    if topk == 1 and softmax and not model.moe_router_pre_softmax:
        rule = "gives every chosen expert the score 1, as its softmax is over that one alone"
        remedy = f"use {prefix}.moe_router_pre_softmax=true, or {prefix}.moe_router_score_function=sigmoid"
        yield Fault(f"{prefix}.moe_router_topk", topk, rule, remedy)
    if model.moe_router_enable_expert_bias and softmax:
        rule = f"needs {prefix}.moe_router_score_function=sigmoid, and it is softmax"
        remedy = f"use {prefix}.moe_router_score_function=sigmoid, or false"
        yield Fault(f"{prefix}.moe_router_enable_expert_bias", "true", rule, remedy)


def _group_faults(model: ModelDimensions, prefix: str) -> Iterator[Fault]:
    """Groups of equally many experts, enough of which are chosen to hold a token's experts."""
    experts, topk = model.num_moe_experts or 1, model.moe_router_topk
    groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
    if chosen is None:
        return
    chosen_field = f"{prefix}.moe_router_group_topk"
    if groups is None:
        rule = f"needs {prefix}.moe_router_num_groups, which is not stated"
        numbers = listed([number for number in divisors(experts) if number >= chosen][:MOST_LISTED])
        remedy = f"use {prefix}.moe_router_num_groups {numbers}" if numbers else "leave it out"
        yield Fault(chosen_field, chosen, rule, remedy)
        return
    if experts % groups:
        rule = f"does not divide {prefix}.num_moe_experts={experts}"
        yield Fault(f"{prefix}.moe_router_num_groups", groups, rule, use(divisors(experts), groups))
        return
    each, topk_text = experts // groups, f"{prefix}.moe_router_topk={topk}"
    least, most = -(-topk // each), min(topk, groups)
    if not least <= chosen <= most and least <= most:
        rule = (
            f"groups of {each} experts cannot hold the {topk_text} experts of a token"
            if chosen < least
            else f"is more than {prefix}.moe_router_num_groups={groups} or {topk_text}"
        )
        remedy = f"use {least}" if least == most else f"use a number from {least} to {most}"
        yield Fault(chosen_field, chosen, rule, remedy)


def _dispatch_faults(model: ModelDimensions, prefix: str) -> Iterator[Fault]:
    """How tokens reach their experts, and how many an expert takes."""
    if model.moe_token_dispatcher_type == "flex":
        rule = NOT_EXECUTED + "it needs DeepEP, which is no dependency of this package"
        yield Fault(f"{prefix}.moe_token_dispatcher_type", "flex", rule, "use alltoall or allgather")
    factor, padded = model.moe_expert_capacity_factor, f"{prefix}.moe_pad_expert_input_to_capacity"
    if not model.moe_pad_expert_input_to_capacity:
        return
    if factor is None:
        rule = f"needs {prefix}.moe_expert_capacity_factor, which is not stated"
        yield Fault(padded, "true", rule, f"use {prefix}.moe_expert_capacity_factor=1.0, or false")
        return
    most = (model.num_moe_experts or 1) / model.moe_router_topk
    if factor > most and model.moe_token_dispatcher_type == "alltoall":
        rule = (
            f"gives an expert more places than there are tokens, which alltoall cannot fill as {padded} asks"
        )
        remedy = f"use at most {most:g} (num_moe_experts / moe_router_topk)"
        yield Fault(f"{prefix}.moe_expert_capacity_factor", factor, rule, remedy)


def _bias_faults(model: ModelDimensions, prefix: str) -> Iterator[Fault]:
    """Experts have no biases: Megatron adds those of its local layers in place, to a view of autograd's."""
    if model.add_bias_linear:
        rule = NOT_EXECUTED + "the biases of experts are not built"
        yield Fault(f"{prefix}.add_bias_linear", "true", rule, "use false")


def plan_expert_faults(
    plan: PlanRecord, model: ModelDimensions, *, plan_prefix: str = "plan", model_prefix: str = "model"
) -> list[Fault]:
    """Whether ep and etp can cut the experts."""
    if model.num_moe_experts is None:
        rule = f"has no experts to split: {model_prefix}.num_moe_experts is null"
        return [
            Fault(f"{plan_prefix}.{axis}", getattr(plan, axis), rule, "use 1")
            for axis in ("ep", "etp")
            if getattr(plan, axis) > 1
        ]
    faults = []
    if model.num_moe_experts % plan.ep:
        rule = f"does not divide {model_prefix}.num_moe_experts={model.num_moe_experts}"
        both = [ep for ep in divisors(model.num_moe_experts) if plan.data_parallel_size % ep == 0]
        faults.append(Fault(f"{plan_prefix}.ep", plan.ep, rule, use(both, plan.ep)))
    return faults + list(_expert_tensor_faults(plan, model, plan_prefix, model_prefix))


def _expert_tensor_faults(
    plan: PlanRecord, model: ModelDimensions, plan_prefix: str, model_prefix: str
) -> Iterator[Fault]:
    """etp cuts each expert's width."""
    field, width = f"{plan_prefix}.etp", model.expert_width
    if width % plan.etp:
        rule = f"does not divide {model_prefix}.moe_ffn_hidden_size={width}"
        ranks = plan.tp * plan.cp * plan.data_parallel_size // plan.ep
        both = [etp for etp in divisors(width) if ranks % etp == 0]
        yield Fault(field, plan.etp, rule, use(both, plan.etp))
