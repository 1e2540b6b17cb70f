"""Token sources for pretraining, and the loader that deals their samples to ranks.

A run reads its data in three steps, none of which needs torch:

* :func:`check_data` says what is wrong with the ``data`` section, without reading any text;
* :func:`prepare_data` builds what is missing once for all ranks, and maps it into memory;
* :class:`GlobalBatchLoader` and :class:`ValidationBatches` hand each data-parallel rank its part.

Another kind of source joins in by satisfying :class:`SampleSource`.
:func:`build_corpus` makes an indexed dataset of text, and :func:`inspect_corpus` looks at one.
The names below are loaded when first used, so that a check of a config file imports no numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mixle_megatron.data.building import BuildRequest, build_corpus
    from mixle_megatron.data.byte_tokenizer import ByteTokenizer
    from mixle_megatron.data.checking import DataRequest, check_data
    from mixle_megatron.data.corpus_record import CorpusRecord
    from mixle_megatron.data.entropy import byte_entropies
    from mixle_megatron.data.indexed_inspection import inspect_corpus
    from mixle_megatron.data.loader import GlobalBatchLoader
    from mixle_megatron.data.prefetching import PrefetchingLoader
    from mixle_megatron.data.source import SampleSource, WindowSequence
    from mixle_megatron.data.sources import RunData, ValidationSet, prepare_data
    from mixle_megatron.data.stream_cache import TokenStream
    from mixle_megatron.data.text import TokenStreams, check_source, prepare_text_data
    from mixle_megatron.data.token_array import TokenArray, token_windows
    from mixle_megatron.data.validation import ValidationBatches

_MODULE_OF = {
    "BuildRequest": "building",
    "ByteTokenizer": "byte_tokenizer",
    "CorpusRecord": "corpus_record",
    "DataRequest": "checking",
    "GlobalBatchLoader": "loader",
    "PrefetchingLoader": "prefetching",
    "RunData": "sources",
    "SampleSource": "source",
    "TokenArray": "token_array",
    "TokenStream": "stream_cache",
    "TokenStreams": "text",
    "ValidationBatches": "validation",
    "ValidationSet": "sources",
    "WindowSequence": "source",
    "build_corpus": "building",
    "byte_entropies": "entropy",
    "check_data": "checking",
    "check_source": "text",
    "inspect_corpus": "indexed_inspection",
    "prepare_data": "sources",
    "prepare_text_data": "text",
    "token_windows": "token_array",
}

__all__ = [
    "BuildRequest",
    "ByteTokenizer",
    "CorpusRecord",
    "DataRequest",
    "GlobalBatchLoader",
    "PrefetchingLoader",
    "RunData",
    "SampleSource",
    "TokenArray",
    "TokenStream",
    "TokenStreams",
    "ValidationBatches",
    "ValidationSet",
    "WindowSequence",
    "build_corpus",
    "byte_entropies",
    "check_data",
    "check_source",
    "inspect_corpus",
    "prepare_data",
    "prepare_text_data",
    "token_windows",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
