"""What a checkpoint holds of a model and its optimizer, by name, from its metadata alone."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from mixle_megatron.checkpoint.portable_names import OPTIMIZER, stacked
from mixle_megatron.optimizer_shards import VALUE

OptimizerFormat = Literal["fully_reshardable", "dp_reshardable"]
"""How an optimizer's state can be cut: whole tensors, or what each rank held of them."""

FULLY_RESHARDABLE: OptimizerFormat = "fully_reshardable"
DP_RESHARDABLE: OptimizerFormat = "dp_reshardable"

PIECES = f"optimizer.{DP_RESHARDABLE}"
"""How the names of an optimizer's tensors begin in the format of that name."""

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>[^.]+)\.(?P<key>.+)")
_PIECES = re.compile(re.escape(PIECES) + r"\.(?P<kind>[^.]+)\.(?P<name>.+)")

Shape = tuple[int, ...]


@dataclass
class Stored:
    """The tensors of a checkpoint.

    Attributes:
        shapes: whole tensors of the model, by portable name, with rows of padding.
        keys: the key that each of them lies under.
        fp32: names of those that are stored in fp32.
        optimizer: for each kind of optimizer state (``param`` is the fp32 value; of a parameter without
            one it is the model's), the whole tensors
            that it is kept of, by portable name.
        pieces: likewise in the format ``dp_reshardable``: over how many tensor-parallel ranks each is cut,
            and the elements on each.
        objects: names of what is no tensor.
    """

    shapes: dict[str, Shape] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    fp32: set[str] = field(default_factory=set)
    optimizer: dict[str, dict[str, Shape]] = field(default_factory=lambda: defaultdict(dict))
    pieces: dict[str, dict[str, Shape]] = field(default_factory=lambda: defaultdict(dict))
    objects: set[str] = field(default_factory=set)

    @property
    def held(self) -> dict[str, dict[str, Shape]]:
        """The optimizer's state, in whichever format it is."""
        return self.pieces or self.optimizer

    @property
    def optimizer_format(self) -> OptimizerFormat | None:
        """How the optimizer's state is cut; None where there is none, or none that a session reads."""
        if self.pieces:
            return DP_RESHARDABLE
        return FULLY_RESHARDABLE if self.optimizer else None


def stored_state(metadata: Metadata) -> Stored:
    """What ``metadata`` says that its checkpoint holds."""
    stored = Stored()
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            stored.objects.add(key)
        elif match := _PIECES.fullmatch(key):
            stored.pieces[match["kind"]][match["name"]] = tuple(entry.size)
        elif match := _STATE.fullmatch(key):
            for name, at in stacked(match["key"], entry.size):
                stored.optimizer[match["kind"]][name] = tuple(entry.size[len(at) :])
        elif not OPTIMIZER.match(key):
            for name, at in stacked(key, entry.size):
                stored.shapes[name] = tuple(entry.size[len(at) :])
                stored.keys[name] = key
                if entry.properties.dtype == torch.float32:
                    stored.fp32.add(name)
    return stored


def main_values(metadata: Metadata) -> dict[str, str]:
    """The keys of the optimizer's whole fp32 values, by the key of the model's tensor."""
    matches = map(_STATE.fullmatch, metadata.state_dict_metadata)
    return {match["key"]: match[0] for match in matches if match and match["kind"] == VALUE}
