"""The tokenizers that a corpus can be built with, under the names that the command line has for them.

``byte`` is :class:`~mixle_megatron.data.byte_tokenizer.ByteTokenizer`. ``hf:PATH`` is a ``tokenizer.json``,
or a folder that holds one, read by the package ``tokenizers``. mixle 0.8 has no tokenizer file: its
models take token ids, so ``mixle:PATH`` names nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mixle_megatron.data.byte_tokenizer import ByteTokenizer
from mixle_megatron.errors import Fault, Refused

FIELD = "--tokenizer"
TOKENIZER_FILE = "tokenizer.json"
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json")


class CorpusTokenizer(Protocol):
    """Turns documents into token ids.

    Attributes:
        name: ``byte``, or ``hf:`` and the absolute path of its file.
        digest: of all that decides which ids a text gets (its end token aside), hexadecimal.
        vocab_size: one more than the largest id.
        eod: the id that ends a document, or None where the tokenizer has none.
    """

    name: str
    digest: str
    vocab_size: int
    eod: int | None

    def encode(self, documents: Sequence[bytes]) -> list[NDArray[Any] | list[int]]:
        """The ids of each document, which is valid UTF-8, without an end token."""
        ...

    def decode(self, ids: ArrayLike) -> str:
        """The text of some ids, as it can be shown: what is no whole character is replaced."""
        ...


def open_tokenizer(name: str, *, eod_token: str | None = None) -> CorpusTokenizer:
    """The tokenizer that a name stands for.

    Args:
        name: ``byte`` or ``hf:PATH``.
        eod_token: the text of the token that ends a document, where that is not the tokenizer's own.

    Raises:
        Refused: there is no such tokenizer, it cannot be read here, or it has no such token.
    """
    kind, _, path = name.partition(":")
    if name == ByteTokenizer.name:
        if eod_token is not None:
            rule = f"names no token of bytes: {ByteTokenizer.eod} ends a document"
            raise Refused([Fault("--eod-token", eod_token, rule, "leave it out")])
        return ByteCorpusTokenizer()
    if kind == "hf" and path:
        return HuggingFaceTokenizer(Path(path).expanduser(), eod_token)
    if kind == "mixle":
        rule = "names a tokenizer file of mixle, which has none in 0.8: its models take token ids"
        raise Refused([Fault(FIELD, name, rule, "use byte or hf:PATH")])
    raise Refused([Fault(FIELD, name, "is no tokenizer", "use byte or hf:PATH")])


class ByteCorpusTokenizer:
    """Bytes as tokens, for :func:`open_tokenizer`."""

    name = digest = ByteTokenizer.name
    vocab_size = ByteTokenizer.vocab_size
    eod: int | None = ByteTokenizer.eod

    def encode(self, documents: Sequence[bytes]) -> list[NDArray[Any] | list[int]]:
        """The bytes of each document: uint8, which the caller widens as it copies them."""
        return [np.frombuffer(document, dtype=np.uint8) for document in documents]

    def decode(self, ids: ArrayLike) -> str:
        """The text of some ids; end tokens are left out."""
        return ByteTokenizer().decode(ids).decode("utf-8", "replace")


class HuggingFaceTokenizer:
    """A ``tokenizer.json``, for :func:`open_tokenizer`.

    It adds no special tokens, and neither truncates nor pads, whatever its file says: a document is its
    text. Where the text itself spells a special token out it becomes that token, as everywhere with
    this library.
    """

    def __init__(self, path: Path, eod_token: str | None) -> None:
        self._tokenizer, version, raw = _read(path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._token_name = eod_token or _end_token(_file(path).parent)
        self.eod = self._end_id(eod_token)
        self.name = f"hf:{_file(path).absolute()}"
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.digest = hashlib.blake2b(version.encode() + b"\0" + raw, digest_size=16).hexdigest()

    @property
    def special_tokens(self) -> list[str]:
        """The texts of the tokenizer's special tokens."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def encode(self, documents: Sequence[bytes]) -> list[NDArray[Any] | list[int]]:
        """The ids of each document."""
        texts = [document.decode("utf-8") for document in documents]
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [each.ids for each in found]

    def decode(self, ids: ArrayLike) -> str:
        """The text of some ids, special tokens included."""
        return self._tokenizer.decode(np.asarray(ids).reshape(-1).tolist(), skip_special_tokens=False)

    def _end_id(self, given: str | None) -> int | None:
        """The id of the end token; None where nothing names one."""
        if self._token_name is None:
            return None
        found = self._tokenizer.token_to_id(self._token_name)
        if found is None:
            field = "--eod-token" if given else FIELD
            rule = "is no token of the tokenizer, and cannot end a document"
            remedy = f"name one: {', '.join(self.special_tokens[:8]) or 'it has no special tokens'}"
            raise Refused([Fault(field, self._token_name, rule, remedy)])
        return int(found)


def _read(path: Path) -> tuple[Any, str, bytes]:
    """The library's tokenizer, the library's version, and the file's content."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes share the cores already
    given = f"hf:{path}"
    try:
        raw = _file(path).read_bytes()
    except OSError as error:
        rule = f"cannot be read: {error.strerror} ({_file(path)})"
        remedy = "give a tokenizer.json, or a folder with one: save_pretrained of a fast tokenizer writes it"
        raise Refused([Fault(FIELD, given, rule, remedy)]) from None
    try:
        import tokenizers
    except ModuleNotFoundError:
        rule = "is read by the package tokenizers, which is not installed"
        remedy = "pip install tokenizers (the extra 'hf' of mixle-megatron)"
        raise Refused([Fault(FIELD, given, rule, remedy)]) from None
    try:
        return tokenizers.Tokenizer.from_str(raw.decode("utf-8")), tokenizers.__version__, raw
    except Exception as error:  # the library raises Exception itself
        rule = f"is no tokenizer that tokenizers {tokenizers.__version__} reads: {error}"
        raise Refused([Fault(FIELD, given, rule, "save it again with this version")]) from error


def _file(path: Path) -> Path:
    return path / TOKENIZER_FILE if path.is_dir() else path


def _end_token(folder: Path) -> str | None:
    """The end token that the files beside a ``tokenizer.json`` name; None where they name none."""
    for name in _BESIDE:
        try:
            named = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            rule = f"lies beside {name}, which cannot be read: {error}"
            raise Refused([Fault(FIELD, f"hf:{folder}", rule, "mend it, or name --eod-token")]) from error
        if named is not None:
            return named["content"] if isinstance(named, dict) else str(named)
    return None
