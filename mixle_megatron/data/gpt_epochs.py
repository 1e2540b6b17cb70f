"""The samples of one corpus, epoch after epoch, each as Megatron's GPTDataset packs and shuffles it.

GPTDataset shuffles documents and samples over as many epochs as the samples that it is asked for take, so
the order would change with the length of the run. Here every epoch is a GPTDataset of its own, of exactly
one epoch: epoch 0 with the run's seed, as Megatron-LM would shuffle it, and the others with seeds that
follow from it. All epochs have the same number of samples.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mixle_megatron.data.built_once import build_once
from mixle_megatron.data.corpus import Corpus, split_spans

if TYPE_CHECKING:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

# That it saves no indices, when it is asked for none.
logging.getLogger("megatron.core.datasets.gpt_dataset").setLevel(logging.ERROR)

_EPOCHS_KEPT = 2  # a batch may lie across the end of an epoch
_LARGEST_SEED = 2**32
_NO_CACHE = ""  # unlike None, it keeps Megatron from one of its own, and from asking which rank this is


class GPTEpochs:
    """Samples of one part of a corpus, numbered through all epochs.

    Args:
        corpus: where they come from.
        split: shares of its documents.
        part: which of them, 0 for training.
        sequence_length: S.
        seed: shuffles, differently each epoch.
        cache: a folder for the indices, which any number of processes may share.

    Attributes:
        sequence_length: S.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        split: Sequence[float],
        part: int,
        sequence_length: int,
        seed: int,
        cache: str | os.PathLike[str],
    ) -> None:
        from mixle_megatron.data.megatron_dataset import IndexedDataset

        self.corpus = corpus
        self.sequence_length = sequence_length
        self._split, self._part, self._seed = tuple(split), part, seed
        self._cache = Path(cache)
        self._documents = split_spans(split, corpus.header.sequences)[part]
        self._length = max(corpus.tokens_in(self._documents) - 1, 0) // sequence_length
        # Arrays that come from it are views of its map, which it closes when it goes.
        self._indexed = IndexedDataset(corpus.prefix)
        self._epochs: dict[int, GPTDataset] = {}

    def __len__(self) -> int:
        """Samples in one epoch."""
        return self._length

    def sample(self, index: int) -> NDArray[np.int64]:
        """Sample ``index`` >= 0 of all epochs: int64, shape (S + 1,)."""
        epoch, place = divmod(index, self._length)
        item = self.epoch(epoch)[place]
        return np.append(item["tokens"].numpy(), item["labels"][-1:].numpy())

    def epoch(self, number: int) -> GPTDataset:
        """Megatron's dataset of one epoch; its indices are built if no process has built them yet."""
        if number not in self._epochs:
            while len(self._epochs) >= _EPOCHS_KEPT:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[number] = self._open(number)
        return self._epochs[number]

    def _open(self, number: int) -> GPTDataset:
        seed = epoch_seed(self._seed, number)
        folder = self._cache / f"gpt-{self._key(seed)}"
        build_once(folder, lambda: _indices(self._dataset(seed, _NO_CACHE)))
        return self._dataset(seed, str(folder))

    def _key(self, seed: int) -> str:
        """What the indices of an epoch are made from."""
        documents = (self._documents.start, self._documents.stop)
        described = [
            version("megatron-core"),
            self.corpus.digest,
            documents,
            self._split,
            self._part,
            self.sequence_length,
            seed,
        ]
        return hashlib.blake2b(json.dumps(described).encode(), digest_size=12).hexdigest()

    def _dataset(self, seed: int, path_to_cache: str) -> GPTDataset:
        from megatron.core.datasets.gpt_dataset import GPTDataset
        from megatron.core.datasets.utils import Split

        return GPTDataset(
            self._indexed,
            self.corpus.digest,  # in place of the path: the indices hold wherever the corpus lies
            np.arange(self._documents.start, self._documents.stop, dtype=np.int32),
            None,
            Split(self._part),
            dataset_config(self.sequence_length, seed, self._split, path_to_cache),
        )


class _Tokenizer:
    """What GPTDataset wants of a tokenizer where no token is masked."""

    vocab_size = None
    eod = None
    unique_identifiers: Mapping[str, Any] = {}


def dataset_config(
    sequence_length: int, seed: int, split: Sequence[float], path_to_cache: str
) -> GPTDatasetConfig:
    """Megatron's settings of one epoch: no masks, which the loader makes of targets."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    return GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        blend=(["-"], None),
        split=",".join(np.format_float_positional(share) for share in split),
        path_to_cache=path_to_cache,
        tokenizer=_Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed of an epoch: the run's own in epoch 0."""
    if epoch == 0:
        return seed
    key = hashlib.blake2b(f"{seed}/epoch/{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(key, "little") % _LARGEST_SEED


def _indices(dataset: GPTDataset) -> dict[str, NDArray[Any] | str]:
    """The files that GPTDataset looks for, by the names that it gives them."""
    base = f"{dataset.unique_description_hash}-{type(dataset).__name__}-{dataset.index_split.name}"
    return {
        f"{base}-document_index.npy": dataset.document_index,
        f"{base}-sample_index.npy": dataset.sample_index,
        f"{base}-shuffle_index.npy": dataset.shuffle_index,
        f"{base}-description.txt": dataset.unique_description,
    }
