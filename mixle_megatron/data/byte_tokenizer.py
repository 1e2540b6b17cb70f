"""Bytes as tokens: ids 0 to 255 are the bytes themselves, 256 ends a document."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray


class ByteTokenizer:
    """A tokenizer without a vocabulary file: every text is its own UTF-8 bytes."""

    name: ClassVar[str] = "byte"
    eod: ClassVar[int] = 256
    vocab_size: ClassVar[int] = 257

    def encode(self, text: str | bytes) -> NDArray[np.uint16]:
        """The ids of ``text``, without an end token: uint16, one an UTF-8 byte (or given byte)."""
        raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: ArrayLike) -> bytes:
        """The bytes of ``tokens`` (integers of any shape, read in order); end tokens are left out.

        Bytes and not text, as a window may cut a character in two: ``.decode(errors="replace")``
        shows it.

        Raises:
            ValueError: an id lies outside 0 to 256.
        """
        ids = np.asarray(tokens).reshape(-1)
        if ids.size and (ids.min() < 0 or ids.max() > self.eod):
            raise ValueError(f"byte tokens are 0 to {self.eod}, got {ids.min()} to {ids.max()}")
        return ids[ids != self.eod].astype(np.uint8).tobytes()
