"""Whether a plan fits the nodes of a job, and what it costs where its groups leave them."""

from __future__ import annotations

from dataclasses import replace

from mixle_megatron.config.check import located
from mixle_megatron.config.load import COMMAND_LINE, LoadedConfig, check_config
from mixle_megatron.config.schema import Config, effective_plan, model_dimensions
from mixle_megatron.errors import Fault
from mixle_megatron.rules.dimensions import ModelDimensions
from mixle_megatron.rules.nearest import divisors, use

BYTES = {"fp32": 4}
"""Bytes of an activation by precision; of every other precision it is 2."""

_AS_TOLD = "one 400 Gb/s port carries a ninth of an H100's NVLink, 50 against 450 GB/s each way"


def world_faults(loaded: LoadedConfig, nodes: int, gpus_per_node: int) -> list[Fault]:
    """Whether the plan has one rank for each GPU of the nodes, and which nodes or plan would do."""
    plan, ranks = effective_plan(loaded.config), nodes * gpus_per_node
    if plan.world_size == ranks:
        return []
    axes = " · ".join(
        f"{axis}={plan.axis_sizes[axis]}" for axis in ("dp_replicate", "dp_shard", "tp", "pp", "cp")
    )
    rule = f"({axes}) is not --nodes={nodes} · --gpus-per-node={gpus_per_node} = {ranks} ranks"
    per_node = max(size for size in range(1, gpus_per_node + 1) if plan.world_size % size == 0)
    remedy = f"use --nodes={plan.world_size // per_node} --gpus-per-node={per_node}"
    shards = _shards_that_fit(loaded, ranks)
    if shards:
        remedy += f", or plan.dp_shard={shards}"
    return [Fault("plan.world_size", plan.world_size, rule, remedy, COMMAND_LINE)]


def _shards_that_fit(loaded: LoadedConfig, ranks: int) -> int | None:
    """The dp_shard with which the plan has ``ranks`` ranks and passes every rule, if there is one."""
    plan = loaded.config.plan
    others = effective_plan(loaded.config).world_size // plan.dp_shard
    if ranks % others:
        return None
    changed = plan.model_copy(update={"dp_shard": ranks // others})
    config = loaded.config.model_copy(update={"plan": changed})
    return None if check_config(replace(loaded, config=config)) else ranks // others


def network_warnings(loaded: LoadedConfig, domain: int) -> list[Fault]:
    """Groups that exchange something in every layer and do not lie within GPUs that NVLink connects.

    Ranks of tp and then of cp are consecutive, so that their groups lie within ``domain`` GPUs exactly
    where their size divides it.

    Args:
        loaded: a checked config.
        domain: GPUs that NVLink connects, such as those of a node.
    """
    config, plan = loaded.config, effective_plan(loaded.config)
    if config.host.device == "cpu" or domain >= plan.world_size:
        return []
    if domain % plan.tp:
        place = f"the {domain} GPU(s) that NVLink connects"
        told = f"{_in_words(tensor_bytes(config))} a layer and microbatch for its tensor-parallel group"
        warning = _leaving("plan.tp", plan.tp, place, told, use(divisors(domain), plan.tp))
    elif domain % (plan.tp * plan.cp):
        room = domain // plan.tp
        place = f"the {room} place(s) that plan.tp={plan.tp} leaves among {domain} GPUs that NVLink connects"
        told = f"{_in_words(context_bytes(config))} a layer and microbatch of keys, values and gradients"
        warning = _leaving("plan.cp", plan.cp, place, told, use(divisors(room), plan.cp))
    else:
        return []
    return located([warning], loaded.sources)


def _leaving(field: str, size: int, place: str, told: str, remedy: str) -> Fault:
    rule = f"does not divide {place}, so that groups cross nodes: each rank sends {told} ({_AS_TOLD})"
    return Fault(field, size, rule, remedy)


def tensor_bytes(config: Config) -> int:
    """Bytes that a rank sends for tensor parallelism, a layer and microbatch.

    With sequence parallelism a layer gathers its input twice and scatters its output twice in the forward
    pass, and in the backward pass again, where its two inputs are gathered once more for the weights'
    gradients: ten times (tp - 1) / tp of one activation (Korthikanti et al. 2022, section 4.2.2, and
    Megatron's ``LinearWithGradAccumulationAndAsyncCommunication``).
    """
    plan = effective_plan(config)
    return 10 * _tokens(config) * config.model.hidden_size * _width(config) * (plan.tp - 1) // plan.tp


def context_bytes(config: Config) -> int:
    """Bytes that a rank sends for context parallelism, a layer and microbatch.

    Keys and values pass once through the ring in the forward pass; in the backward pass they do again, with
    their gradients: three times cp - 1 of a rank's own keys and values.
    """
    plan, model = effective_plan(config), model_dimensions(config)
    own = _tokens(config) * _key_and_value_channels(model) * _width(config) // plan.tp
    return 3 * (plan.cp - 1) * own


def _tokens(config: Config) -> int:
    """Tokens of a microbatch that one context-parallel rank holds."""
    return config.model.seq_length * config.batch.micro_batch_size // config.plan.cp


def _key_and_value_channels(model: ModelDimensions) -> int:
    """Channels of a token's keys and values, of all heads."""
    if model.multi_latent_attention:
        channels = model.qk_head_dim + model.qk_pos_emb_head_dim + model.v_head_dim
        return model.num_attention_heads * channels
    return 2 * model.num_query_groups * model.kv_channels


def _width(config: Config) -> int:
    return BYTES.get(config.precision, 2)


def _in_words(number: int) -> str:
    size = number / 2**20
    return f"{size / 2**10:.1f} GiB" if size >= 1024 else f"{size:.1f} MiB"
