"""Token sources for pretraining, and the loader that deals their samples to ranks.

A run reads its data in three steps, none of which needs torch:

* :func:`check_source` says what is wrong with the ``data`` section, without reading any text;
* :func:`prepare_text_data` builds the token streams once a node, and maps them into memory;
* :class:`GlobalBatchLoader` and :class:`ValidationBatches` hand each data-parallel rank its part.

Another kind of source (an indexed dataset, say) joins in by satisfying :class:`SampleSource`.
:func:`build_corpus` makes an indexed dataset of text, and :func:`inspect_corpus` looks at one.
The names below are loaded when first used, so that a check of a config file imports no numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mixle_megatron.data.building import BuildRequest, build_corpus
    from mixle_megatron.data.byte_tokenizer import ByteTokenizer
    from mixle_megatron.data.corpus_record import CorpusRecord
    from mixle_megatron.data.entropy import byte_entropies
    from mixle_megatron.data.indexed_inspection import inspect_corpus
    from mixle_megatron.data.loader import GlobalBatchLoader
    from mixle_megatron.data.source import SampleSource, WindowSequence
    from mixle_megatron.data.stream_cache import TokenStream
    from mixle_megatron.data.text import TokenStreams, check_source, prepare_text_data
    from mixle_megatron.data.validation import ValidationBatches

_MODULE_OF = {
    "BuildRequest": "building",
    "ByteTokenizer": "byte_tokenizer",
    "CorpusRecord": "corpus_record",
    "GlobalBatchLoader": "loader",
    "SampleSource": "source",
    "TokenStream": "stream_cache",
    "TokenStreams": "text",
    "ValidationBatches": "validation",
    "WindowSequence": "source",
    "build_corpus": "building",
    "byte_entropies": "entropy",
    "check_source": "text",
    "inspect_corpus": "indexed_inspection",
    "prepare_text_data": "text",
}

__all__ = [
    "BuildRequest",
    "ByteTokenizer",
    "CorpusRecord",
    "GlobalBatchLoader",
    "SampleSource",
    "TokenStream",
    "TokenStreams",
    "ValidationBatches",
    "WindowSequence",
    "build_corpus",
    "byte_entropies",
    "check_source",
    "inspect_corpus",
    "prepare_text_data",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
