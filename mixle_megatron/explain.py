"""What a config comes to under its plan, as one plain object: what ``mixle-megatron plan`` shows."""

from __future__ import annotations

from dataclasses import asdict
from math import inf, prod
from typing import Any

from mixle_megatron import megatron_names, memory, parameter_count
from mixle_megatron.activations import ActivationTerms
from mixle_megatron.config.here import here_faults
from mixle_megatron.config.load import COMMAND_LINE, LoadedConfig, warnings_of
from mixle_megatron.config.schema import (
    Config,
    batch_dimensions,
    decay_steps,
    effective_config,
    effective_plan,
    model_dimensions,
    pipeline_split,
)
from mixle_megatron.gpu_memory import GpuMemory
from mixle_megatron.optimizer_settings import OptimizerSettings
from mixle_megatron.pipeline_split import EVEN, PipelineSplit
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules.dimensions import ModelDimensions
from mixle_megatron.topology import GROUP_AXES, Topology

RANKS_PER_NODE = 8
MOST_RANKS = 64
"""Largest plan of which every rank, and every pipeline stage, is listed."""
ENDS = 8
"""Ranks and stages listed from either end of a larger plan."""
NOT_COUNTED = "buffers of communication and of the operation that runs, padding of gradient buffers"
"""What a rank holds besides what is estimated."""
MOST_IN_GROUP = 4096
"""Largest group whose ranks are walked to describe it; of a larger one the ends are named."""


def explain(
    loaded: LoadedConfig, *, ranks_per_node: int = RANKS_PER_NODE, gpu: GpuMemory | None = None
) -> dict[str, Any]:
    """The translation of a config that the rules have passed.

    Args:
        loaded: a config and where its values came from.
        ranks_per_node: consecutive ranks that share a node.
        gpu: the memory that a rank is to fit in; None judges no fit.

    Returns:
        Plain data with stable keys; sizes in sequences, tokens and bytes as their names say.
    """
    config = loaded.config
    plan = effective_plan(config)
    topology = Topology(plan)
    return {
        "path": None if loaded.path is None else str(loaded.path),
        "plan": plan.as_dict(),
        "grids": _grids(topology),
        "megatron": _megatron(config, plan),
        "batch": _batch(config, plan),
        "pipeline": _pipeline(config, plan),
        "memory": _memory(config, plan, gpu),
        "ranks": _ranks(topology, ranks_per_node),
        "values": _values(loaded),
        "warnings": [fault.as_dict() for fault in [*warnings_of(loaded), *here_faults(config)]],
    }


def _grids(topology: Topology) -> dict[str, Any]:
    """Both grids in numbers, and how the distributed optimizer lies over the first."""
    dense, expert = topology.dense_sizes, topology.expert_sizes
    return {
        "world_size": topology.world_size,
        "dense": dense,
        "dense_product": prod(dense.values()),
        "expert": expert,
        "expert_product": prod(expert.values()),
        "num_distributed_optimizer_instances": topology.num_distributed_optimizer_instances,
        "optimizer_shards": topology.optimizer_shards,
        "expert_optimizer_shards": topology.expert_optimizer_shards,
    }


def _megatron(config: Config, plan: PlanRecord) -> dict[str, dict[str, Any]]:
    """Megatron's arguments, by what takes them."""
    settings = OptimizerSettings.from_section(config.optimizer, decay_steps=decay_steps(config))
    split = pipeline_split(config)
    parallel = megatron_names.parallel_state_arguments(plan, split)
    own = megatron_names.model_parallel_arguments(plan, split)
    own = {name: value for name, value in own.items() if name not in parallel}
    scale = megatron_names.loss_scale_arguments(settings) if config.precision == "fp16" else {}
    return {
        "initialize_model_parallel": parallel,
        "TransformerConfig": megatron_names.model_arguments(model_dimensions(config)) | own,
        "DistributedDataParallelConfig": megatron_names.distributed_data_parallel_arguments(plan),
        "OptimizerConfig": _finite(megatron_names.optimizer_arguments(settings)) | scale,
        "OptimizerParamScheduler": megatron_names.scheduler_arguments(settings),
        "forward_backward_func": megatron_names.batch_arguments(plan, batch_dimensions(config)),
    }


def _finite(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with infinity as a word, which JSON has no number for."""
    return {name: "inf" if value == inf else value for name, value in arguments.items()}


def _batch(config: Config, plan: PlanRecord) -> dict[str, int]:
    """Sequences and tokens of a microbatch, of a schedule call and of an update."""
    batch = batch_dimensions(config)
    call = batch.micro_batch_size * plan.microbatches
    rank = call * plan.gradient_accumulation_steps
    sequences = {
        "sequences_per_microbatch": batch.micro_batch_size,
        "sequences_per_call_and_rank": call,
        "sequences_per_update_and_rank": rank,
        "sequences_per_update": batch.global_batch_size,
    }
    tokens = {
        name.replace("sequences", "tokens"): size * batch.seq_length for name, size in sequences.items()
    }
    return {
        "seq_length": batch.seq_length,
        "microbatches": plan.microbatches,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "data_parallel_size": plan.data_parallel_size,
        **sequences,
        **tokens,
        "updates": config.run.steps,
        "tokens_of_run": config.run.steps * tokens["tokens_per_update"],
    }


def _memory(config: Config, plan: PlanRecord, gpu: GpuMemory | None) -> dict[str, Any]:
    """Bytes of the stages; of many that differ the first and last ones, while the fit is that of all."""
    model, terms = model_dimensions(config), _activation_terms(config)
    stages = memory.memory_by_stage(
        model,
        plan,
        precision=config.precision,
        optimizer=config.optimizer.name,
        split=pipeline_split(config),
        activations=terms,
    )
    whole = parameter_count.model_parameters(model)
    listed = [stages[index].as_dict() for index in _ends(len(stages), MOST_RANKS)]
    return {
        "parameters": whole.total,
        "expert_parameters": whole.expert,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": model.padded_vocab_size,
        "stages": listed,
        "left_out": plan.pp - sum(stage["stages"] for stage in listed),
        "activations_of": "transformer_engine" if terms.fused else "torch",
        "routing": "even" if whole.expert else None,
        "gpu": None if gpu is None else _fit(stages, gpu),
        "not_counted": NOT_COUNTED,
    }


def _activation_terms(config: Config) -> ActivationTerms:
    """What of a config decides its activations; layers are torch's where the config is for a CPU."""
    model = config.model
    return ActivationTerms(
        micro_batch_size=config.batch.micro_batch_size,
        element_bytes=memory.PARAMETER_BYTES[config.precision],
        activation_func=model.activation_func,
        recompute_granularity=model.recompute_granularity,
        recompute_method=model.recompute_method,
        recompute_num_layers=model.recompute_num_layers,
        hidden_dropout=model.hidden_dropout > 0,
        attention_dropout=model.attention_dropout > 0,
        document_mask=getattr(config.data, "reset_attention_mask", False),  # of indexed data alone
        fused=config.host.device != "cpu",
    )


def _fit(stages: list[memory.StageMemory], gpu: GpuMemory) -> dict[str, Any]:
    """Whether a rank of the fullest stage fits; ``free_bytes`` is negative where it does not."""
    fullest = max(stages, key=lambda stage: stage.total_bytes)
    free = gpu.bytes - fullest.total_bytes
    return {
        "name": gpu.name,
        "memory_bytes": gpu.bytes,
        "fullest_stage": fullest.stage,
        "free_bytes": free,
        "fits": free >= 0,
    }


def _pipeline(config: Config, plan: PlanRecord) -> dict[str, Any]:
    """The layers of each chunk of each stage, counted from 0; of very many stages, those at the ends."""
    split, model = pipeline_split(config), model_dimensions(config)
    listed = _ends(plan.pp, MOST_RANKS)
    return {
        "stages": plan.pp,
        "chunks": split.chunks(plan.pp),
        "even": split == EVEN,
        "left_out": plan.pp - len(listed),
        "listed": [_stage(split, model, plan.pp, stage) for stage in listed],
    }


def _stage(split: PipelineSplit, model: ModelDimensions, pp: int, stage: int) -> dict[str, Any]:
    """A stage's layers, chunk by chunk, as ``[first, last]``, and what it predicts beyond the next token."""
    chunks = split.stage_layers(model.num_layers, pp, stage)
    predicts = stage == split.prediction_stage(pp) and model.mtp_num_layers is not None
    return {
        "stage": stage,
        "chunks": [[held.start, held.stop - 1] if held else [] for held in chunks],
        "prediction_layers": model.mtp_num_layers if predicts else 0,
    }


def _ends(number: int, most: int) -> list[int]:
    """All of ``number`` indices, or where they are more than ``most`` the first and the last ones."""
    return list(range(number)) if number <= most else [*range(ENDS), *range(number - ENDS, number)]


def _ranks(topology: Topology, ranks_per_node: int) -> dict[str, Any]:
    """Each rank's node, coordinates and groups; of a large plan the first and last ranks."""
    world_size = topology.world_size
    listed = _ends(world_size, MOST_RANKS)
    return {
        "world_size": world_size,
        "ranks_per_node": ranks_per_node,
        "nodes": -(-world_size // ranks_per_node),
        "left_out": world_size - len(listed),
        "listed": [_rank(topology, rank, ranks_per_node) for rank in listed],
    }


def _rank(topology: Topology, rank: int, ranks_per_node: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "node": rank // ranks_per_node,
        "mixle": topology.mixle_coordinate(rank),
        "megatron": asdict(topology.coordinate(rank)),
        "groups": {name: _group(topology, name, rank) for name in GROUP_AXES},
    }


def _group(topology: Topology, name: str, rank: int) -> dict[str, Any]:
    """A group by its size and, in short, its ranks: ``0-3``, ``0-14:2`` (in steps of 2)."""
    size, first, last = topology.extent(name, rank)
    if size > MOST_IN_GROUP:
        return {"size": size, "ranks": f"{first}, …, {last}"}
    return {"size": size, "ranks": ranks_in_short(topology.group(name, rank))}


def ranks_in_short(ranks: tuple[int, ...], most_runs: int = 8) -> str:
    """Ascending ranks as runs of equal steps; of more than ``most_runs`` the last one is named only."""
    runs, start = [], 0
    while start < len(ranks):
        end = _run_end(ranks, start)
        runs.append(_run_in_short(ranks[start:end]))
        start = end
    if len(runs) > most_runs:
        runs = [*runs[:most_runs], "…", runs[-1]]
    return ",".join(runs)


def _run_end(ranks: tuple[int, ...], start: int) -> int:
    """Where the run of equal steps that begins at ``start`` ends; two ranks of a wide step are no run."""
    if start + 1 == len(ranks):
        return start + 1
    step, end = ranks[start + 1] - ranks[start], start + 2
    while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
        end += 1
    return end if step == 1 or end - start > 2 else start + 1


def _run_in_short(run: tuple[int, ...]) -> str:
    if len(run) < 3:
        return ",".join(map(str, run))
    step = run[1] - run[0]
    return f"{run[0]}-{run[-1]}" + (f":{step}" if step > 1 else "")


def _values(loaded: LoadedConfig) -> list[dict[str, Any]]:
    """Every effective value by its dotted key, with where it came from."""
    dump = effective_config(loaded.config).model_dump(mode="json")
    dump["plan"]["microbatches"] = effective_plan(loaded.config).microbatches
    flat = {"precision": dump.pop("precision")}
    for section, values in dump.items():
        flat |= {f"{section}.{key}": value for key, value in values.items()}
    return [{"key": key, "value": value, "source": _origin(key, loaded)} for key, value in flat.items()]


def _origin(key: str, loaded: LoadedConfig) -> str:
    """A key of its own, the override of its whole section, or the default; and whether it was auto."""
    section = key.partition(".")[0]
    whole = loaded.sources.get(section)
    origin = loaded.sources.get(key) or (whole if whole == COMMAND_LINE else "default")
    automatic = key == "plan.microbatches" and loaded.config.plan.microbatches == "auto"
    return f"{origin}: auto" if automatic else origin
