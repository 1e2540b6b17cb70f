"""The text source: files of text, as bytes, split by document and packed into two token streams."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mixle_megatron.data.documents import find_documents
from mixle_megatron.data.folder_walk import Document
from mixle_megatron.data.split import sample_documents, split_documents, split_faults
from mixle_megatron.errors import Fault, refuse_if_any

if TYPE_CHECKING:
    from mixle_megatron.data.source import WindowSequence
    from mixle_megatron.data.stream_cache import Progress, TokenStream


class TextSection(Protocol):
    """The ``data`` section of a config whose source is ``text``.

    Attributes:
        source: ``text``.
        tokenizer: ``byte``.
        paths: files, folders, globs or ``stdlib`` (see :mod:`mixle_megatron.data.documents`).
        suffixes: which files of a folder count; None for the default.
        max_bytes: cap on the text, in bytes, that whole documents are chosen to fit; None for all.
        validation_fraction: share of the documents that validate, in [0, 1); 0 for none.
    """

    source: str
    tokenizer: str
    paths: Sequence[str]
    suffixes: Sequence[str] | None
    max_bytes: int | None
    validation_fraction: float


@dataclass(frozen=True)
class TokenStreams:
    """The two token streams of a text source, and how they are cut into windows.

    Attributes:
        train: tokens of the documents that train.
        validation: tokens of the documents that validate; empty if ``validation_fraction`` is 0.
        sequence_length: S; a window is S + 1 tokens.
        seed: the run's seed, which shuffles the training windows.
    """

    train: TokenStream
    validation: TokenStream
    sequence_length: int
    seed: int

    def training_windows(self) -> WindowSequence:
        """The windows of the training stream, shuffled anew each epoch."""
        return self._windows(self.train, shuffle=True)

    def validation_windows(self) -> WindowSequence:
        """The windows of the validation stream, in the order of the text."""
        return self._windows(self.validation, shuffle=False)

    def _windows(self, stream: TokenStream, *, shuffle: bool) -> WindowSequence:
        from mixle_megatron.data.source import WindowSequence

        return WindowSequence(
            stream, sequence_length=self.sequence_length, seed=self.seed if shuffle else None
        )


def check_source(
    section: TextSection, *, seed: int | None = None, seq_length: int | None = None
) -> list[Fault]:
    """Everything that is wrong with a ``data`` section on this machine, by names and sizes alone.

    Args:
        section: the section.
        seed: the run's seed; without it, only the paths are judged and not the split.
        seq_length: tokens of a training sequence; without it, one token.

    Returns:
        Faults of the fields ``data.*``; none if :func:`prepare_text_data` will accept the section.
    """
    return _choose_documents(section, seed=seed, sequence_length=seq_length or 1)[1]


def prepare_text_data(
    section: TextSection,
    *,
    seq_length: int,
    seed: int,
    cache_dir: str | os.PathLike[str],
    progress: Progress | None = None,
) -> TokenStreams:
    """The token streams of a ``data`` section, built into ``cache_dir`` unless they are there already.

    Every process of a node may call this at once: one builds, all map the same files.

    Args:
        section: the section.
        seq_length: tokens of a training sequence.
        seed: the run's seed, which decides the split and the order.
        cache_dir: a folder, made if it is missing; the cache takes two bytes a byte of text.
        progress: called as ``progress(done_bytes, total_bytes)`` while this process builds.

    Raises:
        Refused: with every fault that :func:`check_source` finds; or a file cannot be read or changes
            while it is, or the cache cannot be written.
    """
    from mixle_megatron.data.stream_cache import open_or_build

    documents, faults = _choose_documents(section, seed=seed, sequence_length=seq_length)
    refuse_if_any(faults)
    train, validation = split_documents(documents, fraction=section.validation_fraction, seed=seed)
    streams = open_or_build({"train": train, "validation": validation}, cache_dir, progress)
    return TokenStreams(streams["train"], streams["validation"], seq_length, seed)


def _choose_documents(
    section: TextSection, *, seed: int | None, sequence_length: int
) -> tuple[list[Document], list[Fault]]:
    """The documents that a section chooses, and its faults; a split is judged once there are documents."""
    documents, path_faults = find_documents(section.paths, section.suffixes)
    faults = [*_option_faults(section), *path_faults]
    if faults:
        return [], faults
    if section.max_bytes is not None:
        smallest = min(document.size for document in documents)
        documents = sample_documents(documents, section.max_bytes)
        if not documents:
            rule = f"is less than the smallest document, of {smallest} bytes"
            return [], [Fault("data.max_bytes", section.max_bytes, rule, f"give at least {smallest}")]
    if seed is not None:
        faults = split_faults(
            documents, fraction=section.validation_fraction, seed=seed, sequence_length=sequence_length
        )
    return documents, faults


def _option_faults(section: TextSection) -> list[Fault]:
    """What is wrong with a section whatever the machine."""
    faults = []
    if section.source != "text":
        faults.append(Fault("data.source", section.source, "is not a source of text", "use text"))
    if section.tokenizer != "byte":
        faults.append(
            Fault("data.tokenizer", section.tokenizer, "is no tokenizer of source text", "use byte")
        )
    if not 0 <= section.validation_fraction < 1:
        faults.append(
            Fault("data.validation_fraction", section.validation_fraction, "must be in [0, 1)", "use 0.05")
        )
    if section.max_bytes is not None and section.max_bytes < 1:
        faults.append(
            Fault("data.max_bytes", section.max_bytes, "must be at least 1", "leave it out for all")
        )
    return faults
