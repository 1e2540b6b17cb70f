"""Every precision by name: what it is in Megatron's and Transformer Engine's fields, and what it needs.

A table and nothing else, without torch. It says of each precision on what it has been run: the rules
refuse what has been run nowhere, and :mod:`mixle_megatron.capability` says of a host which of them it
executes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

ComputeCapability = tuple[int, int]


@dataclass(frozen=True)
class Precision:
    """One precision.

    Attributes:
        name: as a config, ``prepare`` and receipts have it.
        dtype: torch's name of the type of parameters, and of activations where they are not quantised.
        parameter_bytes: bytes of one model parameter.
        transformer: fields of Megatron's ``TransformerConfig``.
        optimizer: fields of ``OptimizerConfig``.
        parameter_gather: fields of ``TransformerConfig`` and ``DistributedDataParallelConfig`` that would
            also keep and gather the parameters in the quantised format. No precision sets them.
        compute_capability: the least that a CUDA device needs.
        below: the compute capability from which on devices have it no more, or None.
        cuda: the least version of CUDA that torch has to be built for, or None where torch's own is enough.
        transformer_engine: the least version of Transformer Engine, or None where it needs none.
        support_check: which of Transformer Engine's own support checks speaks of it.
        multiple_of: what the tokens of a microbatch on a rank and the sizes of the layers have to be a
            multiple of.
        first_and_last_layers: whether the first and last layers may stay in bf16.
        executed_on: the kinds of device on which tests train in it: ``cpu``, ``cuda``.
        withheld: why it is refused although it is written down here; empty where it is executed.
    """

    name: str
    dtype: str
    parameter_bytes: int
    transformer: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    parameter_gather: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    compute_capability: ComputeCapability = (5, 0)
    below: ComputeCapability | None = None
    cuda: tuple[int, int] | None = None
    transformer_engine: str | None = None
    support_check: str | None = None
    multiple_of: int = 1
    first_and_last_layers: bool = False
    executed_on: frozenset[str] = frozenset()
    withheld: str = ""

    @property
    def quantised(self) -> bool:
        """Whether matrix products are computed in fewer bits than activations are kept in."""
        return self.transformer_engine is not None

    def fits(self, capability: ComputeCapability) -> bool:
        """Whether a CUDA device of this compute capability has it."""
        return self.compute_capability <= capability and (self.below is None or capability < self.below)


_NOT_RUN = "no run on a GPU has shown yet that it trains"
_CPU = frozenset({"cpu"})


def _quantised(name: str, **fields: Any) -> Precision:
    """A precision that only Transformer Engine has; what it does not quantise is bf16."""
    transformer = {"bf16": True, **fields.pop("transformer")}
    return Precision(
        name,
        "bfloat16",
        2,
        transformer=transformer,
        optimizer={"bf16": True, **fields.pop("optimizer", {})},
        withheld=_NOT_RUN,
        **fields,
    )


def _gathered(kind: str, **more: Any) -> dict[str, dict[str, Any]]:
    return {
        "TransformerConfig": {f"{kind}_param": True},
        "DistributedDataParallelConfig": {f"{kind}_param_gather": True, **more},
    }


# Sources of the hardware's columns: Transformer Engine's "Datatype and hardware support matrix" and the
# "Supported devices" of each recipe in its "Low precision training" guide (release 2.19), which give for
# training: FP8 with one scale a tensor from compute capability 8.9; block scaling from 9.0, with CUDA 12.9;
# MXFP8 and NVFP4 on 10.0 and 10.3, for which its installation guide asks for CUDA 12.8. bf16 from 8.0 is
# of the same matrix. The sizes are those pages' too, and Megatron's get_fp8_align_size and
# get_fp4_align_size where these ask for more. Versions of Transformer Engine: Megatron's get_fp8_recipe
# and get_fp4_recipe; of NVFP4, whose recipe Megatron looks for from 2.7, the first release that has it.
_TABLE = (
    Precision("fp32", "float32", 4, executed_on=_CPU),
    Precision(
        "bf16",
        "bfloat16",
        2,
        transformer={"bf16": True},
        optimizer={"bf16": True},
        compute_capability=(8, 0),
        executed_on=_CPU,
    ),
    Precision(
        "fp16",
        "float16",
        2,
        transformer={"fp16": True},
        optimizer={"fp16": True},
        compute_capability=(5, 3),
        executed_on=_CPU,
    ),
    # The history and its maximum are Transformer Engine's own defaults; Megatron's keep one value.
    _quantised(
        "fp8-delayed",
        transformer={
            "fp8": "hybrid",
            "fp8_recipe": "delayed",
            "fp8_amax_history_len": 1024,
            "fp8_amax_compute_algo": "max",
        },
        optimizer={"fp8_recipe": "delayed"},
        parameter_gather=_gathered("fp8"),
        compute_capability=(8, 9),
        cuda=(12, 1),
        transformer_engine="1.0",
        support_check="fp8",
        multiple_of=16,
    ),
    _quantised(
        "fp8-tensorwise",
        transformer={"fp8": "hybrid", "fp8_recipe": "tensorwise"},
        optimizer={"fp8_recipe": "tensorwise"},
        parameter_gather=_gathered("fp8"),
        compute_capability=(8, 9),
        cuda=(12, 1),
        transformer_engine="2.2",
        support_check="fp8",
        multiple_of=16,
        first_and_last_layers=True,
    ),
    _quantised(
        "fp8-blockwise",
        transformer={"fp8": "e4m3", "fp8_recipe": "blockwise"},
        optimizer={"fp8_recipe": "blockwise"},
        parameter_gather=_gathered("fp8"),
        compute_capability=(9, 0),
        cuda=(12, 9),
        transformer_engine="2.3",
        support_check="fp8-blockwise",
        multiple_of=128,
        first_and_last_layers=True,
    ),
    _quantised(
        "mxfp8",
        transformer={"fp8": "e4m3", "fp8_recipe": "mxfp8"},
        optimizer={"fp8_recipe": "mxfp8"},
        parameter_gather=_gathered("fp8", reuse_grad_buf_for_mxfp8_param_ag=True),
        compute_capability=(10, 0),
        below=(11, 0),
        cuda=(12, 8),
        transformer_engine="2.1",
        support_check="mxfp8",
        multiple_of=32,
        first_and_last_layers=True,
    ),
    _quantised(
        "nvfp4",
        transformer={"fp4": "e2m1", "fp4_recipe": "nvfp4"},
        compute_capability=(10, 0),
        below=(11, 0),
        cuda=(12, 8),
        transformer_engine="2.8",
        support_check="nvfp4",
        multiple_of=128,
        first_and_last_layers=True,
    ),
)

RECIPES: dict[str, Precision] = {precision.name: precision for precision in _TABLE}
"""Every precision that is one recipe, by its name."""

ALIASES: dict[str, tuple[str, ...]] = {
    "fp8": ("mxfp8", "fp8-delayed", "fp8-tensorwise"),
    "fp4": ("nvfp4",),
}
"""mixle's names that stand for a recipe of the hardware's, best first: see :func:`recipe`."""

NAMES: tuple[str, ...] = (
    "fp32",
    "bf16",
    "fp16",
    "fp8",
    "fp8-delayed",
    "fp8-tensorwise",
    "fp8-blockwise",
    "mxfp8",
    "fp4",
    "nvfp4",
)
"""Every name of a precision, in the order in which they are listed to a reader."""


def recipe(name: str, capabilities: Iterable[ComputeCapability] = ()) -> Precision:
    """What ``name`` is on devices of these compute capabilities.

    ``fp8`` is Transformer Engine's own choice where it is told none (``get_default_fp8_recipe``): MXFP8
    where the hardware has it, from 12.0 on one scale a tensor of the tensor itself, else one of its
    history. Devices that differ get one that all of them have; where none is in common, or none are
    named, the recipe that asks for the least.
    """
    if name in RECIPES:
        return RECIPES[name]
    devices = tuple(capabilities)
    choices = [RECIPES[choice] for choice in ALIASES[name]]
    if name == "fp8" and any(capability >= (12, 0) for capability in devices):
        choices = [choice for choice in choices if choice.name != "fp8-delayed"]
    least = min(choices, key=lambda choice: choice.compute_capability)
    return next((choice for choice in choices if devices and all(map(choice.fits, devices))), least)


EXECUTED: tuple[str, ...] = tuple(name for name in NAMES if name in RECIPES and RECIPES[name].executed_on)
"""Precisions that this version executes on some device."""


def withheld_reason(name: str) -> str:
    """Why this version executes a known precision nowhere; empty where it does."""
    return "" if name in EXECUTED else recipe(name).withheld
