"""The weights alone of a checkpoint, whoever wrote it, into a session that has not stepped.

They are looked for under the keys that Megatron gives the model's tensors, under every plan and in every
precision. Where a session wrote the checkpoint, and the optimizer's fp32 values are there whole, these are
taken: the weights of a run in bf16 are rounded from them. Those of Megatron's own writer are not, which can
be wrong (:mod:`mixle_megatron.checkpoint.optimizer_state`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from mixle_megatron.checkpoint.common_state import SESSION, read_common
from mixle_megatron.checkpoint.expected_state import expected_state, model_state
from mixle_megatron.checkpoint.first_rank import on_first_rank
from mixle_megatron.checkpoint.fitting import model_faults
from mixle_megatron.checkpoint.opening import read_whole, stored_tokens
from mixle_megatron.checkpoint.safe_loading import safe_loading
from mixle_megatron.checkpoint.stored_state import main_values, stored_state
from mixle_megatron.errors import CheckpointError, DoesNotFit
from mixle_megatron.optimizer_shards import model_parameters, own_range, own_value
from mixle_megatron.stage import Stage


@dataclass(frozen=True)
class Weights:
    """Weights that are those of a session's model.

    Attributes:
        path: the checkpoint's folder.
        main_values: the keys of fp32 values, by the key of the tensor that they are of.
        payload: what a session saved beside the tensors; empty where no session wrote it.
    """

    path: str
    main_values: dict[str, str]
    payload: dict[str, Any]


def judge_weights(stage: Stage, path: str, *, tokens: int | None) -> Weights:
    """Compare the weights in the folder ``path`` with the stage; neither is changed. Collective.

    Args:
        stage: whose model the weights should be of.
        path: a checkpoint's folder.
        tokens: rows of the stage's vocabulary without padding; None where the caller pads it.

    Raises:
        CheckpointError: on every rank alike: it is not a checkpoint, or it is damaged.
        DoesNotFit: likewise, with each tensor that is missing, unexpected or of another shape.
    """
    expected = expected_state(stage)

    def judge() -> Weights:
        folder = Path(path)
        metadata = read_whole(folder)
        found = model_faults(
            expected, stored_state(metadata), path, tokens=tokens, stored_tokens=stored_tokens(folder)
        )
        if found:
            raise DoesNotFit(found)
        payload = read_common(folder, metadata).get(SESSION)
        return Weights(path, {} if payload is None else main_values(metadata), payload or {})

    return on_first_rank(judge, doing="read the checkpoint")


def load_weights(stage: Stage, weights: Weights, *, tokens: int | None) -> None:
    """Give the stage these weights: the modules' parameters and buffers, and the optimizer's fp32 values.

    Rows of padding are zeros afterwards, whatever the checkpoint has there.

    Args:
        stage: what to fill; its optimizer's moments and schedules are left alone.
        weights: that :func:`judge_weights` found to fit.
        tokens: as there.

    Raises:
        CheckpointError: they could not be read after all; the stage may then be filled in part.
    """
    for chunk, own in zip(stage.chunks, model_state(stage).values(), strict=True):
        asked = {
            name: _asked(shard, weights.main_values)
            for name, shard in own.items()
            if isinstance(shard, ShardedTensor | ShardedTensorFactory)
        }
        loaded = _read(asked, weights.path)
        for name, shard in asked.items():
            if isinstance(shard, ShardedTensor) and shard.allow_shape_mismatch and tokens is not None:
                first_row = shard.global_offset[shard.prepend_axis_num]
                loaded[name][max(tokens - first_row, 0) :] = 0
        # What a layer keeps that is no tensor belongs to who computes it, and stays this session's.
        objects = own.keys() - asked.keys()
        kept = {name: value for name, value in chunk.state_dict().items() if name in objects}
        chunk.load_state_dict(kept | loaded)
        _fill_main_values(stage, {id(own[name].data): loaded[name] for name in asked})


def _asked(shard: Any, main_values: dict[str, str]) -> Any:
    """A model's ``shard`` as it is read: into memory of its own, in fp32 where it is no whole number."""
    dtype = torch.float32 if shard.data.is_floating_point() else shard.data.dtype
    changes: dict[str, Any] = {
        "key": main_values.get(shard.key, shard.key),
        "data": torch.empty_like(shard.data, dtype=dtype, requires_grad=False),
    }
    if isinstance(shard, ShardedTensor):
        changes["dtype"] = dtype
    return replace(shard, **changes)


def _read(asked: dict[str, Any], path: str) -> dict[str, torch.Tensor]:
    """What Megatron reads for the sharded tensors ``asked``.

    Its own ``load`` reads the common state too, which in a checkpoint of Megatron-LM holds objects that are
    not safe to make.
    """
    sharded, _, factories = load_preprocess(asked)
    try:
        with safe_loading():
            loaded = TorchDistLoadShardedStrategy().load(sharded, Path(path))
    except (CheckpointingException, CheckpointException, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return apply_factory_merges(loaded, factories)


def _fill_main_values(stage: Stage, loaded: dict[int, torch.Tensor]) -> None:
    with torch.no_grad():
        for part, parameter, own in _main_values(stage):
            if id(parameter) in loaded:
                own.copy_(loaded[id(parameter)].flatten()[own_range(part, parameter)])


def _main_values(stage: Stage) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
    """Every parameter of which this rank keeps a part of the fp32 value, with its optimizer and that part."""
    for part, parameter in model_parameters(stage.optimizer):
        own = own_value(part, parameter)
        if own is not None:
            yield part, parameter, own
