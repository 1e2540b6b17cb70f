"""How the tensors of a file or checkpoint differ from those of a model, each difference once."""

from __future__ import annotations

from collections.abc import Mapping

from mixle_megatron.checkpoint.portable_names import natural_order
from mixle_megatron.errors import Fault

Shapes = Mapping[str, tuple[int, ...]]


def mismatches(expected: Shapes, found: Shapes, *, model: str, source: str) -> list[Fault]:
    """What is missing, unexpected or of another shape, by portable name.

    Args:
        expected: shapes of the model's tensors, without rows of padding.
        found: shapes of what is there.
        model: what to call the model, as in ``the config's model``.
        source: where the tensors were looked for.
    """
    faults = []
    for name in sorted(expected.keys() | found.keys(), key=natural_order):
        if name not in found:
            faults.append(Fault(name, None, f"of {model} is missing from {source}"))
        elif name not in expected:
            faults.append(Fault(name, None, f"of {source} is not part of {model}"))
        elif found[name] != expected[name]:
            rule = f"has shape {list(found[name])} in {source}, and {list(expected[name])} in {model}"
            faults.append(Fault(name, None, rule))
    return faults
