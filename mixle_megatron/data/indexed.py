"""Corpora in Megatron's indexed format as the data of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mixle_megatron.data.blending import LONG_ROUND, BlendedSource
from mixle_megatron.data.checking import TRAIN
from mixle_megatron.data.corpus import Corpus, Entry, blend_faults, end_token, open_blend
from mixle_megatron.errors import Fault, refuse_if_any


@dataclass(frozen=True)
class Blend:
    """Corpora, and how a run reads them.

    Attributes:
        entries: the corpora as the config names them.
        field: the blend's key there.
        split: shares of the parts of each corpus's documents.
        split_field: its key.
        eod: the token that ends a document, where the config states it.
        eod_mask_loss: whether what follows an end is left out of the loss.
        ended_by: the options that need the token, by their keys.
    """

    entries: Sequence[Entry]
    field: str
    split: Sequence[float]
    split_field: str
    eod: int | None = None
    eod_mask_loss: bool = False
    ended_by: Sequence[str] = ()

    def open(self) -> list[Corpus]:
        """The corpora.

        Raises:
            Refused: with every one that is missing or damaged.
        """
        return open_blend(self.entries, self.field)

    def faults(self, parts: Sequence[int], sequence_length: int, vocab_size: int) -> Iterator[Fault]:
        """What keeps ``parts`` from being read; the corpora are there."""
        corpora = self.open()
        yield from blend_faults(
            corpora,
            self.split,
            field=self.field,
            split_field=self.split_field,
            parts=parts,
            sequence_length=sequence_length,
            vocab_size=vocab_size,
        )
        yield from self._end_faults(end_token(corpora, self.eod), vocab_size)

    def _end_faults(self, end: int | None, vocab_size: int) -> Iterator[Fault]:
        """Whether the token that ends a document is one, where something needs it."""
        if not self.ended_by:
            return
        if end is None:
            rule = "is not known, as the corpora's records name no one token that ends a document"
            yield Fault("data.eod", None, rule, f"state it, or leave {' and '.join(self.ended_by)} out")
        elif end >= vocab_size:
            rule = f"is not a token id of model.vocab_size={vocab_size}"
            yield Fault("data.eod", end, rule, f"use 0 to {vocab_size - 1}")

    def document_end(self) -> int | None:
        """The token that ends a document, where it is known."""
        return end_token(self.open(), self.eod)

    def source(self, part: int, *, sequence_length: int, seed: int, cache: Path) -> BlendedSource:
        """The samples of one part, built into ``cache`` where no process has built them yet.

        Args:
            part: 0 for training, 1 for validation.
            sequence_length: S.
            seed: of the run.
            cache: a folder that all ranks share.

        Raises:
            Refused: a weight is too small to be kept in training.
        """
        from mixle_megatron.data.compiled_helpers import require_helpers
        from mixle_megatron.data.gpt_epochs import GPTEpochs

        require_helpers()
        corpora = self.open()
        epochs = [
            GPTEpochs(
                corpus,
                split=self.split,
                part=part,
                sequence_length=sequence_length,
                seed=seed,
                cache=cache,
            )
            for corpus in corpora
        ]
        for each in epochs:
            each.epoch(0)
        source = BlendedSource(
            epochs,
            [entry.weight for entry in self.entries],
            fingerprint=self._fingerprint(corpora),
            seed=seed,
            field=self.field,
            unsupervised_after=end_token(corpora, self.eod) if self.eod_mask_loss else None,
            cache=cache,
            shortest_round=LONG_ROUND if part == TRAIN else 1,
        )
        if part == TRAIN:
            refuse_if_any(self._weight_faults(len(source)))
        return source

    def _weight_faults(self, samples: int) -> Iterator[Fault]:
        """Weights that are less than one sample of the so many of a round, of which each corpus gets one."""
        together = sum(entry.weight for entry in self.entries)
        for number, entry in enumerate(self.entries):
            if entry.weight * samples < together:
                rule = f"of {together:g} in all is less than one sample in {samples:,}"
                field = f"{self.field}.{number}.weight"
                yield Fault(field, entry.weight, rule, "give it more, or leave the corpus out")

    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes to a token of the blend, on average; None where a corpus does not tell."""
        each = [corpus.bytes_per_token for corpus in self.open()]
        if any(known is None for known in each):
            return None
        weights = [entry.weight for entry in self.entries]
        return sum(w * known for w, known in zip(weights, each, strict=True) if known) / sum(weights)

    def _fingerprint(self, corpora: Sequence[Corpus]) -> str:
        """Of the corpora, their weights and the split; where they lie is no part of it."""
        weights = [entry.weight / sum(other.weight for other in self.entries) for entry in self.entries]
        shares = [share / sum(self.split) for share in self.split]
        described = [[corpus.digest for corpus in corpora], weights, shares]
        return hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()
