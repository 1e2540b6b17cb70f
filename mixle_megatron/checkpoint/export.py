"""A checkpoint's model out to one file, by one process, with never more than one tensor in its memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, Literal

import torch

from mixle_megatron.checkpoint.durable import WRITING, rename, sync_file
from mixle_megatron.checkpoint.export_source import (
    KnownModel,
    checkpoint_folder,
    known_model,
    known_wrongly,
    language_model_section,
    open_checkpoint,
    vocabulary_rows,
)
from mixle_megatron.checkpoint.iterations import step_of
from mixle_megatron.checkpoint.language_model import (
    language_model_faults,
    logical_shapes,
    write_language_model,
)
from mixle_megatron.checkpoint.portable_names import BUFFERS, VOCABULARY
from mixle_megatron.checkpoint.safetensors_file import TensorOutline, in_file_order, write_safetensors
from mixle_megatron.checkpoint.stored_tensors import ModelTensor, StoredTensors
from mixle_megatron.checkpoint.weight_mismatches import mismatches
from mixle_megatron.checkpoint.weight_sources import MODEL_KEY
from mixle_megatron.errors import Fault, refuse_if_any
from mixle_megatron.models.causal_lm_names import LOGIT_FACTOR

Format = Literal["mixle", "safetensors"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_HALVES = ("_w", "_v")


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        path: the file.
        source: the checkpoint's folder.
        tensors: how many tensors it holds.
        elements: their elements, all together.
        dtype: of the parameters in it.
    """

    path: Path
    source: Path
    tensors: int
    elements: int
    dtype: str


def export_checkpoint(
    path: Path,
    out: Path,
    *,
    to: Format,
    dtype: str = "fp32",
    config: Path | None = None,
    heads: int | None = None,
    vocab_size: int | None = None,
) -> Exported:
    """Write the model of a checkpoint to the file ``out``.

    The values are the optimizer's fp32 ones where the checkpoint has an optimizer, put together from the
    parts that its ranks wrote, without rows of padding. ``out`` appears whole or not at all.

    Args:
        path: a checkpoint's folder, or a run's, of which the newest is meant.
        out: the file, which must not be there yet.
        to: ``safetensors``: tensors by logical name, and the config's model in the header;
            ``mixle``: what mixle's ``LM.load`` reads.
        dtype: of the parameters, ``fp32`` or ``bf16``; what is beside them keeps its own.
        config: the config of the run, where the checkpoint does not lie in the run's folder.
        heads: that the model is a mixle CausalLM with so many heads, where nothing else says what it is.
        vocab_size: tokens, where nothing else says which rows of the vocabulary are padding.

    Raises:
        Refused: there is no checkpoint, or it cannot be written so; nothing is then written.
        CheckpointError: the checkpoint is damaged.
    """
    folder = checkpoint_folder(path)
    refuse_if_any(_target_faults(out))
    stored = open_checkpoint(folder)
    refuse_if_any(_value_faults(stored, dtype))
    known = known_model(folder, config)
    refuse_if_any(known_wrongly(stored.tensors, known))
    rows = vocabulary_rows(stored, known, vocab_size)
    export = _Export(stored, rows, DTYPES[dtype])
    if to == "mixle":
        model = language_model_section(stored.tensors, known, heads, rows)
        refuse_if_any(language_model_faults(model))
        export.refuse_mismatches(logical_shapes(model))
        with _aside(out) as aside:
            values = export.tensors(stored.tensors)
            write_language_model(aside, model, DTYPES[dtype], values, logit_factor=known.logit_factor)
    else:
        with _aside(out) as aside, aside.open("wb") as file:
            export.write_safetensors(file, _header(folder, known))
    elements = sum(prod(export.shape(tensor)) for tensor in stored.tensors.values())
    return Exported(out, folder, len(stored.tensors), elements, dtype)


class _Export:
    """The tensors of a checkpoint as the exported file has them."""

    def __init__(self, stored: StoredTensors, rows: int | None, dtype: torch.dtype) -> None:
        self._stored = stored
        self._rows = rows
        self._dtype = dtype

    def shape(self, tensor: ModelTensor) -> tuple[int, ...]:
        """Without rows of padding."""
        return (self._rows, *tensor.shape[1:]) if tensor.name in VOCABULARY else tensor.shape

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors themselves, each read when its turn comes."""
        for name in names:
            whole = self._stored.read(name)
            yield name, whole[: self._rows] if name in VOCABULARY else whole

    def refuse_mismatches(self, expected: dict[str, tuple[int, ...]]) -> None:
        """Refuse what is not the model that a config, or its sizes, say it is."""
        found = {name: self.shape(tensor) for name, tensor in self._stored.tensors.items()}
        refuse_if_any(mismatches(expected, found, model="mixle's CausalLM", source=str(self._stored.folder)))

    def write_safetensors(self, file: BinaryIO, metadata: dict[str, str]) -> None:
        outlines = in_file_order(
            TensorOutline(tensor.name, self.shape(tensor), self._dtype_of(tensor))
            for tensor in self._stored.tensors.values()
        )
        dtypes = {outline.name: outline.dtype for outline in outlines}
        values = (whole.to(dtypes[name]) for name, whole in self.tensors(dtypes))
        write_safetensors(file, outlines, values, metadata)

    def _dtype_of(self, tensor: ModelTensor) -> torch.dtype:
        return tensor.dtype if tensor.name.endswith(BUFFERS) else self._dtype


def _target_faults(out: Path) -> list[Fault]:
    if out.exists():
        return [Fault("OUT", str(out), "is there already", "name a file that is not")]
    if not out.absolute().parent.is_dir():
        return [Fault("OUT", str(out), "would lie in a folder that is not there", "make the folder")]
    return []


def _value_faults(stored: StoredTensors, dtype: str) -> list[Fault]:
    """Formats of Megatron's that hide what an export wants."""
    faults = []
    halves = [name for name in stored.tensors if name.endswith(_HALVES)]
    if halves:
        rule = "are stored as halves of gated layers (singleton_local_shards), which is not read"
        faults.append(Fault("PATH", ", ".join(halves), rule))
    rounded = [
        tensor.name
        for tensor in stored.tensors.values()
        if not tensor.is_main_value and tensor.dtype != torch.float32 and not tensor.name.endswith(BUFFERS)
    ]
    if stored.has_optimizer and rounded and dtype == "fp32":
        rule = f"cannot be had: the optimizer's format does not tell its values of {len(rounded)} tensors"
        faults.append(Fault("--dtype", dtype, rule, "use bf16, which the model itself is stored in"))
    return faults


def _header(folder: Path, known: KnownModel) -> dict[str, str]:
    """What an exported safetensors file says of itself."""
    header = {"format": "pt"}
    if known.section is not None:
        header[MODEL_KEY] = json.dumps(known.section.model_dump(mode="json"))
    if known.softmax_scale is not None:
        header["mixle_megatron.softmax_scale"] = str(known.softmax_scale)
    if known.logit_factor != 1.0:
        header[f"mixle_megatron.{LOGIT_FACTOR}"] = str(known.logit_factor)
    step = step_of(folder.name)
    if step is not None:
        header["mixle_megatron.step"] = str(step)
    return header


@contextmanager
def _aside(out: Path) -> Iterator[Path]:
    """A name beside ``out`` that becomes it once the file is written and on disk."""
    aside = out.with_name(out.name + WRITING)
    try:
        yield aside
        sync_file(aside)
        rename(aside, out)
    finally:
        aside.unlink(missing_ok=True)
