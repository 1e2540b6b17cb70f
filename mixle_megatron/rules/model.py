"""What a model's sizes must satisfy, by themselves and under a plan."""

from __future__ import annotations

from math import gcd

from mixle_megatron.errors import Fault
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules.dimensions import ModelDimensions
from mixle_megatron.rules.nearest import divisors, listed, multiples_around, nearest, use

TOKENIZER_IDS = {"byte": 257}
"""Token ids of each tokenizer. byte: ids 0-255 are the bytes, 256 ends a document."""


def model_faults(model: ModelDimensions, *, prefix: str = "model") -> list[Fault]:
    """Everything that is wrong with the model's sizes alone.

    Args:
        model: the sizes, with defaults resolved.
        prefix: what the fields are called after, in front of the dot.
    """
    return [
        *_head_faults(model, prefix),
        *_rotary_faults(model, prefix),
        *_position_faults(model, prefix),
    ]


def _head_faults(model: ModelDimensions, prefix: str) -> list[Fault]:
    """Heads divide the hidden size, unless their width is one of the user's own."""
    faults = []
    hidden, heads, groups = model.hidden_size, model.num_attention_heads, model.num_query_groups
    if hidden % heads and model.kv_channels == hidden // heads:
        sizes = listed(multiples_around(hidden, heads))
        remedy = (
            f"use {prefix}.hidden_size {sizes}, {prefix}.num_attention_heads {_near(hidden, heads)}, "
            f"or state another {prefix}.kv_channels"
        )
        rule = f"is not a multiple of {prefix}.num_attention_heads={heads}"
        faults.append(Fault(f"{prefix}.hidden_size", hidden, rule, remedy))
    if heads % groups:
        rule = f"does not divide {prefix}.num_attention_heads={heads}"
        faults.append(Fault(f"{prefix}.num_query_groups", groups, rule, use(divisors(heads), groups)))
    return faults


def _near(number: int, target: int) -> str:
    """Divisors of ``number`` next to ``target``, as a list in words."""
    return use(divisors(number), target).removeprefix("use ")


def _rotary_faults(model: ModelDimensions, prefix: str) -> list[Fault]:
    """Rotary positions turn channels in pairs (Megatron's RotaryEmbedding)."""
    if model.position_embedding_type != "rope" or model.kv_channels < 1:
        return []
    turned = int(model.kv_channels * model.rotary_percent)
    if turned >= 2 and turned % 2 == 0:
        return []
    percent = f"{prefix}.rotary_percent={model.rotary_percent:g}"
    rule = f"with {percent} turns {turned} channels of each head, which is not an even number from 2"
    near = range(max(model.kv_channels - 64, 1), model.kv_channels + 64)
    sizes = [size for size in near if _turns_pairs(size, model.rotary_percent)]
    remedy = use(nearest(sizes, model.kv_channels, most=2), model.kv_channels)
    return [Fault(f"{prefix}.kv_channels", model.kv_channels, rule, remedy)]


def _turns_pairs(kv_channels: int, rotary_percent: float) -> bool:
    turned = int(kv_channels * rotary_percent)
    return turned >= 2 and turned % 2 == 0


def _position_faults(model: ModelDimensions, prefix: str) -> list[Fault]:
    if model.seq_length <= model.max_position_embeddings:
        return []
    rule = f"is longer than {prefix}.max_position_embeddings={model.max_position_embeddings}"
    remedy = (
        f"use at most {model.max_position_embeddings}, or {prefix}.max_position_embeddings={model.seq_length}"
    )
    return [Fault(f"{prefix}.seq_length", model.seq_length, rule, remedy)]


def vocabulary_faults(vocab_size: int, tokenizer: str, *, prefix: str = "model") -> list[Fault]:
    """Whether the vocabulary has a row for each id of the tokenizer."""
    ids = TOKENIZER_IDS[tokenizer]
    if vocab_size >= ids:
        return []
    rule = f"is below the {ids} ids of data.tokenizer={tokenizer} (0 to {ids - 1})"
    return [Fault(f"{prefix}.vocab_size", vocab_size, rule, f"use {ids} or more")]


def plan_model_faults(
    plan: PlanRecord,
    model: ModelDimensions,
    *,
    plan_prefix: str = "plan",
    model_prefix: str = "model",
) -> list[Fault]:
    """Whether the plan's tp and pp can cut the model."""
    return [
        *_tensor_faults(plan, model, plan_prefix, model_prefix),
        *_vocabulary_shard_faults(plan, model, plan_prefix, model_prefix),
        *_pipeline_faults(plan, model, plan_prefix, model_prefix),
    ]


def _tensor_faults(
    plan: PlanRecord, model: ModelDimensions, plan_prefix: str, model_prefix: str
) -> list[Fault]:
    """tp cuts heads, key-value heads and the feed-forward layer; with sequence parallelism the sequence too.

    Megatron also copies key-value heads where tp is a multiple of their number; that is refused
    here, as those copies would be one parameter on several ranks.
    """
    cut = ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "seq_length")
    remedy = use(divisors(gcd(*(getattr(model, name) for name in cut))), plan.tp)
    faults = []
    for name in cut:
        size = getattr(model, name)
        if size % plan.tp:
            reason = ", which sequence parallelism splits" if name == "seq_length" else ""
            rule = f"does not divide {model_prefix}.{name}={size}{reason}"
            faults.append(Fault(f"{plan_prefix}.tp", plan.tp, rule, remedy))
    return faults


def _vocabulary_shard_faults(
    plan: PlanRecord, model: ModelDimensions, plan_prefix: str, model_prefix: str
) -> list[Fault]:
    faults = []
    if plan.tp > model.vocab_size:
        rule = f"is more than the {model_prefix}.vocab_size={model.vocab_size} rows that it splits"
        faults.append(Fault(f"{plan_prefix}.tp", plan.tp, rule, f"use at most {model.vocab_size}"))
    if model.padded_vocab_size < model.vocab_size:
        rule = f"is below {model_prefix}.vocab_size={model.vocab_size}"
        remedy = f"use {-(-model.vocab_size // plan.tp) * plan.tp} or a larger multiple of {plan.tp}"
        faults.append(Fault(f"{model_prefix}.padded_vocab_size", model.padded_vocab_size, rule, remedy))
    if model.padded_vocab_size % plan.tp:
        rule = f"is not a multiple of {plan_prefix}.tp={plan.tp}"
        sizes = [
            size for size in multiples_around(model.padded_vocab_size, plan.tp) if size >= model.vocab_size
        ]
        remedy = use(sizes, model.padded_vocab_size)
        faults.append(Fault(f"{model_prefix}.padded_vocab_size", model.padded_vocab_size, rule, remedy))
    return faults


def _pipeline_faults(
    plan: PlanRecord, model: ModelDimensions, plan_prefix: str, model_prefix: str
) -> list[Fault]:
    """Every stage holds the same number of layers, at least one."""
    if model.num_layers % plan.pp == 0:
        return []
    rule = f"does not divide {model_prefix}.num_layers={model.num_layers}"
    return [Fault(f"{plan_prefix}.pp", plan.pp, rule, use(divisors(model.num_layers), plan.pp))]


def recompute_faults(
    granularity: str,
    method: str,
    num_layers: int | None,
    *,
    layers_per_stage: int,
    prefix: str = "model",
) -> list[Fault]:
    """Megatron's conditions on activation recomputation (``TransformerConfig.__post_init__``).

    Args:
        granularity: ``none``, ``selective`` (core attention) or ``full`` (whole layers).
        method: ``none``, ``uniform`` or ``block``.
        num_layers: layers of a unit or of a stage; None where not stated.
        layers_per_stage: layers of one pipeline stage.
        prefix: what the fields are called after.
    """
    field, layers = f"{prefix}.recompute_num_layers", f"use a number from 1 to {layers_per_stage}"
    stated = f"{prefix}.recompute_granularity={granularity}"
    faults = []
    if granularity == "full" and method == "none":
        rule = f"must be chosen with {stated}"
        faults.append(Fault(f"{prefix}.recompute_method", method, rule, "use uniform or block"))
    if granularity == "full" and num_layers is None:
        faults.append(Fault(field, None, f"must be stated with {stated}", layers))
    if granularity == "full" and num_layers is not None and num_layers > layers_per_stage:
        rule = f"is more than the {layers_per_stage} layers of a pipeline stage"
        faults.append(Fault(field, num_layers, rule, layers))
    if granularity == "selective" and num_layers is not None:
        faults.append(Fault(field, num_layers, f"must not be stated with {stated}", "leave it out"))
    return faults
