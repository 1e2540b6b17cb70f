"""What is known of an indexed corpus beyond Megatron's two files: ``PREFIX.json``, which its build leaves.

Megatron's index says nothing of the tokenizer, the vocabulary or the end of a document, which whoever
trains on the corpus has to know. A corpus that Megatron-LM's own tool has built has no such file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mixle_megatron.checkpoint.durable import write_text

FORMAT = 1


@dataclass(frozen=True)
class CorpusRecord:
    """The facts of a corpus.

    Attributes:
        tokenizer: ``byte``, or ``hf:`` and the absolute path of a ``tokenizer.json``.
        tokenizer_digest: equal for tokenizers that give the same ids.
        vocab_size: one more than the largest id that the tokenizer has.
        eod: the id that ends a document; None where the tokenizer has none.
        append_eod: whether each document ends with it.
        dtype: of the tokens in ``PREFIX.bin``: ``uint16`` or ``int32``.
        documents: how many; each is one sequence of the index.
        tokens: how many, ends of documents included.
        text_bytes: UTF-8 bytes of the documents' text: bits a byte come from it.
        empty_documents: how many had no token, and were left out.
        bad_records: how many were no document, and were left out.
        bad: the first thousand of them, each ``file:line`` and what is wrong with it.
        input_files: how many files were read.
        input_bytes: their size on the disk.
        fingerprint: of the files' paths, sizes and times, and of all options that decide the bytes.
    """

    tokenizer: str
    tokenizer_digest: str
    vocab_size: int
    eod: int | None
    append_eod: bool
    dtype: str
    documents: int
    tokens: int
    text_bytes: int
    empty_documents: int
    bad_records: int
    bad: tuple[str, ...]
    input_files: int
    input_bytes: int
    fingerprint: str

    def as_dict(self) -> dict[str, Any]:
        """The record as plain data."""
        return {"format": FORMAT, **asdict(self), "bad": list(self.bad)}

    def write(self, prefix: str) -> None:
        """Write ``PREFIX.json``, at once and lastingly."""
        write_text(record_path(prefix), json.dumps(self.as_dict(), indent=2, ensure_ascii=False) + "\n")


def record_path(prefix: str) -> Path:
    """Where the record of a corpus lies."""
    return Path(f"{prefix}.json")


def read_record(prefix: str) -> CorpusRecord | None:
    """The record of a corpus, or None where there is none.

    Raises:
        ValueError: it is damaged, or of another format.
    """
    try:
        stored = json.loads(record_path(prefix).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise ValueError(f"is no record of format {FORMAT}")
    missing = [each.name for each in fields(CorpusRecord) if each.name not in stored]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}")
    known = {each.name: stored[each.name] for each in fields(CorpusRecord)}
    return CorpusRecord(**known | {"bad": tuple(known["bad"])})
