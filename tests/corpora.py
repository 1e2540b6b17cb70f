"""Small corpora on disk, and their indexed datasets by a straight loop over Megatron's own builder."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from numpy.typing import NDArray

EOD = 256
FILES = (".bin", ".idx", ".json")

texts = st.text(max_size=40)
"""Documents, empty ones among them; lone surrogates are no text."""

kinds = st.sampled_from(["txt", "jsonl", "jsonl.gz", "txt.gz"])
corpora = st.lists(st.tuples(kinds, st.lists(texts, max_size=6)), min_size=1, max_size=5)
"""Files: what they are, and their documents, of which a text file has only the first."""


def write_corpus(folder: Path, files: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Write the files, and give all their documents in the order of the files' names."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, (kind, documents) in enumerate(files):
        if "jsonl" in kind:
            raw = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in documents).encode()
        else:
            documents = documents[:1] or [""]
            raw = documents[0].encode()
        path = folder / f"{number:04}.{kind}"
        path.write_bytes(gzip.compress(raw) if kind.endswith(".gz") else raw)
        written += documents
    return written


def straight_loop(prefix: Path, ids: Iterable[Sequence[int]], dtype: type = np.uint16) -> None:
    """What Megatron-LM's tool does: one item and one end for each document."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for each in ids:
        builder.add_item(torch.as_tensor(np.asarray(each, dtype=np.int64)))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def as_bytes(documents: Iterable[str]) -> list[NDArray[np.int64]]:
    """The ids of the documents that are not empty, as the byte tokenizer has them."""
    raw = [np.frombuffer(document.encode(), dtype=np.uint8) for document in documents if document]
    return [np.append(each.astype(np.int64), EOD) for each in raw]


def contents(prefix: Path) -> dict[str, bytes]:
    """What stands under the final names."""
    return {ending: path.read_bytes() for ending in FILES if (path := Path(f"{prefix}{ending}")).exists()}
