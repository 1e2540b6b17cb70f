"""The checkpoint that an export reads: which folder it is, and what is known of its model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mixle_megatron.checkpoint.inspection import locate
from mixle_megatron.checkpoint.manifest import MANIFEST, read_manifest
from mixle_megatron.checkpoint.portable_names import VOCABULARY
from mixle_megatron.checkpoint.safe_metadata import METADATA, read_metadata
from mixle_megatron.checkpoint.stored_tensors import ModelTensor, StoredTensors
from mixle_megatron.config.load import load_config
from mixle_megatron.config.model import ModelSection
from mixle_megatron.errors import CheckpointError, Fault, Refused, refuse_if_any
from mixle_megatron.models.causal_lm_names import LOGIT_FACTOR

_LAYER = re.compile(r"decoder\.layers\.(\d+)\..+")
_POSITIONS = "embedding.position_embeddings.weight"
_WHOLE = {"num_attention_heads", "activation_func", "layernorm_epsilon"}
"""Fields that no tensor tells; sizes alone do not describe a model."""


def checkpoint_folder(path: Path) -> Path:
    """The folder of a checkpoint: ``path``, or the newest of the run's folder ``path``.

    Raises:
        Refused: there is no checkpoint.
    """
    folder = locate(path)
    if not (folder / METADATA).is_file():
        rule = f"is no checkpoint in Megatron's torch_dist format: {folder} has no {METADATA}"
        raise Refused([Fault("PATH", str(path), rule)])
    return folder


def open_checkpoint(folder: Path) -> StoredTensors:
    """The tensors of a checkpoint; nothing that is in it is run.

    Raises:
        CheckpointError: its metadata cannot be read.
    """
    return StoredTensors(folder, read_metadata(folder / METADATA))


@dataclass(frozen=True)
class KnownModel:
    """What is known of a checkpoint's model beside its tensors.

    Attributes:
        section: the whole model, as a config states it; None where nothing tells all of it.
        vocab_size: tokens; None where that is not known.
        heads: attention heads; None where that is not known.
        softmax_scale: of attention, where it is another than the usual one.
        logit_factor: what the logits are multiplied by, as muP does.
    """

    section: ModelSection | None = None
    vocab_size: int | None = None
    heads: int | None = None
    softmax_scale: float | None = None
    logit_factor: float = 1.0


def known_model(folder: Path, config: Path | None) -> KnownModel:
    """The model of a checkpoint, from the first that tells: ``config``, the run whose it is, its manifest.

    Raises:
        Refused: the config is not sound.
        CheckpointError: the manifest is damaged.
    """
    of_run = folder.absolute().parent.parent / "config.yaml"
    stated = (read_manifest(folder).facts.model if (folder / MANIFEST).is_file() else None) or {}
    section = None
    if config is not None or of_run.is_file():
        section = load_config(config or of_run).config.model
    elif stated.keys() >= _WHOLE:
        section = _section(folder, stated)
    sizes = stated if section is None else section.model_dump()
    return KnownModel(
        section,
        sizes.get("vocab_size"),
        sizes.get("num_attention_heads"),
        stated.get("softmax_scale"),
        stated.get(LOGIT_FACTOR, 1.0),
    )


def _section(folder: Path, stated: Mapping[str, Any]) -> ModelSection:
    """The ``model`` section of what a manifest states, which may be more than that section has."""
    try:
        return ModelSection.model_validate(
            {name: stated[name] for name in ModelSection.model_fields if name in stated}
        )
    except ValidationError as error:
        text = f"{folder / MANIFEST} describes a model that no config can: {error}"
        raise CheckpointError(text) from error


def known_wrongly(tensors: Mapping[str, ModelTensor], known: KnownModel) -> list[Fault]:
    """Where what is known cannot be of these tensors, as with the config of another run."""
    if known.section is None:
        return []
    found = {"num_layers": _number_of_layers(tensors)}
    if VOCABULARY[0] in tensors:
        found["hidden_size"] = tensors[VOCABULARY[0]].shape[1]
    return [
        Fault(f"model.{name}", stated, f"is {size} in the checkpoint", "give the config of its run")
        for name, size in found.items()
        if (stated := getattr(known.section, name)) != size
    ]


def _number_of_layers(tensors: Iterable[str]) -> int:
    return 1 + max((int(match[1]) for match in map(_LAYER.fullmatch, tensors) if match), default=-1)


def vocabulary_rows(stored: StoredTensors, known: KnownModel, stated: int | None) -> int | None:
    """How many rows of the vocabulary are tokens, and not padding; None where there is no vocabulary.

    Rows of padding are zeros, always, and rows of tokens are not. So nothing need be known where the last
    row is none of zeros.

    Raises:
        Refused: the number has to be stated, is known to be another, or is above what the checkpoint has.
    """
    names = [name for name in VOCABULARY if name in stored.tensors]
    if not names:
        return None
    rows = min(stored.tensors[name].shape[0] for name in names)
    refuse_if_any(_contradictions("--vocab-size", stated, known.vocab_size))
    vocab_size = stated or known.vocab_size
    if vocab_size is not None:
        rule = f"is above the {rows} rows of the checkpoint's vocabulary"
        refuse_if_any([Fault("vocab_size", vocab_size, rule)] if vocab_size > rows else [])
        return vocab_size
    if not stored.read(names[0])[-1].any():
        rule = f"is not stated, and the checkpoint's {rows} rows end with padding"
        raise Refused([Fault("--vocab-size", None, rule, "state it, or the run's --config")])
    return rows


def _contradictions(option: str, stated: int | None, known: int | None) -> list[Fault]:
    if stated is None or known is None or stated == known:
        return []
    return [Fault(option, stated, f"is {known} in what is known of this checkpoint", f"use {known}")]


def language_model_section(
    tensors: Mapping[str, ModelTensor], known: KnownModel, heads: int | None, vocab_size: int | None
) -> ModelSection:
    """The ``model`` section of what is to be mixle's CausalLM.

    Where nothing tells the whole model, ``heads`` says that it is a CausalLM, and how many heads it has,
    which leave no trace in any shape; its other sizes are those of its tensors.

    Raises:
        Refused: that has to be stated, is known to be otherwise, or there is no such model.
    """
    refuse_if_any(_contradictions("--heads", heads, known.heads))
    if known.softmax_scale is not None:
        rule = "scales the model's attention, and a file of mixle's LM.save does not keep that"
        raise Refused([Fault("softmax_scale", known.softmax_scale, rule, "use --to safetensors")])
    if known.section is not None:
        return known.section
    layers = _number_of_layers(tensors)
    if not layers or _POSITIONS not in tensors or vocab_size is None:
        rule = "has no layers, no embedding or no learned positions, and so is no mixle CausalLM"
        raise Refused([Fault("PATH", None, rule, "use --to safetensors")])
    positions, width = tensors[_POSITIONS].shape
    if heads is None or heads < 1 or width % heads:
        rule = f"must be the number of heads of a mixle CausalLM, which divides its width {width}"
        remedy = "state it, or the run's --config: nothing in this checkpoint tells what the model computes"
        raise Refused([Fault("--heads", heads, rule, remedy)])
    return ModelSection(
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        seq_length=positions,
        vocab_size=vocab_size,
    )
