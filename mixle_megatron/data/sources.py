"""The data of a run, opened: one source of training samples and any number of named validation sets."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mixle_megatron.data.checking import (
    TRAIN,
    VALIDATION,
    DataRequest,
    check_data,
    held_out_share,
    set_blend,
    training_blend,
)
from mixle_megatron.data.documents import find_documents
from mixle_megatron.data.indexed import Blend
from mixle_megatron.data.source import SampleSource, WindowSequence
from mixle_megatron.data.stream_cache import Progress, TokenStream, open_or_build
from mixle_megatron.data.text import prepare_text_data
from mixle_megatron.data.token_array import cut_off, open_tokens, refuse_foreign
from mixle_megatron.errors import Refused
from mixle_megatron.rules.data import HELD_OUT


@dataclass(frozen=True)
class ValidationSet:
    """Samples to evaluate on.

    Attributes:
        name: in records and on the screen.
        source: the samples.
        bytes_per_token: UTF-8 bytes of text to a token, on average, for bits a byte; None where not known.
    """

    name: str
    source: SampleSource
    bytes_per_token: float | None


@dataclass(frozen=True)
class RunData:
    """What a run reads.

    Attributes:
        training: the samples to train on.
        validation: the sets to evaluate on, the held-out one first.
        text: the text that is trained on, byte by byte, whose entropies losses are compared with; None
            where the tokens are no bytes.
        document_end: the token that ends a document, where corpora or the config say it.
    """

    training: SampleSource
    validation: tuple[ValidationSet, ...]
    text: TokenStream | None = None
    document_end: int | None = None


def prepare_data(
    request: DataRequest, *, cache_dir: str | os.PathLike[str], progress: Progress | None = None
) -> RunData:
    """Open the data, with what it needs beside it built into a folder unless it is there already.

    Any number of processes may call this at once, on one node or on many that share the folder: one builds,
    all map the same files.

    Args:
        request: what to open.
        cache_dir: the folder, made if it is missing.
        progress: called as ``progress(done_bytes, total_bytes)`` while this process reads text.

    Raises:
        Refused: with every fault that :func:`check_data` finds; or what cannot be read or written.
    """
    faults = check_data(request)
    if faults:
        raise Refused(faults)
    cache = Path(getattr(request.section, "cache", None) or cache_dir).expanduser()
    openers = {"text": _open_text, "indexed": _open_indexed, "tokens": _open_tokens}
    data = openers[request.section.source](request, cache, progress)
    if not request.evaluates:
        return replace(data, validation=())
    sets = (_open_set(name, section, request, cache, progress) for name, section in request.sets.items())
    return replace(data, validation=(*data.validation, *sets))


def _open_text(request: DataRequest, cache: Path, progress: Progress | None) -> RunData:
    streams = prepare_text_data(
        request.section,
        seq_length=request.sequence_length,
        seed=request.seed,
        cache_dir=cache,
        progress=progress,
    )
    held_out = _text_set(HELD_OUT, streams.validation_windows(), streams.validation)
    return RunData(
        streams.training_windows(), (held_out,) if held_out.source.num_windows else (), streams.train
    )


def _open_indexed(request: DataRequest, cache: Path, _progress: Progress | None) -> RunData:
    blend = training_blend(request.section)
    training = _blend_source(blend, TRAIN, request, cache)
    if not request.evaluates or not held_out_share(request.section):
        return RunData(training, (), document_end=blend.document_end())
    held_out = _blend_source(blend, VALIDATION, request, cache)
    validation = (ValidationSet(HELD_OUT, held_out, blend.bytes_per_token()),)
    return RunData(training, validation, document_end=blend.document_end())


def _open_tokens(request: DataRequest, cache: Path, _progress: Progress | None) -> RunData:
    section = request.section
    tokens = open_tokens(section.path, "data.path")
    refuse_foreign(tokens, "data.path", section.path, request.vocab_size, cache)
    train, held_out = cut_off(tokens, section.validation_fraction)
    windows = [
        WindowSequence(part, sequence_length=request.sequence_length, seed=seed, field="data.path")
        for part, seed in ((train, request.seed), (held_out, None))
    ]
    return RunData(windows[0], (ValidationSet(HELD_OUT, windows[1], None),) if windows[1].num_windows else ())


def _open_set(
    name: str, section: Any, request: DataRequest, cache: Path, progress: Progress | None
) -> ValidationSet:
    """One of ``evaluation.sets``, all of which validates."""
    length, field = request.sequence_length, f"evaluation.sets.{name}.path"
    if section.blend is not None:
        blend = set_blend(name, section, request)
        return ValidationSet(name, _blend_source(blend, VALIDATION, request, cache), blend.bytes_per_token())
    if section.path is not None:
        tokens = open_tokens(section.path, field)
        refuse_foreign(tokens, field, section.path, request.vocab_size, cache)
        return ValidationSet(
            name, WindowSequence(tokens, sequence_length=length, seed=None, field=field), None
        )
    documents, _ = find_documents(section.paths, None)
    stream = open_or_build({"train": [], "validation": documents}, cache, progress)["validation"]
    return _text_set(name, WindowSequence(stream, sequence_length=length, seed=None), stream)


def _text_set(name: str, windows: WindowSequence, stream: TokenStream) -> ValidationSet:
    """A set of bytes, in which all tokens but the ends of documents are one."""
    bytes_per_token = (stream.num_tokens - stream.num_documents) / max(stream.num_tokens, 1)
    return ValidationSet(name, windows, bytes_per_token or None)


def _blend_source(blend: Blend, part: int, request: DataRequest, cache: Path) -> SampleSource:
    return blend.source(part, sequence_length=request.sequence_length, seed=request.seed, cache=cache)
