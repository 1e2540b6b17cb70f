"""What a model's sizes must satisfy, by themselves and under a plan."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from mixle_megatron.errors import Fault
from mixle_megatron.pipeline_split import EVEN, PipelineSplit
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules.dimensions import ModelDimensions
from mixle_megatron.rules.experts import expert_faults, plan_expert_faults
from mixle_megatron.rules.latent_attention import latent_attention_cuts, latent_attention_faults
from mixle_megatron.rules.nearest import divisors, listed, multiples_around, nearest, use
from mixle_megatron.rules.pipeline import pipeline_faults
from mixle_megatron.rules.sequence import sequence_multiple
from mixle_megatron.rules.verdict import NOT_EXECUTED

TOKENIZER_IDS = {"byte": 257}
"""Token ids of each tokenizer. byte: ids 0-255 are the bytes, 256 ends a document."""


def model_faults(model: ModelDimensions, *, prefix: str = "model") -> list[Fault]:
    """Everything that is wrong with the model's sizes alone.

    Args:
        model: the sizes, with defaults resolved.
        prefix: what the fields are called after, in front of the dot.
    """
    attention = latent_attention_faults if model.multi_latent_attention else _head_faults
    return [
        *attention(model, prefix),
        *_rotary_faults(model, prefix),
        *_position_faults(model, prefix),
        *expert_faults(model, prefix=prefix),
        *_prediction_faults(model, prefix),
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
    name = "qk_pos_emb_head_dim" if model.multi_latent_attention else "kv_channels"
    channels = getattr(model, name)
    if model.position_embedding_type != "rope" or channels < 1:
        return []
    turned = int(channels * model.rotary_percent)
    if turned >= 2 and turned % 2 == 0:
        return []
    percent = f"{prefix}.rotary_percent={model.rotary_percent:g}"
    rule = f"with {percent} turns {turned} channels of each head, which is not an even number from 2"
    near = range(max(channels - 64, 1), channels + 64)
    sizes = [size for size in near if _turns_pairs(size, model.rotary_percent)]
    return [Fault(f"{prefix}.{name}", channels, rule, use(nearest(sizes, channels, most=2), channels))]


def _turns_pairs(channels: int, rotary_percent: float) -> bool:
    turned = int(channels * rotary_percent)
    return turned >= 2 and turned % 2 == 0


def _position_faults(model: ModelDimensions, prefix: str) -> list[Fault]:
    if model.seq_length <= model.max_position_embeddings:
        return []
    rule = f"is longer than {prefix}.max_position_embeddings={model.max_position_embeddings}"
    remedy = (
        f"use at most {model.max_position_embeddings}, or {prefix}.max_position_embeddings={model.seq_length}"
    )
    return [Fault(f"{prefix}.seq_length", model.seq_length, rule, remedy)]


def _prediction_faults(model: ModelDimensions, prefix: str) -> list[Fault]:
    """Every prediction layer has a token to predict."""
    layers = model.mtp_num_layers
    if layers is None or layers < model.seq_length:
        return []
    rule = f"predicts beyond the {prefix}.seq_length={model.seq_length} tokens of a sequence"
    remedy = f"use at most {model.seq_length - 1}" if model.seq_length > 1 else "leave it out"
    return [Fault(f"{prefix}.mtp_num_layers", layers, rule, remedy)]


def _prediction_plan_faults(
    plan: PlanRecord, model: ModelDimensions, plan_prefix: str, model_prefix: str
) -> list[Fault]:
    """Plans under which Megatron would train predictions of further tokens otherwise than one rank does."""
    if model.mtp_num_layers is None:
        return []
    faults, stated = [], f"{model_prefix}.mtp_num_layers={model.mtp_num_layers}"
    if plan.cp > 1:
        rule = NOT_EXECUTED + f"with {stated} each of its ranks would weight their loss by its own tokens"
        faults.append(Fault(f"{plan_prefix}.cp", plan.cp, rule, "use 1"))
    if plan.pp > 1 and model.position_embedding_type == "learned_absolute":
        rule = f"has a copy on another stage with {stated}, which nothing keeps the same"
        field = f"{model_prefix}.position_embedding_type"
        faults.append(Fault(field, "learned_absolute", rule, f"use rope, or {plan_prefix}.pp=1"))
    if plan.pp > 1 and model.share_embeddings_and_output_weights:
        rule = f"cannot be saved with {stated} under {plan_prefix}.pp={plan.pp}: Megatron asserts against it"
        field = f"{model_prefix}.share_embeddings_and_output_weights"
        faults.append(Fault(field, "true", rule, f"use false, or {plan_prefix}.pp=1"))
    return faults


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
    split: PipelineSplit = EVEN,
    *,
    plan_prefix: str = "plan",
    model_prefix: str = "model",
    pipeline_prefix: str = "pipeline",
) -> list[Fault]:
    """Whether the plan's axes can cut the model.

    Args:
        plan: the plan.
        model: the model's sizes, with defaults resolved.
        split: which layers each pipeline stage holds.
        plan_prefix: what the plan's fields are called after.
        model_prefix: what the model's fields are called after.
        pipeline_prefix: what the split's fields are called after.
    """
    prefixes = {"plan_prefix": plan_prefix, "model_prefix": model_prefix}
    return [
        *_tensor_faults(plan, model, plan_prefix, model_prefix),
        *_context_faults(plan, model, plan_prefix, model_prefix),
        *_vocabulary_shard_faults(plan, model, plan_prefix, model_prefix),
        *plan_expert_faults(plan, model, **prefixes),
        *_prediction_plan_faults(plan, model, plan_prefix, model_prefix),
        *pipeline_faults(plan, model, split, **prefixes, prefix=pipeline_prefix),
    ]


def _tensor_cuts(model: ModelDimensions) -> dict[str, int]:
    """What tp cuts, by name: heads and widths, and with sequence parallelism the sequence too.

    Megatron also copies key-value heads where tp is a multiple of their number; that is refused
    here, as those copies would be one parameter on several ranks.
    """
    names = ["num_attention_heads", "num_query_groups", "seq_length"]
    if model.moe_layers(0, model.num_layers) < model.num_layers:
        names.insert(2, "ffn_hidden_size")
    if model.num_moe_experts is not None and model.moe_shared_expert_intermediate_size is not None:
        names.append("moe_shared_expert_intermediate_size")
    return {name: getattr(model, name) for name in names} | latent_attention_cuts(model)


def _tensor_faults(
    plan: PlanRecord, model: ModelDimensions, plan_prefix: str, model_prefix: str
) -> list[Fault]:
    """Whether tp divides everything that it cuts; with cp the sequence is judged by it."""
    cuts = _tensor_cuts(model)
    remedy = use(divisors(gcd(*cuts.values())), plan.tp)
    faults = []
    for name, size in cuts.items():
        if size % plan.tp and not (name == "seq_length" and plan.cp > 1):
            reason = ", which sequence parallelism splits" if name == "seq_length" else ""
            sized = " + ".join(f"{model_prefix}.{part}" for part in name.split(" + "))
            rule = f"does not divide {sized}={size}{reason}"
            faults.append(Fault(f"{plan_prefix}.tp", plan.tp, rule, remedy))
    return faults


def _context_faults(
    plan: PlanRecord, model: ModelDimensions, plan_prefix: str, model_prefix: str
) -> list[Fault]:
    """cp splits each sequence into 2 · cp chunks, of which each rank has two, and tp splits those."""
    multiple, length = sequence_multiple(plan), model.seq_length
    if plan.cp == 1 or length % multiple == 0:
        return []
    parts = f"2 · cp = {2 * plan.cp}"
    if plan.tp > 1:
        parts += f" and cp · {plan_prefix}.tp = {plan.cp * plan.tp}"
    rule = f"splits {model_prefix}.seq_length={length}, which is no multiple of {parts}"
    working = [cp for cp in divisors(length) if length % sequence_multiple(replace(plan, cp=cp)) == 0]
    choices = [use(working, plan.cp)] if working else []
    choices.append(f"{model_prefix}.seq_length {listed(multiples_around(length, multiple))}")
    return [Fault(f"{plan_prefix}.cp", plan.cp, rule, " or ".join(choices))]


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
