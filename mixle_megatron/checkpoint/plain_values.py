"""Values that a user keeps in a checkpoint, in a form that a reader which runs nothing can give back.

They are those that mixle's own checkpoints keep: None, truth values, numbers, text, bytes, arrays, tensors,
and tuples, lists and dictionaries of these.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

import numpy as np
import torch

_KIND = "__type__"


def encoded(value: Any, name: str) -> Any:
    """``value`` as nothing but None, truth values, numbers, text, tuples, lists and dictionaries.

    Args:
        value: what to keep.
        name: what to call it in a message.

    Raises:
        TypeError: it is, or holds, something else.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, np.generic):
        return encoded(value.item(), name)
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain.__str__(value) if plain is str else plain(value)
    if isinstance(value, bytes):
        return {_KIND: "bytes", "data": _text(value)}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return _array("ndarray", value.dtype.str, value, value.tobytes())
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().reshape(-1).clone().view(torch.uint8).numpy() if value.numel() else b""
        return _array("tensor", str(value.dtype).removeprefix("torch."), value, bytes(content))
    if isinstance(value, tuple | list):
        items = [encoded(item, f"{name}[{index}]") for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return _dictionary(value, name)
    raise TypeError(f"{name} is a {type(value).__name__}, which no checkpoint keeps: give plain values")


def decoded(value: Any) -> Any:
    """What :func:`encoded` was given."""
    if isinstance(value, tuple | list):
        return type(value)(map(decoded, value))
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: decoded(item) for key, item in value.items()}
    if kind == "dictionary":
        return {decoded(key): decoded(item) for key, item in value["items"]}
    content = b64decode(value["data"])
    if kind == "bytes":
        return content
    if kind == "ndarray":
        return np.ndarray(value["shape"], value["dtype"], content).copy()
    dtype = getattr(torch, value["dtype"])
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.reshape(value["shape"])


def _dictionary(value: dict[Any, Any], name: str) -> dict[str, Any]:
    if all(isinstance(key, str) for key in value) and _KIND not in value:
        return {str.__str__(key): encoded(item, f"{name}.{key}") for key, item in value.items()}
    items = [
        (encoded(key, f"a key of {name}"), encoded(item, f"{name}[{key!r}]")) for key, item in value.items()
    ]
    return {_KIND: "dictionary", "items": items}


def _array(kind: str, dtype: str, numbers: Any, content: bytes) -> dict[str, Any]:
    return {_KIND: kind, "dtype": dtype, "shape": list(numbers.shape), "data": _text(content)}


def _text(content: bytes) -> str:
    return b64encode(content).decode("ascii")
