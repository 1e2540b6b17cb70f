"""Files that a model's weights can be imported from: mixle's language models, and safetensors.

Neither runs any code of the file's. Safetensors holds numbers alone, and a mixle file is loaded with
``weights_only=True``, which admits tensors and plain values and refuses everything else.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from mixle_megatron.checkpoint.language_model import logical_name_of
from mixle_megatron.checkpoint.portable_names import portable_name
from mixle_megatron.config.model import ModelSection
from mixle_megatron.config.schema import dimensions_of
from mixle_megatron.errors import Fault, Refused, refuse_if_any
from mixle_megatron.models.causal_lm_names import LOGIT_FACTOR, to_megatron

MODEL_KEY = "mixle_megatron.model"
"""Under which the header of an exported safetensors file keeps the ``model`` section, as JSON."""

_TIED, _EMBEDDING = "head.weight", "tok.weight"
_LANGUAGE_MODEL_SIZES = {
    "d_model": "hidden_size",
    "n_layer": "num_layers",
    "n_head": "num_attention_heads",
    "block": "seq_length",
    "vocab": "vocab_size",
}


class WeightSource(Protocol):
    """Weights by portable name, of which each is read when it is asked for.

    Attributes:
        path: where they are.
        model: what the file says of its model; None where it says nothing.
        shapes: of all tensors, without rows of padding.
    """

    path: Path
    model: ModelSection | None
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor in Megatron's layout, without rows of padding."""
        ...


def open_weights(path: Path) -> WeightSource:
    """The weights in a file, or in a folder of safetensors files.

    Raises:
        Refused: it is neither a safetensors file nor one that mixle's ``LM.save`` wrote, or holds tensors
            that are not weights.
    """
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise _unreadable(path, "is a folder without *.safetensors files")
        return _Safetensors(path, files)
    if not path.is_file():
        raise _unreadable(path, "is not there")
    # torch.save writes a zip archive.
    return _LanguageModel(path) if zipfile.is_zipfile(path) else _Safetensors(path, [path])


class _Safetensors:
    """Tensors of some safetensors files under their logical names."""

    def __init__(self, path: Path, files: Iterable[Path]) -> None:
        self.path = path
        self.model: ModelSection | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, tuple[Any, str]] = {}
        faults: list[Fault] = []
        for file in files:
            faults += self._add(file)
        refuse_if_any(faults)

    def _add(self, file: Path) -> list[Fault]:
        try:
            opened = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise _unreadable(
                file, f"is neither safetensors nor written by mixle's LM.save ({error})"
            ) from None
        stated = (opened.metadata() or {}).get(MODEL_KEY)
        if stated is not None:
            self.model = _stated_model(file, stated)
        faults = []
        for key in opened.keys():  # noqa: SIM118  a handle of the library, and no mapping
            name, part = portable_name(key), opened.get_slice(key)
            if name in self.shapes:
                faults.append(Fault(key, None, f"of {file} is there twice, as {name}"))
            elif not part.get_dtype().startswith(("F", "BF")):
                faults.append(Fault(key, part.get_dtype(), f"in {file} is not floating point"))
            self.shapes[name] = tuple(part.get_shape())
            self._places[name] = opened, key
        return faults

    def read(self, name: str) -> torch.Tensor:
        opened, key = self._places[name]
        return opened.get_tensor(key)


class _LanguageModel:
    """What mixle's ``LM.save`` wrote, as the GPTModel of the same logits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        saved = _load_plain(path)
        self.model: ModelSection | None = _model_of(path, saved)
        state = saved["state_dict"]
        refuse_if_any(_state_faults(path, state))
        self._tensors = {
            logical_name_of(name): tensor
            for name, tensor in state.items()
            if name not in (_TIED, LOGIT_FACTOR)
        }
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        return to_megatron(name, self._tensors[name], dimensions_of(self.model))


def _load_plain(path: Path) -> dict[str, Any]:
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        saved = None if unsafe else torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged file can make zip and pickle readers raise anything
        first = (str(error).splitlines() or [""])[0]
        raise _unreadable(path, f"cannot be read ({type(error).__name__}: {first})") from None
    if unsafe:
        raise _unreadable(path, f"holds {', '.join(unsafe)}, which are no weights; nothing of it was loaded")
    state = saved.get("state_dict") if isinstance(saved, dict) else None
    named = isinstance(state, dict) and all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in state.items()
    )
    if not named or not saved.keys() >= _LANGUAGE_MODEL_SIZES.keys():
        raise _unreadable(path, "is not what mixle's LM.save writes: sizes of a model and its state_dict")
    return saved


def _model_of(path: Path, saved: Mapping[str, Any]) -> ModelSection:
    try:
        return ModelSection(**{field: saved[name] for name, field in _LANGUAGE_MODEL_SIZES.items()})
    except ValidationError:
        sizes = ", ".join(f"{name}={saved[name]!r}" for name in _LANGUAGE_MODEL_SIZES)
        raise _unreadable(path, f"has sizes that no model has ({sizes})") from None


def _state_faults(path: Path, state: Mapping[str, torch.Tensor]) -> list[Fault]:
    faults = [
        Fault(name, str(value.dtype), f"in {path} is not floating point")
        for name, value in state.items()
        if not value.is_floating_point()
    ]
    factor = state.get(LOGIT_FACTOR)
    if factor is not None and (factor.numel() != 1 or float(factor) != 1.0):
        rule = f"of {path} multiplies the logits, which a config's model cannot"
        faults.append(Fault(LOGIT_FACTOR, factor.tolist(), rule, "train it with LM.fit"))
    head, embedding = state.get(_TIED), state.get(_EMBEDDING)
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        faults.append(Fault(_TIED, None, f"of {path} differs from {_EMBEDDING}, to which mixle ties it"))
    return faults


def _stated_model(file: Path, text: str) -> ModelSection:
    with suppress(ValueError):  # which pydantic's ValidationError is, too
        return ModelSection.model_validate(json.loads(text))
    raise _unreadable(file, f"has a header whose {MODEL_KEY} is not the model section of a config")


def _unreadable(path: Path, rule: str) -> Refused:
    return Refused([Fault("SOURCE", str(path), rule)])
