"""Which documents train and which validate, and what must hold of the two parts.

A document goes where the hash of the seed and its own name sends it. Neither the order of the
documents nor what else is in the corpus matters, and a larger fraction keeps every document that
a smaller one gave to validation.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from mixle_megatron.data.folder_walk import Document
from mixle_megatron.errors import Fault

_GRID = 10_000  # fractions are named in remedies to four digits


def split_point(name: str, seed: int) -> float:
    """Where a document stands in [0, 1): it validates if this is below the fraction.

    Args:
        name: the document's name; bytes of a file name that are no text are taken as they are.
        seed: the run's seed.
    """
    text = f"{seed}/split/{name}".encode("utf-8", "surrogateescape")
    return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 11) / 2**53


def split_documents(
    documents: Sequence[Document], *, fraction: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """The documents that train and those that validate, each in the order given."""
    train, validation = [], []
    for document in documents:
        (validation if split_point(document.name, seed) < fraction else train).append(document)
    return train, validation


def byte_tokens(documents: Sequence[Document]) -> int:
    """How many tokens the documents make: one a byte, and an end token each."""
    return sum(document.size + 1 for document in documents)


def sample_documents(documents: Sequence[Document], max_bytes: int) -> list[Document]:
    """A part of the documents, in their order, of at most ``max_bytes`` in all.

    They are taken whole, in the order of a hash of their names, each that still fits: so that a cap
    takes from all of a corpus and not from its beginning. The seed plays no part.
    """
    taken, total = set(), 0
    for document in sorted(documents, key=lambda each: (split_point(each.name, 0), each.path)):
        if total + document.size <= max_bytes:
            taken.add(document.path)
            total += document.size
    return [document for document in documents if document.path in taken]


def split_faults(
    documents: Sequence[Document], *, fraction: float, seed: int, sequence_length: int
) -> list[Fault]:
    """What keeps the documents from a split in which each part has a window to give.

    A fraction of 0 asks for no validation part. Remedies name the fractions that work, as far as
    four digits tell them apart.
    """
    train, validation = split_documents(documents, fraction=fraction, seed=seed)
    lacking = [
        f"{label} part {len(part)} of {len(documents)} documents and {byte_tokens(part)} tokens"
        for label, part in (("training", train), ("validation", validation))
        if byte_tokens(part) <= sequence_length and (label == "training" or fraction > 0)
    ]
    if not lacking:
        return []
    total = byte_tokens(documents)
    if total <= sequence_length:
        rule = f"hold {total} tokens, and one window of model.seq_length={sequence_length} needs one more"
        remedy = f"give more text, or a model.seq_length of at most {total - 1}"
        return [Fault("data.paths", None, rule, remedy)]
    rule = (
        f"gives the {' and the '.join(lacking)}; each part needs a document"
        f" and a window of {sequence_length + 1} tokens"
    )
    return [
        Fault(
            "data.validation_fraction", fraction, rule, _fractions_that_work(documents, seed, sequence_length)
        )
    ]


def _fractions_that_work(documents: Sequence[Document], seed: int, sequence_length: int) -> str:
    """The remedy of a split with too small a part."""
    points = sorted((split_point(each.name, seed), each.size + 1) for each in documents)
    total, below, lowest, highest = byte_tokens(documents), 0, None, None
    for point, tokens in points:
        if total - below > sequence_length:
            highest = math.floor(point * _GRID) / _GRID
        below += tokens
        if lowest is None and below > sequence_length:
            lowest = (math.floor(point * _GRID) + 1) / _GRID
    if lowest is not None and highest is not None and lowest <= highest:
        between = f"{lowest}" if lowest == highest else f"{lowest} to {highest}"
        return f"with this seed {between} works; or give more documents, or 0 for no validation"
    return "give more documents (a document is one file), or 0 for no validation"
