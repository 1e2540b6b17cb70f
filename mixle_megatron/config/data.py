"""The ``data`` section, which has other keys for each kind of source, and the sets of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WrapValidator
from pydantic_core import PydanticKnownError

from mixle_megatron.config.fields import Count, CountOrZero, Fraction, NumberOrZero, Positive, Section, Text

SOURCES = ("text", "indexed", "tokens")
"""Every kind of source, the one that a section has that names none first."""


def _known_source(value: Any) -> Any:
    """Refuse what is no source with all that are, and not with the one of the section it came to."""
    if value not in SOURCES:
        raise PydanticKnownError("literal_error", {"expected": ", ".join(map(repr, SOURCES))})
    return value


_KnownSource = BeforeValidator(_known_source)


class TextSection(Section):
    """Text files as the source of tokens."""

    source: Annotated[Literal["text"], _KnownSource] = Field(
        default="text", description="Kind of source: text files."
    )
    paths: list[Text] = Field(
        min_length=1,
        description="Files, folders and globs; stdlib means the running Python's own library sources.",
    )
    tokenizer: Literal["byte"] = Field(
        default="byte", description="byte: ids 0-255 are bytes, 256 ends a document."
    )
    validation_fraction: Fraction = Field(
        default=0.05, description="Share of the documents that is held out for evaluation."
    )
    suffixes: list[Text] | None = Field(
        default=None, description="File name endings to read in folders; null reads the source's usual ones."
    )
    max_bytes: Count | None = Field(default=None, description="Read no more than this many bytes of text.")


class BlendEntry(Section):
    """One corpus of a blend."""

    path: Text = Field(description="Prefix of the corpus: PATH.bin and PATH.idx are its files.")
    weight: Positive = Field(default=1.0, description="Its share of the samples, against the other weights.")


class IndexedSection(Section):
    """Corpora in Megatron's indexed format as the source of tokens, read by its GPTDataset."""

    source: Annotated[Literal["indexed"], _KnownSource] = Field(
        description="Kind of source: Megatron's indexed datasets."
    )
    blend: list[BlendEntry] = Field(min_length=1, description="The corpora, each with its weight.")
    split: list[NumberOrZero] = Field(
        default=[0.98, 0.01, 0.01],
        min_length=1,
        max_length=3,
        description="Shares of each corpus's documents that train, validate and test, in their order.",
    )
    eod: CountOrZero | None = Field(
        default=None, description="The token that ends a document; null: what PREFIX.json says."
    )
    eod_mask_loss: bool = Field(
        default=False, description="Leave out of the loss what follows the end of a document."
    )
    reset_position_ids: bool = Field(
        default=False, description="Count learned positions from each document's start."
    )
    reset_attention_mask: bool = Field(default=False, description="Attend within a document alone.")
    cache: Text | None = Field(
        default=None, description="Folder of the sample indices, shared by all ranks; null: run.dir/.data."
    )


class TokensSection(Section):
    """One array of token ids as the source of tokens."""

    source: Annotated[Literal["tokens"], _KnownSource] = Field(
        description="Kind of source: an array of token ids."
    )
    path: Text = Field(description="A .npy file with a one-dimensional array of integers.")
    validation_fraction: Fraction = Field(
        default=0.05, description="Share of the array, from its end, that is held out for evaluation."
    )


DATA_SECTIONS: dict[str, type[Section]] = {
    "text": TextSection,
    "indexed": IndexedSection,
    "tokens": TokensSection,
}
"""The section of each kind of source."""


def data_section(values: Any) -> type[Section]:
    """The section of ``values``: by ``source``, by what that comes nearest to, or by most of their keys."""
    if not isinstance(values, Mapping) or "source" not in values:
        return DATA_SECTIONS[SOURCES[0]]
    stated = values["source"]
    near = get_close_matches(stated, SOURCES, n=1) if isinstance(stated, str) else []
    if near:
        return DATA_SECTIONS[near[0]]
    return max(DATA_SECTIONS.values(), key=lambda section: len(section.model_fields.keys() & values.keys()))


def _of_its_source(values: Any, _handler: Any) -> Any:
    """Validate by the section of the source alone: a plain union would report the faults of each."""
    if isinstance(values, tuple(DATA_SECTIONS.values())):
        return values
    return data_section(values).model_validate(values)


DataSection = Annotated[TextSection | IndexedSection | TokensSection, WrapValidator(_of_its_source)]
"""The data section."""


class ValidationSetSection(Section):
    """A named set that is evaluated; it has one of text, corpora or tokens, and all of that validates."""

    paths: list[Text] | None = Field(
        default=None, min_length=1, description="Text, as bytes: files, folders and globs, or stdlib."
    )
    blend: list[BlendEntry] | None = Field(
        default=None, min_length=1, description="Corpora in Megatron's indexed format, with weights."
    )
    path: Text | None = Field(default=None, description="A .npy file of token ids.")
