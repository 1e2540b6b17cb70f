"""How many parameters a rank of each pipeline stage holds, from closed formulas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mixle_megatron.pipeline_split import EVEN, PipelineSplit
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules.dimensions import ModelDimensions


@dataclass(frozen=True)
class StageParameters:
    """Parameters on one rank of a pipeline stage.

    Attributes:
        layers: transformer layers of the stage, those with experts included.
        expert_layers: those of them that have experts.
        prediction_layers: multi-token prediction layers of the stage.
        dense: parameters that the dense grid's data-parallel ranks share, routers and shared experts
            included.
        expert: parameters of the rank's routed experts.
    """

    layers: int
    expert_layers: int
    prediction_layers: int
    dense: int
    expert: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.expert


def norm_parameters(model: ModelDimensions, width: int) -> int:
    """A LayerNorm has weight and bias, an RMSNorm a weight."""
    return width * (2 if model.normalization == "LayerNorm" else 1)


def attention_parameters(model: ModelDimensions, tp: int = 1) -> int:
    """Parameters of one layer's attention, its input norm included, on one tensor-parallel rank.

    Megatron cuts query-key-value by rows (column parallel, biases cut with them) and the projection
    by columns (row parallel, biases whole). Norms are whole on every rank.
    """
    whole = norm_parameters(model, model.hidden_size) + (model.hidden_size if model.add_bias_linear else 0)
    if model.multi_latent_attention:
        return whole + _latent_attention(model, tp)
    hidden, head = model.hidden_size, model.kv_channels
    queries = model.num_attention_heads * head
    qkv = queries + 2 * model.num_query_groups * head
    cut = qkv * hidden + queries * hidden
    if model.add_bias_linear or model.add_qkv_bias:
        cut += qkv
    if model.qk_layernorm:
        whole += 2 * norm_parameters(model, head)
    return cut // tp + whole


def _latent_attention(model: ModelDimensions, tp: int) -> int:
    """Projections and norms of multi-latent attention: those down to a rank are whole, those up are cut."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    queries = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    whole = (model.kv_lora_rank + model.qk_pos_emb_head_dim) * hidden
    cut = heads * (model.qk_head_dim + model.v_head_dim) * model.kv_lora_rank
    cut += heads * model.v_head_dim * hidden
    if model.q_lora_rank is None:
        cut += queries * hidden
    else:
        whole, cut = whole + model.q_lora_rank * hidden, cut + queries * model.q_lora_rank
    if model.qk_layernorm:
        whole += norm_parameters(model, model.kv_lora_rank + (model.q_lora_rank or 0))
    return cut // tp + whole


def feed_forward_parameters(model: ModelDimensions, width: int, tp: int = 1) -> int:
    """Parameters of a feed-forward layer of some width on one of ``tp`` ranks, its norm not included."""
    fc1 = width * (2 if model.gated_linear_unit else 1)
    cut, whole = (fc1 + width) * model.hidden_size, 0
    if model.add_bias_linear:
        cut, whole = cut + fc1, model.hidden_size
    return cut // tp + whole


def layer_parameters(model: ModelDimensions, tp: int = 1) -> int:
    """Parameters of one dense transformer layer on one tensor-parallel rank."""
    feed_forward = feed_forward_parameters(model, model.ffn_hidden_size, tp)
    return attention_parameters(model, tp) + norm_parameters(model, model.hidden_size) + feed_forward


def expert_layer_parameters(model: ModelDimensions, tp: int = 1) -> int:
    """The same of a layer with experts, but for its routed experts: the router, and shared experts.

    The router is whole on every rank, and has a bias of its own with ``add_bias_linear``. The bias
    that balances experts is no parameter.
    """
    experts, shared = model.num_moe_experts or 0, model.moe_shared_expert_intermediate_size
    count = attention_parameters(model, tp) + norm_parameters(model, model.hidden_size)
    count += experts * (model.hidden_size + (1 if model.add_bias_linear else 0))
    return count + (feed_forward_parameters(model, shared, tp) if shared is not None else 0)


def routed_parameters(model: ModelDimensions, ep: int = 1, etp: int = 1) -> int:
    """Parameters of one layer's routed experts on one rank of the expert grid."""
    experts = (model.num_moe_experts or 0) // ep
    return experts * feed_forward_parameters(model, model.expert_width, etp)


def embedding_parameters(model: ModelDimensions, tp: int = 1) -> int:
    """Rows of the word embedding on one tensor-parallel rank, and the learned positions (whole)."""
    learned = model.position_embedding_type == "learned_absolute"
    positions = model.max_position_embeddings * model.hidden_size if learned else 0
    return word_parameters(model, tp) + positions


def word_parameters(model: ModelDimensions, tp: int = 1) -> int:
    """One tensor-parallel rank's rows of the word embedding, or of the output layer."""
    return model.padded_vocab_size // tp * model.hidden_size


def prediction_parameters(model: ModelDimensions, tp: int = 1) -> int:
    """What a multi-token prediction layer has besides its transformer layer.

    It norms a hidden state and an embedding, projects both down to one (column parallel, without
    bias), and norms what its layer makes of it.
    """
    hidden = model.hidden_size
    return 3 * norm_parameters(model, hidden) + 2 * hidden * hidden // tp


def stage_parameters(
    model: ModelDimensions, plan: Any, stage: int, split: PipelineSplit = EVEN
) -> StageParameters:
    """Parameters on one rank of a pipeline stage.

    Args:
        model: the model's sizes, with the vocabulary padded for the plan's tp.
        plan: an object with the fields of a ``ParallelPlan``.
        stage: index of the pipeline stage, from 0.
        split: which layers each stage holds.
    """
    chunks = split.stage_layers(model.num_layers, plan.pp, stage)
    layers = sum(map(len, chunks))
    with_experts = sum(model.moe_layers(held.start, held.stop) for held in chunks)
    predictions = (model.mtp_num_layers or 0) if stage == split.prediction_stage(plan.pp) else 0
    # A prediction layer is built like the model's last layer.
    predicts_with_experts = predictions if model.is_moe_layer(model.num_layers - 1) else 0
    routed = with_experts + predicts_with_experts
    dense = layers + predictions - routed
    return StageParameters(
        layers=layers,
        expert_layers=with_experts,
        prediction_layers=predictions,
        dense=dense * layer_parameters(model, plan.tp)
        + (routed * expert_layer_parameters(model, plan.tp) if routed else 0)
        + predictions * prediction_parameters(model, plan.tp)
        + _end_parameters(model, plan, stage, chunks, predictions > 0),
        expert=routed * routed_parameters(model, plan.ep, plan.etp) if routed else 0,
    )


def _end_parameters(
    model: ModelDimensions, plan: Any, stage: int, chunks: list[range], predicts: bool
) -> int:
    """Embedding, final norm and output layer, on the stages that have them.

    The last stage holds, unless it is the first one too and shares the embedding's, a word matrix for
    the output: tied embeddings are on the first and on the last stage. Prediction layers embed tokens
    as the first stage does, and move the final norm to the stage of the last layer.
    """
    count, last = 0, stage == plan.pp - 1
    if stage == 0 or predicts:
        count += embedding_parameters(model, plan.tp)
    has_last_layer = any(held and held.stop == model.num_layers for held in chunks)
    if last if model.mtp_num_layers is None else has_last_layer:
        count += norm_parameters(model, model.hidden_size)
    if last and (plan.pp > 1 or not model.share_embeddings_and_output_weights):
        count += word_parameters(model, plan.tp)
    return count


def parameter_count(model: ModelDimensions, plan: Any, stage: int, split: PipelineSplit = EVEN) -> int:
    """All parameters on one rank of a pipeline stage; arguments as of :func:`stage_parameters`."""
    return stage_parameters(model, plan, stage, split).total


def model_parameters(model: ModelDimensions) -> StageParameters:
    """Parameters of the whole model, each once and without rows of padding, whatever the plan."""
    return stage_parameters(replace(model, padded_vocab_size=model.vocab_size), PlanRecord(), 0)


def total_parameters(model: ModelDimensions) -> int:
    """The number of them all."""
    return model_parameters(model).total


def activated_parameters(model: ModelDimensions) -> int:
    """Parameters that one token's prediction uses: of routed experts, those that it is sent to.

    The whole embedding and output layer are among them, and prediction layers, which serve training
    alone, are not: papers count both ways.
    """
    held = model_parameters(replace(model, mtp_num_layers=None))
    if model.num_moe_experts is None:
        return held.total
    return held.dense + held.expert * model.moe_router_topk // model.num_moe_experts
