"""What a model that knows only byte counts would score: the text's own entropies, to compare losses with."""

from __future__ import annotations

import contextlib
import json
import os

import numpy as np
from numpy.typing import NDArray

from mixle_megatron.data.byte_tokenizer import ByteTokenizer
from mixle_megatron.data.stream_cache import TokenStream, written_aside

_CHUNK = 1 << 20
_VOCABULARY = ByteTokenizer.vocab_size


def byte_entropies(stream: TokenStream) -> tuple[float, float]:
    """Entropy of a byte, and of a byte given the one before it, both in nats per byte.

    Plug-in estimates from all bytes of a stream, and from all pairs of neighbours in one document; end
    tokens count in neither. The result is kept beside the stream, if it can be, for the next call.

    Returns:
        ``(unigram, bigram)``; 0.0 where there is nothing to count.
    """
    kept = f"{os.path.splitext(stream.path)[0]}.entropy.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(kept, "rb") as handle:
        record = json.load(handle)
        if record["digest"] == stream.digest:
            return float(record["unigram"]), float(record["bigram"])
    counts = _pair_counts(stream.tokens)
    unigram, bigram = _entropies(counts, stream.tokens)
    record = {"digest": stream.digest, "unigram": unigram, "bigram": bigram}
    with contextlib.suppress(OSError), written_aside(kept) as out:
        out.write(json.dumps(record).encode())
    return unigram, bigram


def _pair_counts(tokens: NDArray[np.uint16]) -> NDArray[np.int64]:
    """How often each token follows each: shape (257, 257), first by second."""
    counts = np.zeros(_VOCABULARY**2, dtype=np.int64)
    for start in range(0, len(tokens) - 1, _CHUNK):
        piece = np.asarray(tokens[start : start + _CHUNK + 1]).astype(np.int64)
        counts += np.bincount(piece[:-1] * _VOCABULARY + piece[1:], minlength=counts.size)
    return counts.reshape(_VOCABULARY, _VOCABULARY)


def _entropies(pairs: NDArray[np.int64], tokens: NDArray[np.uint16]) -> tuple[float, float]:
    """Unigram and bigram entropy from the counts of pairs."""
    eod = ByteTokenizer.eod
    singles = pairs.sum(axis=0)  # each token as a second one: all but the stream's first
    if len(tokens):
        singles[tokens[0]] += 1
    within = pairs[:eod, :eod]
    joint = _entropy(within)
    return _entropy(singles[:eod]), max(joint - _entropy(within.sum(axis=1)), 0.0)


def _entropy(counts: NDArray[np.int64]) -> float:
    """Entropy of the distribution that counts make, in nats."""
    seen = counts[counts > 0].astype(np.float64)
    if not seen.size:
        return 0.0
    return float(np.log(seen.sum()) - (seen * np.log(seen)).sum() / seen.sum())
