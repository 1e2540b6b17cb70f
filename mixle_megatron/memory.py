"""What a rank of each pipeline stage holds, from closed formulas: parameters and their training state.

Activations, communication buffers and the padding of Megatron's gradient buffers are not counted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules.dimensions import ModelDimensions
from mixle_megatron.topology import Topology

PARAMETER_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of one model parameter for each precision."""

GRADIENT_BYTES = 4
"""Gradients are accumulated and reduced in fp32."""

OPTIMIZER_STATES = {"adam": 2, "sgd": 1}
"""fp32 values that an optimizer keeps for each parameter: adam's two moments, sgd's momentum."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one rank of a pipeline stage.

    Attributes:
        stage: index of the pipeline stage.
        stages: how many stages in a row are alike, this one included.
        layers: transformer layers of the stage.
        parameters: parameters that the rank holds: its tensor-parallel share.
        parameter_bytes: bytes of those, in the precision's dtype.
        gradient_bytes: bytes of their fp32 gradients.
        main_parameter_bytes: bytes of this rank's shard of the fp32 main parameters; 0 in fp32,
            where the parameters themselves are updated.
        optimizer_state_bytes: bytes of this rank's shard of the optimizer's state.
    """

    stage: int
    stages: int
    layers: int
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    main_parameter_bytes: int
    optimizer_state_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of them together."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.main_parameter_bytes
            + self.optimizer_state_bytes
        )

    def as_dict(self) -> dict[str, int]:
        """Plain data, for ``--json``."""
        return asdict(self) | {"total_bytes": self.total_bytes}


def norm_parameters(model: ModelDimensions, width: int) -> int:
    """A LayerNorm has weight and bias, an RMSNorm a weight."""
    return width * (2 if model.normalization == "LayerNorm" else 1)


def layer_parameters(model: ModelDimensions, tp: int = 1) -> int:
    """Parameters of one transformer layer on one tensor-parallel rank.

    Megatron cuts query-key-value and the first feed-forward matrix by rows (column parallel,
    biases cut with them), and projection and the second feed-forward matrix by columns (row
    parallel, biases whole). Norms are whole on every rank.
    """
    hidden, head = model.hidden_size, model.kv_channels
    queries = model.num_attention_heads * head
    qkv = queries + 2 * model.num_query_groups * head
    fc1 = model.ffn_hidden_size * (2 if model.gated_linear_unit else 1)
    cut = qkv * hidden + queries * hidden + fc1 * hidden + model.ffn_hidden_size * hidden
    whole = 2 * norm_parameters(model, hidden)
    if model.add_bias_linear or model.add_qkv_bias:
        cut += qkv
    if model.add_bias_linear:
        cut += fc1
        whole += 2 * hidden
    if model.qk_layernorm:
        whole += 2 * norm_parameters(model, head)
    return cut // tp + whole


def embedding_parameters(model: ModelDimensions, tp: int = 1) -> int:
    """Rows of the word embedding on one tensor-parallel rank, and the learned positions (whole)."""
    learned = model.position_embedding_type == "learned_absolute"
    positions = model.max_position_embeddings * model.hidden_size if learned else 0
    return word_parameters(model, tp) + positions


def word_parameters(model: ModelDimensions, tp: int = 1) -> int:
    """One tensor-parallel rank's rows of the word embedding, or of the output layer."""
    return model.padded_vocab_size // tp * model.hidden_size


def parameter_count(model: ModelDimensions, plan: Any, stage: int) -> int:
    """Parameters on one rank of a pipeline stage.

    The last stage holds the final norm and, unless it is the first stage too and shares the
    embedding's, a word matrix for the output: tied embeddings are on the first and on the last stage.

    Args:
        model: the model's sizes, with the vocabulary padded for the plan's tp.
        plan: an object with the fields of a ``ParallelPlan``.
        stage: index of the pipeline stage, from 0.
    """
    count = model.num_layers // plan.pp * layer_parameters(model, plan.tp)
    if stage == 0:
        count += embedding_parameters(model, plan.tp)
    if stage == plan.pp - 1:
        count += norm_parameters(model, model.hidden_size)
        if plan.pp > 1 or not model.share_embeddings_and_output_weights:
            count += word_parameters(model, plan.tp)
    return count


def total_parameters(model: ModelDimensions) -> int:
    """Parameters of the whole model, each once and without rows of padding, whatever the plan."""
    return parameter_count(replace(model, padded_vocab_size=model.vocab_size), PlanRecord(), 0)


def stage_memory(
    model: ModelDimensions, plan: Any, stage: int, *, precision: str, optimizer: str = "adam", stages: int = 1
) -> StageMemory:
    """Bytes on one rank of a stage.

    Args:
        model: the model's sizes, with the vocabulary padded for the plan's tp.
        plan: an object with the fields of a ``ParallelPlan``.
        stage: index of the pipeline stage.
        precision: a key of :data:`PARAMETER_BYTES`.
        optimizer: a key of :data:`OPTIMIZER_STATES`.
        stages: how many stages in a row the result stands for.
    """
    parameters = parameter_count(model, plan, stage)
    shard = -(-parameters // Topology(plan).optimizer_shards)
    return StageMemory(
        stage=stage,
        stages=stages,
        layers=model.num_layers // plan.pp,
        parameters=parameters,
        parameter_bytes=parameters * PARAMETER_BYTES[precision],
        gradient_bytes=parameters * GRADIENT_BYTES,
        main_parameter_bytes=0 if precision == "fp32" else shard * 4,
        optimizer_state_bytes=shard * 4 * OPTIMIZER_STATES[optimizer],
    )


def memory_by_stage(
    model: ModelDimensions, plan: Any, *, precision: str, optimizer: str = "adam"
) -> list[StageMemory]:
    """The stages that differ: the first, those between (all alike), and the last."""
    runs = [(0, 1), (1, plan.pp - 2), (plan.pp - 1, 1)]
    kinds = runs[:1] if plan.pp == 1 else [run for run in runs if run[1] > 0]
    return [
        stage_memory(model, plan, stage, precision=precision, optimizer=optimizer, stages=stages)
        for stage, stages in kinds
    ]
