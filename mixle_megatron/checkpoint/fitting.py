"""Whether a checkpoint is of a session's model and optimizer: every difference once, by logical name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mixle_megatron.checkpoint.portable_names import natural_order
from mixle_megatron.checkpoint.stored_state import DP_RESHARDABLE, Stored
from mixle_megatron.checkpoint.weight_mismatches import Shapes, mismatches
from mixle_megatron.errors import Fault
from mixle_megatron.optimizer_shards import VALUE

if TYPE_CHECKING:
    from mixle_megatron.checkpoint.expected_state import Expected

MODEL = "this session's model"

_MOST_PADDING = 128 * 64
"""Rows that Megatron-LM adds to a vocabulary at most: to a multiple of its divisor, 128, times tp."""

_CUT_BY = ("tp", "pp", "ep", "etp")
"""The axes that ranks hold parameters by; the others only share out what the optimizer keeps of them."""


def model_faults(
    expected: Expected, stored: Stored, source: str, *, tokens: int | None, stored_tokens: int | None
) -> list[Fault]:
    """Tensors of the model that are missing, unexpected, of another shape, or under another key.

    Rows of padding are no difference: what is compared are the rows of tokens, as far as they are known.

    Args:
        expected: what the session would read.
        stored: what there is.
        source: the checkpoint.
        tokens: of the session's vocabulary; None where its rows may be padding too.
        stored_tokens: of the checkpoint's; None where nothing says.
    """
    ours, theirs = dict(expected.shapes), dict(stored.shapes)
    for name in expected.padded & theirs.keys():
        rows = _rows(theirs[name][0], tokens, stored_tokens)
        ours[name] = (rows if tokens is None else tokens, *ours[name][1:])
        theirs[name] = (rows, *theirs[name][1:])
    faults = mismatches(ours, theirs, model=MODEL, source=source)
    if faults:
        return faults
    return [
        Fault(name, None, f"is part of {stored.keys[name]} in {source}, and {MODEL} reads it from {key}")
        for name, key in expected.keys.items()
        if stored.keys[name] != key
    ]


def object_faults(expected: Expected, stored: Stored, source: str) -> list[Fault]:
    """What is no tensor, such as the scales of Transformer Engine's layers, and missing."""
    missing = {name.split("/")[0] for name in expected.objects - stored.objects}
    return [
        Fault(name, None, f"of {MODEL} is missing from {source}")
        for name in sorted(missing, key=natural_order)
    ]


def optimizer_faults(
    expected: Expected,
    stored: Stored,
    source: str,
    *,
    optimizer: str,
    kinds: tuple[str, ...],
    writer: str | None,
) -> list[Fault]:
    """Where the checkpoint's optimizer is another, or keeps its state of other parameters.

    Args:
        expected: what the session would read.
        stored: what there is.
        source: the checkpoint.
        optimizer: the session's, by name.
        kinds: what it keeps of each parameter.
        writer: the optimizer that wrote the checkpoint, by name; None where nothing says.
    """
    remedy = "prepare the session with that optimizer, or load the weights alone with what='model'"
    if writer is not None and writer != optimizer:
        return [Fault("optimizer", optimizer, f"cannot go on with {source}, which {writer} wrote", remedy)]
    held = stored.held
    if not held or {VALUE, *held} != set(kinds):
        rule = f"keeps {', '.join(kinds)} of each parameter, and {source} has {', '.join(held) or 'nothing'}"
        return [Fault("optimizer", optimizer, rule, remedy)]
    wanted = expected.cuts if stored.pieces else {name: expected.shapes[name] for name in expected.trained}
    in_model = stored.fp32 - held[VALUE].keys()
    faults: dict[str, Fault] = {}
    for kind in kinds:
        left_out = in_model if kind == VALUE else ()
        sought = {name: size for name, size in wanted.items() if name not in left_out}
        found = held[kind] if stored.pieces else _without_padding(held[kind], wanted, expected.padded)
        model = f"the parameters that {optimizer} updates in this session"
        for fault in mismatches(sought, found, model=model, source=f"the {kind} of {source}"):
            faults.setdefault(fault.field, fault)
    return [faults[name] for name in sorted(faults, key=natural_order)]


def plan_faults(stored: Stored, source: str, plan: Any, saved: Mapping[str, Any]) -> list[Fault]:
    """Axes that may not differ from those of the plan that the checkpoint was saved under, and do."""
    if stored.optimizer_format != DP_RESHARDABLE:
        return []
    rule = (
        "was {} when {} was saved as dp_reshardable, for which each rank wrote its own parts of the "
        "optimizer's state: only dp_replicate, dp_shard and cp may change"
    )
    remedy = "load the weights alone with what='model', or save it under that plan as fully_reshardable"
    return [
        Fault(f"plan.{axis}", getattr(plan, axis), rule.format(saved.get(axis, 1), source), remedy)
        for axis in _CUT_BY
        if getattr(plan, axis) != saved.get(axis, 1)
    ]


def _rows(rows: int, tokens: int | None, stored_tokens: int | None) -> int:
    """Rows of tokens of a stored vocabulary that has so many ``rows``, padding included."""
    if tokens is None:
        return rows
    if stored_tokens is not None:
        return stored_tokens
    return tokens if tokens <= rows <= tokens + _MOST_PADDING else rows


def _without_padding(held: Shapes, wanted: Shapes, padded: set[str]) -> Shapes:
    """The stored shapes, of a vocabulary with as many rows as are wanted: its padding is no difference."""
    return {
        name: (wanted[name][0], *shape[1:]) if name in padded and name in wanted else shape
        for name, shape in held.items()
    }
