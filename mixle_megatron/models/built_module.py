"""A Megatron model that its caller has built already, trained in place.

It is recognised by what it offers and not by its class: Megatron's GPTModel and HybridModel, and what
is made after them, all have ``set_input_tensor``, ``sharded_state_dict`` and a TransformerConfig.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig

from mixle_megatron.callers_groups import module_group_faults, position_in
from mixle_megatron.errors import Fault, refuse_if_any
from mixle_megatron.megatron_names import model_parallel_arguments
from mixle_megatron.models.experts import mark_experts
from mixle_megatron.models.provider import ModelProvider, SessionTerms
from mixle_megatron.models.release import is_wrapped
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.process_groups import MegatronGroups
from mixle_megatron.rules import NOT_EXECUTED
from mixle_megatron.rules.dimensions import ModelDimensions
from mixle_megatron.rules.sequence import sequence_multiple
from mixle_megatron.translate import PARAMETER_DTYPES, Host

READ = {
    "vocab_size": "rows of its embedding, over all tp ranks",
    "max_sequence_length": "the longest sequence that it takes",
    "pre_process": "whether it holds the embedding",
    "post_process": "whether it holds the output layer",
    "pg_collection": "the process groups that its layers communicate over",
}
"""What is read of a module besides its config, by the names that GPTModel and HybridModel give it."""

HOOKS_OF_ANOTHER_LOOP = (
    "timers",
    "finalize_model_grads_func",
    "grad_scale_func",
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
)
"""Fields by which a training loop tells Megatron's schedules what to call; a session is another loop."""

NOT_RUN = ("virtual_pipeline_model_parallel_size", "fp8", "fp4")
"""Fields that a built module must leave empty."""

FOR_THE_SESSION = ("calculate_per_token_loss", "moe_aux_loss_coeff", "moe_z_loss_coeff")
"""Fields that the layers read of the session's config while it is open.

By the first one experts and further prediction heads scale their own losses; routers keep a copy of
it. The others differ from the module's in versions of Megatron that scale by the wrong number of ranks.
"""


def is_built(module: Any) -> bool:
    """Whether the module is a stage of a Megatron model."""
    offers = all(callable(getattr(module, name, None)) for name in ("set_input_tensor", "sharded_state_dict"))
    return offers and isinstance(getattr(module, "config", None), TransformerConfig)


class BuiltModule(ModelProvider):
    """A stage that exists: a ModelProvider of this one module, for one session.

    The session trains the module itself, and no copy, and begins without the gradients that the
    module has. While it is open Megatron's DistributedDataParallel keeps the parameters in its
    buffers; afterwards, and after a failure too, they are tensors of their own again.

    Attributes:
        module: the caller's module, this rank's stage.
    """

    pads_vocabulary = False
    """Rows of its embedding may be padding, of which nothing is known here."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Take the module as it is.

        Raises:
            Refused: it lacks something of :data:`READ`.
        """
        remedy = "pass the model itself, without Float16Module or DistributedDataParallel, or add it"
        refuse_if_any(
            Fault(f"module.{name}", None, f"is missing on {type(module).__name__}: {meaning}", remedy)
            for name, meaning in READ.items()
            if getattr(module, name, None) is None
        )
        self.module = module
        self._own_values: list[tuple[Any, str, Any]] = []

    def dimensions(self, tp: int) -> ModelDimensions:
        """The sizes that the module has; its vocabulary is what it is, and nothing is padded."""
        module = self.module
        return sizes_of(
            module.config,
            tp,
            module.vocab_size,
            module.max_sequence_length,
            position_embedding_type=getattr(module, "position_embedding_type", "none"),
            rotary_percent=getattr(module, "rotary_percent", 1.0),
            share_embeddings_and_output_weights=getattr(module, "share_embeddings_and_output_weights", False),
        )

    def faults(self, terms: SessionTerms) -> list[Fault]:
        """Whether the module is this rank's stage under the plan, and one that a session can run."""
        return [
            *self._axis_faults(terms.plan),
            *module_group_faults(self.module.pg_collection, terms.plan),
            *self._position_faults(terms.plan),
            *self._state_faults(),
            *self._session_faults(terms),
            *self._device_faults(terms.device),
        ]

    @property
    def _has_experts(self) -> bool:
        return bool(self.module.config.num_moe_experts)

    def _axis_faults(self, plan: PlanRecord) -> Iterator[Fault]:
        config = self.module.config
        for name, planned in model_parallel_arguments(plan).items():
            if name == "expert_tensor_parallel_size" and not self._has_experts:
                continue  # Megatron sets it to tp where nothing is said, and a dense model never reads it
            actual = getattr(config, name)
            if actual != planned:
                rule = f"is not {planned}, which the plan makes it"
                remedy = f"build the module with {name}={planned}, or change the plan"
                yield Fault(f"module.config.{name}", actual, rule, remedy)

    def _position_faults(self, plan: PlanRecord) -> Iterator[Fault]:
        position = position_in(self.module.pg_collection.pp, plan.pp)
        if position is None:
            return
        for name, expected in (("pre_process", position == 0), ("post_process", position == plan.pp - 1)):
            actual = bool(getattr(self.module, name))
            if actual != expected:
                rule = f"is not what stage {position} of plan.pp={plan.pp} has"
                yield Fault(f"module.{name}", actual, rule, f"build the module with {name}={expected}")

    def _state_faults(self) -> Iterator[Fault]:
        config = self.module.config
        for name in NOT_RUN:
            if getattr(config, name, None):
                rule = NOT_EXECUTED + "a built module is one stage, without quantised layers"
                yield Fault(f"module.config.{name}", getattr(config, name), rule, "leave it out")
        if is_wrapped(self.module):
            rule = "is in a DistributedDataParallel already"
            yield Fault("module", type(self.module).__name__, rule, "close the session that it is in")

    def transformer_fields(self) -> dict[str, Any]:
        """The fields of the module's own config, without another loop's hooks.

        The schedules and wrappers of the session read a config of their own, which is made of these;
        the layers go on reading the module's.
        """
        names = {field.name for field in fields(TransformerConfig) if field.init}
        return {name: getattr(self.module.config, name) for name in names - set(HOOKS_OF_ANOTHER_LOOP)}

    def build_stage(self, config: Any, groups: MegatronGroups, host: Host) -> torch.nn.Module:
        """The module, with the parameters of the first replica."""
        mark_experts(self.module)
        self.module.zero_grad()  # Megatron would add what is there to the first update
        for name in FOR_THE_SESSION:
            for each in _carriers(self.module, name):
                self._own_values.append((each, name, getattr(each, name)))
                setattr(each, name, getattr(config, name))
        _take_first_replica(self.module, groups)
        return self.module

    def _session_faults(self, terms: SessionTerms) -> Iterator[Fault]:
        dtype = PARAMETER_DTYPES.get(terms.precision)
        expected = {name: terms.precision == name for name in ("bf16", "fp16")} | {"params_dtype": dtype}
        split = {"virtual_pipeline_model_parallel_size": None} | terms.split.arguments()
        for name, value in (expected | split).items():
            actual = getattr(self.module.config, name)
            if actual != value:
                rule = f"is not {value}, which the arguments of prepare make it"
                remedy = "build the module with it, or change precision or pipeline"
                yield Fault(f"module.config.{name}", actual, rule, remedy)

    def _device_faults(self, device: torch.device) -> Iterator[Fault]:
        found = {str(parameter.device) for parameter in self.module.parameters()} - {str(device)}
        if found:
            rule = f"is not the session's {device}"
            yield Fault("module.device", ", ".join(sorted(found)), rule, "move the module, or pass device=")

    def give_back(self, stage: Any) -> torch.nn.Module:
        """The same module, trained."""
        return self._released()

    def untouched(self, stage: Any) -> torch.nn.Module:
        """The same module as the failed session left it; there is no copy of what it was before."""
        return self._released()

    def _released(self) -> torch.nn.Module:
        for each, name, value in self._own_values:
            setattr(each, name, value)
        return self.module


def sizes_of(
    config: TransformerConfig, tp: int, vocab_size: int, max_sequence_length: int, **of_module: Any
) -> ModelDimensions:
    """The sizes that a TransformerConfig and a language model around it have.

    Args:
        config: the model's config, with every default resolved.
        tp: the plan's tensor-parallel ranks.
        vocab_size: rows of the embedding.
        max_sequence_length: tokens that the model has positions for. The longest sequence below it that
            can be split stands for those of the training; the session judges each batch by its own.
        of_module: fields of :class:`ModelDimensions` that are not in the config.
    """
    multiple = sequence_multiple(PlanRecord(tp=tp, cp=config.context_parallel_size))
    given = {
        "seq_length": max_sequence_length // multiple * multiple,
        "vocab_size": vocab_size,
        "padded_vocab_size": vocab_size,
        "max_position_embeddings": max_sequence_length,
        **of_module,
    }
    read = {field.name: getattr(config, field.name, None) for field in fields(ModelDimensions)}
    return ModelDimensions(**{name: value for name, value in read.items() if value is not None} | given)


def _carriers(module: torch.nn.Module, name: str) -> list[Any]:
    """Everything in the module that has an attribute ``name``: layers and their configs, each once."""
    layers = list(module.modules())
    carriers = [*layers, *(getattr(layer, "config", None) for layer in layers)]
    return list({id(each): each for each in carriers if hasattr(each, name)}.values())


def _take_first_replica(module: torch.nn.Module, groups: MegatronGroups) -> None:
    """Give every data-parallel rank the parameters of the first.

    Replicas that are built from different seeds would each begin with another model, and nothing
    would say so.
    """
    for parameter in module.parameters():
        is_shared = getattr(parameter, "allreduce", True)  # Megatron's mark: False on the experts of ep
        replicas = groups.collection.dp_cp if is_shared else groups.collection.expt_dp
        if replicas.size() > 1:
            dist.broadcast(parameter.data, src=dist.get_global_rank(replicas, 0), group=replicas)
