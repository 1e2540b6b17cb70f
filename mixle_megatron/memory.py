"""What a rank of each pipeline stage holds, from closed formulas: training state, and activations.

Buffers of communication and of the operation that runs, and the padding of Megatron's gradient buffers,
are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from mixle_megatron.activations import (
    ActivationTerms,
    LayerActivations,
    chunk_activations,
)
from mixle_megatron.parameter_count import stage_parameters
from mixle_megatron.passes_in_flight import most_in_flight
from mixle_megatron.pipeline_split import EVEN, PipelineSplit
from mixle_megatron.precision import EXECUTED, RECIPES
from mixle_megatron.rules.dimensions import ModelDimensions
from mixle_megatron.topology import Topology

PARAMETER_BYTES = {name: RECIPES[name].parameter_bytes for name in EXECUTED}
"""Bytes of one model parameter for each precision."""

GRADIENT_BYTES = 4
"""Gradients are accumulated and reduced in fp32."""

OPTIMIZER_STATES = {"adam": 2, "sgd": 1}
"""fp32 values that an optimizer keeps for each parameter: adam's two moments, sgd's momentum."""


MOST_STAGES = 4096
"""Most stages that are walked to find those that are alike; of more, the ends are."""
ENDS = 8
"""Stages looked at from either end of a longer pipeline."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one rank of a pipeline stage.

    Attributes:
        stage: index of the pipeline stage.
        stages: how many stages in a row are alike, this one included.
        layers: transformer layers of the stage.
        expert_layers: those of them that have experts.
        prediction_layers: multi-token prediction layers of the stage.
        parameters: parameters that the rank holds: its tensor-parallel share.
        expert_parameters: those of them that belong to its routed experts.
        parameter_bytes: bytes of those, in the precision's dtype.
        gradient_bytes: bytes of their fp32 gradients.
        main_parameter_bytes: bytes of this rank's shard of the fp32 main parameters; 0 in fp32,
            where the parameters themselves are updated.
        optimizer_state_bytes: bytes of this rank's shard of the optimizer's state.
        passes_in_flight: forward passes of a chunk whose backward pass is to come, at most.
        activation_bytes: the most that they keep for it, and what recomputation adds; 0 where no terms
            of the activations were given.
    """

    stage: int
    stages: int
    layers: int
    expert_layers: int
    prediction_layers: int
    parameters: int
    expert_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    main_parameter_bytes: int
    optimizer_state_bytes: int
    passes_in_flight: int = 0
    activation_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of them together."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.main_parameter_bytes
            + self.optimizer_state_bytes
            + self.activation_bytes
        )

    def as_dict(self) -> dict[str, int]:
        """Plain data, for ``--json``."""
        return asdict(self) | {"total_bytes": self.total_bytes}


def stage_memory(
    model: ModelDimensions,
    plan: Any,
    stage: int,
    *,
    precision: str,
    optimizer: str = "adam",
    split: PipelineSplit = EVEN,
    activations: ActivationTerms | None = None,
) -> StageMemory:
    """Bytes on one rank of a stage.

    Args:
        model: the model's sizes, with the vocabulary padded for the plan's tp.
        plan: an object with the fields of a ``ParallelPlan``.
        stage: index of the pipeline stage.
        precision: a key of :data:`PARAMETER_BYTES`.
        optimizer: a key of :data:`OPTIMIZER_STATES`.
        split: which layers each stage holds.
        activations: what decides which activations are kept; None counts none.
    """
    held, topology = stage_parameters(model, plan, stage, split), Topology(plan)
    shard = -(-held.dense // topology.optimizer_shards)
    shard += -(-held.expert // topology.expert_optimizer_shards)
    passes, kept = (0, 0)
    if activations is not None:
        passes, kept = stage_activations(LayerActivations(model, plan, activations), split, stage)
    return StageMemory(
        stage=stage,
        stages=1,
        layers=held.layers,
        expert_layers=held.expert_layers,
        prediction_layers=held.prediction_layers,
        parameters=held.total,
        expert_parameters=held.expert,
        parameter_bytes=held.total * PARAMETER_BYTES[precision],
        gradient_bytes=held.total * GRADIENT_BYTES,
        main_parameter_bytes=0 if precision == "fp32" else shard * 4,
        optimizer_state_bytes=shard * 4 * OPTIMIZER_STATES[optimizer],
        passes_in_flight=passes,
        activation_bytes=kept,
    )


def stage_activations(parts: LayerActivations, split: PipelineSplit, stage: int) -> tuple[int, int]:
    """Forward passes in flight on a rank of a stage, at most, and the bytes of activations that it holds.

    Args:
        parts: what the parts of the model keep of a microbatch.
        split: which layers each stage holds.
        stage: index of the pipeline stage.
    """
    chunks = chunk_activations(parts, split, stage)
    return most_in_flight(chunks, parts.plan.pp, stage, parts.plan.microbatches)


def memory_by_stage(
    model: ModelDimensions,
    plan: Any,
    *,
    precision: str,
    optimizer: str = "adam",
    split: PipelineSplit = EVEN,
    activations: ActivationTerms | None = None,
) -> list[StageMemory]:
    """The stages in order, those in a row that are alike once; of very many, those at the ends.

    Arguments are those of :func:`stage_memory`.
    """
    alike_unseen = split.pipeline_model_parallel_layout is None and (
        model.num_moe_experts is None or model.moe_layer_freq == 1
    )
    runs: list[StageMemory] = []
    for stage in _walked(plan.pp):
        memory = stage_memory(
            model,
            plan,
            stage,
            precision=precision,
            optimizer=optimizer,
            split=split,
            activations=activations,
        )
        if runs and _continues(runs[-1], memory, alike_unseen):
            runs[-1] = replace(runs[-1], stages=stage - runs[-1].stage + 1)
        else:
            runs.append(memory)
    return runs


def _continues(run: StageMemory, memory: StageMemory, alike_unseen: bool) -> bool:
    """Whether a stage is like those of a run, which it follows or is known to be joined to."""
    follows = memory.stage == run.stage + run.stages or alike_unseen
    return follows and replace(memory, stage=run.stage, stages=run.stages) == run


def _walked(pp: int) -> Iterator[int]:
    yield from range(pp) if pp <= MOST_STAGES else [*range(ENDS), *range(pp - ENDS, pp)]
