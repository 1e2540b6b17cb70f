"""What speaks against the data of a config on this machine, whatever its kind, by the files alone.

It needs neither torch nor a process group, and numpy only where corpora or arrays are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mixle_megatron.data.documents import find_documents
from mixle_megatron.data.split import byte_tokens
from mixle_megatron.data.text import check_source
from mixle_megatron.errors import Fault, Refused
from mixle_megatron.rules import vocabulary_faults

if TYPE_CHECKING:
    from mixle_megatron.data.indexed import Blend

TRAIN, VALIDATION = 0, 1
"""Places of the parts in a split, as Megatron counts them."""

BOUNDS = ("reset_position_ids", "reset_attention_mask")
"""Options by which documents are apart in the model itself, and so in whatever is evaluated."""

BYTES = "byte"  # the digest of the byte tokenizer
_NEED_THE_END = ("eod_mask_loss", *BOUNDS)
_ALL_VALIDATES = (0.0, 1.0)  # a split that trains on nothing


@dataclass(frozen=True)
class DataRequest:
    """What of a config decides its data.

    Attributes:
        section: the ``data`` section, of any source.
        sets: further validation sets by name, with ``paths``, ``blend`` or ``path``.
        evaluates: whether anything is ever evaluated.
        sequence_length: S.
        vocab_size: tokens that the model has.
        seed: of the run.
    """

    section: Any
    sets: Mapping[str, Any]
    evaluates: bool
    sequence_length: int
    vocab_size: int
    seed: int


def check_data(request: DataRequest) -> list[Fault]:
    """Everything that is wrong with the data on this machine, by names, sizes and indices alone."""
    checks = {"text": _text_faults, "indexed": _indexed_faults, "tokens": _tokens_faults}
    faults = _refusals(checks[request.section.source](request))
    if request.evaluates:
        tokenizer = None if faults else _tokenizer(request.section, "data.blend")
        for name, section in request.sets.items():
            faults += _refusals(_set_faults(name, section, request, tokenizer))
    if not faults and request.evaluates and not request.sets and not held_out_share(request.section):
        field = "data.split" if request.section.source == "indexed" else "data.validation_fraction"
        value = list(request.section.split) if request.section.source == "indexed" else 0.0
        remedy = "use [0.98, 0.02]" if request.section.source == "indexed" else "use 0.05"
        rule = "holds no text out, but evaluation.every asks for some"
        faults.append(Fault(field, value, rule, f"{remedy}, or evaluation.every=0"))
    return faults


def _refusals(faults: Iterator[Fault]) -> list[Fault]:
    """The faults, and those of a refusal on the way to them."""
    found = []
    try:
        for fault in faults:
            found.append(fault)
    except Refused as refused:
        found += refused.faults
    return found


def held_out_share(section: Any) -> float:
    """The share of the data that validates."""
    if section.source == "indexed":
        return section.split[VALIDATION] if len(section.split) > VALIDATION else 0.0
    return section.validation_fraction


def _tokenizer(section: Any, blend: str) -> str | None:
    """What tells tokenizers apart, of a section's tokens; None where nobody knows which made them.

    Args:
        section: of the data, or of a set.
        blend: the key of its blend.
    """
    if getattr(section, "paths", None) is not None:
        return BYTES
    if getattr(section, "blend", None) is not None:
        from mixle_megatron.data.corpus import open_blend

        records = (corpus.record for corpus in open_blend(section.blend, blend))
        return next((record.tokenizer_digest for record in records if record is not None), None)
    return None


def _text_faults(request: DataRequest) -> Iterator[Fault]:
    yield from check_source(request.section, seed=request.seed, seq_length=request.sequence_length)


def _indexed_faults(request: DataRequest) -> Iterator[Fault]:
    held_out = request.evaluates and held_out_share(request.section) > 0
    parts = (TRAIN, VALIDATION) if held_out else (TRAIN,)
    yield from training_blend(request.section).faults(parts, request.sequence_length, request.vocab_size)


def _tokens_faults(request: DataRequest) -> Iterator[Fault]:
    from mixle_megatron.data.token_array import cut_off, length_faults, open_tokens

    section = request.section
    train, held_out = cut_off(open_tokens(section.path, "data.path"), section.validation_fraction)
    yield from length_faults(train, "data.path", section.path, request.sequence_length)
    if request.evaluates and section.validation_fraction:
        yield from length_faults(held_out, "data.path", section.path, request.sequence_length)


def _set_faults(name: str, section: Any, request: DataRequest, trained_with: str | None) -> Iterator[Fault]:
    field = f"evaluation.sets.{name}"
    tokenizer = _tokenizer(section, f"{field}.blend")
    if tokenizer and trained_with and tokenizer != trained_with:
        rule = "has tokens of another tokenizer than the data that is trained on"
        yield Fault(field, None, rule, "build it with the same tokenizer")
    if section.blend is not None:
        blend = set_blend(name, section, request)
        yield from blend.faults((VALIDATION,), request.sequence_length, request.vocab_size)
        yield from _other_end(field, blend.document_end(), request)
    elif section.path is not None:
        from mixle_megatron.data.token_array import length_faults, open_tokens

        tokens = open_tokens(section.path, f"{field}.path")
        yield from length_faults(tokens, f"{field}.path", section.path, request.sequence_length)
    elif section.paths is not None:
        from mixle_megatron.data.byte_tokenizer import ByteTokenizer

        yield from vocabulary_faults(request.vocab_size, BYTES)
        yield from _other_end(field, ByteTokenizer.eod, request)
        documents, faults = find_documents(section.paths, None)
        yield from (replace(fault, field=f"{field}.paths") for fault in faults)
        if not faults and byte_tokens(documents) <= request.sequence_length:
            rule = f"hold {byte_tokens(documents)} tokens, and one sample takes {request.sequence_length + 1}"
            yield Fault(f"{field}.paths", None, rule, "give more text")


def _other_end(field: str, end: int | None, request: DataRequest) -> Iterator[Fault]:
    """Whether a set's documents end otherwise than those that the session keeps apart by their end."""
    if not any(getattr(request.section, name, False) for name in BOUNDS):
        return
    trained = training_blend(request.section).document_end()
    if None not in (end, trained) and end != trained:
        rule = f"has documents that end with token {end}, and those that are trained on end with {trained}"
        yield Fault(field, None, rule, "build it with the same end, or leave data.reset_* out")


def training_blend(section: Any) -> Blend:
    """The corpora of a ``data`` section."""
    from mixle_megatron.data.indexed import Blend

    return Blend(
        section.blend,
        "data.blend",
        section.split,
        "data.split",
        eod=section.eod,
        eod_mask_loss=section.eod_mask_loss,
        ended_by=_ended_by(section),
    )


def set_blend(name: str, section: Any, request: DataRequest) -> Blend:
    """The corpora of a validation set, all of whose documents validate."""
    from mixle_megatron.data.indexed import Blend

    field = f"evaluation.sets.{name}.blend"
    return Blend(
        section.blend,
        field,
        _ALL_VALIDATES,
        field,
        eod=getattr(request.section, "eod", None),
        eod_mask_loss=getattr(request.section, "eod_mask_loss", False),
        ended_by=_ended_by(request.section),
    )


def _ended_by(section: Any) -> list[str]:
    """The options of a ``data`` section that need the token which ends a document."""
    return [f"data.{name}" for name in _NEED_THE_END if getattr(section, name, False)]
