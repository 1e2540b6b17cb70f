"""Token ids in one array: a ``.npy`` file that is mapped, or what a caller has in memory.

It is what mixle's models are trained on (``stream_token_source`` takes such an array and gives windows with
the one token that follows each). Here a sample predicts the token after each of its own, as everywhere in
this package.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mixle_megatron.data.built_once import build_once
from mixle_megatron.data.corpus import add_sampled
from mixle_megatron.data.source import WindowSequence
from mixle_megatron.errors import Fault, Refused, refuse_if_any

_CHUNK = 4 << 20  # tokens


@dataclass(frozen=True)
class TokenArray:
    """Tokens one after another, without ends of documents that anybody knows of.

    Attributes:
        tokens: integers of shape (num_tokens,).
        digest: equal for equal arrays.
    """

    tokens: NDArray
    digest: str

    @property
    def num_tokens(self) -> int:
        """How many."""
        return len(self.tokens)

    def part(self, first: int, last: int) -> TokenArray:
        """The tokens from ``first`` to before ``last``, as a view."""
        return TokenArray(self.tokens[first:last], f"{self.digest}[{first}:{last}]")


def token_windows(ids: ArrayLike, *, sequence_length: int, seed: int | None) -> WindowSequence:
    """Samples of an array of token ids, such as the one that mixle's ``stream_token_source`` takes.

    Args:
        ids: integers of shape (tokens,); an array is not copied.
        sequence_length: S, at least 1.
        seed: shuffles, differently each epoch; None keeps the order.

    Raises:
        Refused: they are no integers, or not one after another.
    """
    tokens = np.asarray(ids)
    refuse_if_any(_array_faults(tokens, "ids", None))
    digest = hashlib.blake2b(np.ascontiguousarray(tokens).data, digest_size=16).hexdigest()
    return WindowSequence(TokenArray(tokens, digest), sequence_length=sequence_length, seed=seed, field="ids")


def open_tokens(path: str, field: str) -> TokenArray:
    """The array of a ``.npy`` file, mapped.

    Args:
        path: of the file.
        field: its key in the config.

    Raises:
        Refused: there is no such file, or it holds something else.
    """
    file = os.path.expanduser(path)
    try:
        tokens = np.load(file, mmap_mode="r", allow_pickle=False)
        digest = hashlib.blake2b(digest_size=16)
        add_sampled(digest, file)
    except OSError as error:
        rule = f"cannot be read: {error.strerror or error}"
        raise Refused([Fault(field, path, rule, "give a .npy file, as numpy.save writes it")]) from error
    except (ValueError, EOFError) as error:
        rule = f"is no array of numbers: {error}"
        raise Refused([Fault(field, path, rule, "write it with numpy.save")]) from error
    refuse_if_any(_array_faults(tokens, field, path))
    return TokenArray(tokens, digest.hexdigest())


def _array_faults(tokens: NDArray, field: str, value: str | None) -> Iterator[Fault]:
    if tokens.ndim != 1:
        rule = f"has shape {tokens.shape}, and tokens come one after another"
        yield Fault(field, value, rule, "give an array of one dimension: ids.reshape(-1)")
    if not np.issubdtype(tokens.dtype, np.integer):
        yield Fault(field, value, f"holds {tokens.dtype}, which are no token ids", "give integers")


def cut_off(array: TokenArray, fraction: float) -> tuple[TokenArray, TokenArray]:
    """What trains, and the share from the end that validates."""
    first = array.num_tokens - round(array.num_tokens * fraction)
    return array.part(0, first), array.part(first, array.num_tokens)


def length_faults(array: TokenArray, field: str, path: str, sequence_length: int) -> list[Fault]:
    """Whether there is a sample."""
    if array.num_tokens > sequence_length:
        return []
    rule = (
        f"gives {array.num_tokens} tokens to a part, and one sample of model.seq_length={sequence_length}"
        " takes one more"
    )
    return [Fault(field, path, rule, "give more tokens, or a shorter sequence")]


def refuse_foreign(array: TokenArray, field: str, path: str, vocab_size: int, cache: Path) -> None:
    """Refuse ids that the model does not have; the array is read once, and its range kept in ``cache``."""
    key = hashlib.blake2b(json.dumps(array.digest).encode(), digest_size=12).hexdigest()
    folder = cache / f"tokens-{key}"
    build_once(folder, lambda: {"range.npy": _range(array.tokens)})
    for end in np.load(folder / "range.npy").tolist():
        if not 0 <= end < vocab_size:
            rule = f"holds the token {end}, which is none of model.vocab_size={vocab_size}"
            raise Refused([Fault(field, path, rule, f"use {end + 1} or more" if end >= 0 else "mend it")])


def _range(tokens: NDArray) -> NDArray[np.int64]:
    """The smallest and the largest id, read a piece at a time."""
    ends = [
        (int(piece.min()), int(piece.max()))
        for first in range(0, len(tokens), _CHUNK)
        for piece in (tokens[first : first + _CHUNK],)
    ]
    return np.array([min(low for low, _ in ends), max(high for _, high in ends)], dtype=np.int64)
