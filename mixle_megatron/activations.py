"""What a pipeline stage keeps of a forward pass for its backward pass, from closed formulas. No torch.

The count is that of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models" (arXiv:2205.05198), section 4, with sequence parallelism wherever tp is more than 1: a rank keeps
1 / (tp · cp) of a layer. What is counted otherwise than there:

* attention keeps no softmax: ``scaled_dot_product_attention`` and Transformer Engine compute it again, and
  keep one fp32 number for each query and head. Only torch's attention with dropout keeps all scores;
* key-value heads may be fewer, feed-forward layers gated and biases absent, and where nothing is dropped
  no mask is kept;
* the logits are kept in fp32 until their gradient, and a stage keeps what it sent to the next one.

Two kinds of layers are told apart. ``torch`` are this package's own, which run on a CPU: a test holds the
formulas against what autograd keeps. ``transformer_engine`` are fused norms, SwiGLU and attention, which
keep their inputs and outputs, once each, as in the paper; no GPU has been measured.

Tokens are taken to be routed evenly to experts. ``moe_expert_capacity_factor`` is not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mixle_megatron.passes_in_flight import ChunkActivations
from mixle_megatron.pipeline_split import PipelineSplit
from mixle_megatron.rules.dimensions import ModelDimensions

INTERMEDIATES = {"gelu": 1, "silu": 1, "relu": 0, "squared_relu": 1, "quick_gelu": 2}
"""Tensors of its width that an activation function keeps, besides what it gives."""

FP32 = 4
TOKEN_ID = 8


@dataclass(frozen=True)
class ActivationTerms:
    """What besides a model's sizes and the plan decides which activations are kept.

    Attributes:
        micro_batch_size: sequences of one forward pass.
        element_bytes: bytes of one activation: 4 in fp32, 2 in bf16 and fp16.
        activation_func: a key of :data:`INTERMEDIATES`.
        recompute_granularity: ``none``, ``selective`` (core attention) or ``full`` (whole layers).
        recompute_method: ``uniform`` or ``block``; of full recomputation alone.
        recompute_num_layers: layers of a unit (uniform), or that are recomputed of a chunk (block).
        hidden_dropout: whether, and not how much, is dropped of the residual stream.
        attention_dropout: the same of attention's weights.
        document_mask: whether a mask keeps attention within documents.
        fused: whether norms, SwiGLU and attention are Transformer Engine's.
    """

    micro_batch_size: int
    element_bytes: int = FP32
    activation_func: str = "gelu"
    recompute_granularity: str = "none"
    recompute_method: str = "none"
    recompute_num_layers: int | None = None
    hidden_dropout: bool = False
    attention_dropout: bool = False
    document_mask: bool = False
    fused: bool = False


@dataclass(frozen=True)
class LayerActivations:
    """Bytes that the parts of a model keep of one microbatch on one rank.

    Attributes:
        model: the model's sizes.
        plan: an object with the fields of a ``ParallelPlan``.
        terms: what else decides it.
    """

    model: ModelDimensions
    plan: Any
    terms: ActivationTerms

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a context-parallel rank."""
        return self.terms.micro_batch_size * self.model.seq_length // self.plan.cp

    @property
    def hidden(self) -> int:
        """One tensor of the model's width: a layer's input, or what a stage sends to the next."""
        return self._shared(self._channels(self.model.hidden_size))

    def layer(self, has_experts: bool) -> int:
        """A transformer layer, all of it kept or, of a selective one, all but its core attention."""
        without_core = self.terms.recompute_granularity == "selective"
        attention = self._core_recomputed() if without_core else self._core()
        hidden = self._channels(self.model.hidden_size)
        dense = hidden + self._feed_forward(self.model.ffn_hidden_size)
        feed_forward = self._mixture() if has_experts else dense
        masks = 2 * self._mask() if self.terms.hidden_dropout else 0
        residual = 2 * self._norm(self.model.hidden_size) + hidden + masks
        return self._shared(residual + self._projections() + attention + feed_forward) + self._rotary()

    def rebuilt_core(self) -> int:
        """What selective recomputation computes again in one layer at a time; torch copies its inputs."""
        kept = self._context() + (self._queries_keys_values() if self.terms.fused else 0)
        return self._shared(self._core() - kept)

    def document_mask(self) -> int:
        """The mask of a microbatch, which its layers share and every tensor-parallel rank has whole."""
        if not self.terms.document_mask:
            return 0
        return self._channels(self.terms.micro_batch_size * self.model.seq_length**2)

    def embedding(self) -> int:
        """The tokens that were looked up, and the mask of what was dropped."""
        mask = self._shared(self._mask()) if self.terms.hidden_dropout else 0
        return self.tokens * TOKEN_ID + mask

    def head(self) -> int:
        """The final norm, and of each prediction the output layer's input and the logits' softmax in fp32."""
        hidden, predictions = self._channels(self.model.hidden_size), 1 + (self.model.mtp_num_layers or 0)
        logits = FP32 * self.model.padded_vocab_size // self.plan.tp
        each = self._shared(hidden) + self.tokens * (logits + TOKEN_ID)
        return self._shared(self._norm(self.model.hidden_size)) + predictions * each

    def prediction(self, has_experts: bool) -> int:
        """A multi-token prediction layer: three norms, a projection of two hidden states, and a layer."""
        norms, joined = 3 * self._norm(self.model.hidden_size), 2 * self._channels(self.model.hidden_size)
        return self.layer(has_experts) + self._shared(norms + joined) + self.tokens * TOKEN_ID

    def _shared(self, bytes_per_token: int) -> int:
        """Of tokens or channels that the tensor-parallel ranks share."""
        return self.tokens * bytes_per_token // self.plan.tp

    def _channels(self, number: int) -> int:
        return number * self.terms.element_bytes

    def _mask(self) -> int:
        """What dropout keeps: a byte an element, or on a CPU an element."""
        return self.model.hidden_size * (1 if self.terms.fused else self.terms.element_bytes)

    def _norm(self, width: int, heads: int = 1) -> int:
        """A norm's input and statistics; torch's RMSNorm keeps two copies of the input in fp32."""
        is_rms = self.model.normalization == "RMSNorm"
        if is_rms and not self.terms.fused:
            return heads * (2 * FP32 * width + FP32)
        return heads * (self._channels(width) + (1 if is_rms else 2) * FP32)

    def _queries(self) -> int:
        model = self.model
        if model.multi_latent_attention:
            return model.num_attention_heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
        return model.num_attention_heads * model.kv_channels

    def _values(self) -> int:
        """Channels of the values, which torch's latent attention fills up to those of the queries."""
        model = self.model
        if not model.multi_latent_attention:
            return model.num_query_groups * model.kv_channels
        narrow = model.num_attention_heads * model.v_head_dim
        return narrow if self.terms.fused else max(narrow, self._queries())

    def _queries_keys_values(self) -> int:
        keys = self._queries() if self.model.multi_latent_attention else self._values()
        return self._channels(self._queries() + keys + self._values())

    def _context(self) -> int:
        """What attention gives, the input of its projection."""
        model = self.model
        width = model.v_head_dim if model.multi_latent_attention else model.kv_channels
        return self._channels(model.num_attention_heads * width)

    def _core(self) -> int:
        """Core attention and the input of its projection; torch keeps what its kernel gave besides."""
        kept, heads = self._queries_keys_values() + self._context(), self.model.num_attention_heads
        if self.terms.fused:
            return kept + FP32 * heads
        if self.terms.attention_dropout:
            # all in fp32: queries, keys and values of every head, and scores three times
            return self._context() + 3 * FP32 * (self._queries() + heads * self.model.seq_length)
        padded = self._values() if self.model.multi_latent_attention else self._queries()
        return kept + self._channels(padded) + FP32 * heads

    def _core_recomputed(self) -> int:
        """The same where core attention is recomputed: its inputs, and the input of its projection.

        Values are a view of what the layer projected, so that all of it stays; queries and keys that
        rotary positions turned, and queries of shared keys, are tensors of their own besides.
        """
        inputs = self._queries_keys_values()
        if not self.terms.fused and not self.model.multi_latent_attention:
            turned = self.model.position_embedding_type == "rope"
            copied = turned or self.model.num_query_groups not in (1, self.model.num_attention_heads)
            inputs += self._channels((self._queries() if copied else 0) + (self._values() if turned else 0))
        return inputs + self._context()

    def _projections(self) -> int:
        """What is kept on the way to queries, keys and values besides their projection's input."""
        model = self.model
        if not model.multi_latent_attention:
            heads = model.num_attention_heads + model.num_query_groups
            return self._norm(model.kv_channels, heads) if model.qk_layernorm else 0
        ranks = [model.kv_lora_rank, *([] if model.q_lora_rank is None else [model.q_lora_rank])]
        norms = sum(map(self._norm, ranks)) if model.qk_layernorm else 0
        return norms + self._channels(sum(ranks))

    def _rotary(self) -> int:
        """Sines and cosines of one sequence's positions, for queries and for keys."""
        model = self.model
        if model.position_embedding_type != "rope":
            return 0
        turned = int(model.kv_channels * model.rotary_percent)
        if model.multi_latent_attention:
            turned = model.qk_pos_emb_head_dim
        return 4 * self._channels(turned) * model.seq_length // self.plan.cp

    def _feed_forward(self, width: int, *, weighted: bool = False) -> int:
        """What a feed-forward layer keeps beyond its input; ``weighted`` by a router's probabilities."""
        function = self.terms.activation_func
        if self.terms.fused and self.model.gated_linear_unit and function == "silu":
            return self._channels(3 * width)
        inner = 1 + INTERMEDIATES[function]
        if self.model.gated_linear_unit:
            # both halves as they were projected, the one activated and a copy of the other, their product
            inner = 4 + max(INTERMEDIATES[function], 1)
        return self._channels((inner + (1 if weighted else 0)) * width)

    def _mixture(self) -> int:
        """A mixture of experts: the router's input and choices, each expert's tokens, shared experts."""
        model, hidden = self.model, self._channels(self.model.hidden_size)
        experts = hidden * self.plan.etp + self._feed_forward(model.expert_width, weighted=True)
        choices = TOKEN_ID * (model.num_moe_experts or 0)
        each_choice = 2 * TOKEN_ID + FP32 + self.terms.element_bytes
        shared = model.moe_shared_expert_intermediate_size
        beside = 0 if shared is None else self._feed_forward(shared)
        return hidden + choices + model.moe_router_topk * (experts + each_choice) + beside


def chunk_activations(parts: LayerActivations, split: PipelineSplit, stage: int) -> list[ChunkActivations]:
    """What each chunk of a stage keeps of one microbatch.

    Args:
        parts: what the parts of the model keep.
        split: which layers each stage holds.
        stage: index of the pipeline stage.
    """
    model, pp = parts.model, parts.plan.pp
    chunks = split.stage_layers(model.num_layers, pp, stage)
    found = []
    for number, layers in enumerate(chunks):
        kept, rebuilt = _layers(parts, layers)
        kept += parts.document_mask() if layers else 0
        is_last, freed = number == len(chunks) - 1, 0
        if is_last and model.mtp_num_layers and stage == split.prediction_stage(pp):
            predicted = _prediction(parts)
            kept += model.mtp_num_layers * predicted.kept
            rebuilt = max(rebuilt, predicted.rebuilt)
        if stage == 0 and number == 0:
            kept += parts.embedding()
        if stage == pp - 1 and is_last:
            freed = parts.head()
        else:
            kept += parts.hidden
        found.append(ChunkActivations(kept + freed, max(rebuilt - freed, 0)))
    return found


def _layers(parts: LayerActivations, layers: range) -> tuple[int, int]:
    """What the layers of a chunk keep, and what recomputing some of them adds."""
    terms, number = parts.terms, len(layers)
    if terms.recompute_granularity != "full":
        rebuilt = parts.rebuilt_core() if terms.recompute_granularity == "selective" and layers else 0
        return _kept_whole(parts, layers), rebuilt
    unit = min(terms.recompute_num_layers or 1, number)
    if not unit:
        return 0, 0
    largest = max(parts.layer(has_experts) for has_experts in _kinds(parts.model, layers))
    if terms.recompute_method == "uniform":
        return -(-number // unit) * parts.hidden, unit * largest - parts.hidden
    rest = layers[unit:]
    # The layers that are kept come last, and are freed before the first one is recomputed.
    kept = _kept_whole(parts, rest)
    return unit * parts.hidden + kept, max(largest - parts.hidden - kept, 0)


def _kept_whole(parts: LayerActivations, layers: range) -> int:
    experts = parts.model.moe_layers(layers.start, layers.stop) if layers else 0
    dense = len(layers) - experts
    return dense * parts.layer(False) + (experts * parts.layer(True) if experts else 0)


def _kinds(model: ModelDimensions, layers: range) -> set[bool]:
    """Whether there are layers with experts among ``layers``, and whether there are dense ones."""
    experts = model.moe_layers(layers.start, layers.stop)
    return {kind for kind, number in ((True, experts), (False, len(layers) - experts)) if number}


def _prediction(parts: LayerActivations) -> ChunkActivations:
    """One prediction layer, which full recomputation recomputes singly; it is like the last layer."""
    whole = parts.prediction(parts.model.is_moe_layer(parts.model.num_layers - 1))
    if parts.terms.recompute_granularity != "full":
        return ChunkActivations(whole, 0)
    inputs = 2 * parts.hidden
    return ChunkActivations(inputs, whole - inputs)
