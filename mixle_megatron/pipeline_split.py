"""How a model's layers are dealt to pipeline stages, by Megatron's names. No torch."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

from mixle_megatron.errors import Fault, Refused


@dataclass(frozen=True)
class PipelineSplit:
    """What a plan's ``pp`` leaves open: which layers each stage holds.

    By default every stage holds one chunk of equally many layers. The attributes are those of
    Megatron's TransformerConfig.

    Attributes:
        virtual_pipeline_model_parallel_size: chunks of layers on each stage (the interleaved
            schedule of Narayanan et al. 2021, section 2.2); None is one.
        num_layers_in_first_pipeline_stage: layers of the first stage; the others share the rest.
        num_layers_in_last_pipeline_stage: layers of the last stage.
        pipeline_model_parallel_layout: Megatron's layout string, such as ``Ettt|tt|ttL``: E is the
            embedding, t a layer, m a multi-token prediction layer, L the loss, ``|`` ends a chunk.
    """

    virtual_pipeline_model_parallel_size: int | None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    pipeline_model_parallel_layout: str | None = None

    def chunks(self, pp: int) -> int:
        """Chunks of layers on each of ``pp`` stages."""
        if self.pipeline_model_parallel_layout is not None:
            return max(len(parsed_layout(self.pipeline_model_parallel_layout)) // pp, 1)
        return self.virtual_pipeline_model_parallel_size or 1

    def layers(self, num_layers: int, pp: int) -> list[list[int]]:
        """How many layers each chunk of each stage holds, ``[stage][chunk]``.

        Model order is chunk 0 of every stage, then chunk 1 of every stage, and so on. What does not
        divide is rounded down; :mod:`mixle_megatron.rules` refuses it.
        """
        return [[len(held) for held in self.stage_layers(num_layers, pp, stage)] for stage in range(pp)]

    def stage_layers(self, num_layers: int, pp: int, stage: int) -> list[range]:
        """The layers of each chunk of one stage, counted from 0 over the whole model.

        Nothing is walked but a layout: a plan may have more stages than a list can hold.
        """
        chunks = self.chunks(pp)
        if self.pipeline_model_parallel_layout is not None:
            held = dict(enumerate(_laid_out(self.pipeline_model_parallel_layout)))
            return [held.get(chunk * pp + stage, range(0)) for chunk in range(chunks)]
        each = [self._stage_size(num_layers, pp, index) // chunks for index in (0, 1, pp - 1)]
        first, middle, last = each[0], each[1 if pp > 2 else 2], each[2]
        turn = first + max(pp - 2, 0) * middle + (last if pp > 1 else 0)
        start = 0 if stage == 0 else first + (stage - 1) * middle
        size = first if stage == 0 else last if stage == pp - 1 else middle
        return [range(chunk * turn + start, chunk * turn + start + size) for chunk in range(chunks)]

    def _stage_size(self, num_layers: int, pp: int, stage: int) -> int:
        """Layers of a stage without a layout: its own number, or its share of the rest."""
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        if last is not None and stage == pp - 1:
            return last
        if first is not None and stage == 0:
            return first
        stated = [size for size in (first, last) if size is not None]
        return max(num_layers - sum(stated), 0) // max(pp - len(stated), 1)

    def most_layers(self, num_layers: int, pp: int) -> int:
        """Layers of the largest chunk."""
        if self.pipeline_model_parallel_layout is not None:
            return max(len(layers) for layers in _laid_out(self.pipeline_model_parallel_layout))
        sizes = [self._stage_size(num_layers, pp, stage) for stage in {0, min(1, pp - 1), pp - 1}]
        return max(sizes) // self.chunks(pp)

    def prediction_stage(self, pp: int) -> int:
        """The stage that holds the multi-token prediction layers: the last one but by a layout."""
        if self.pipeline_model_parallel_layout is not None:
            parts = parsed_layout(self.pipeline_model_parallel_layout)
            holding = [part for part, letters in enumerate(parts) if "m" in letters]
            if holding:
                return holding[0] % pp
        return pp - 1

    def arguments(self) -> dict[str, Any]:
        """What is stated, as TransformerConfig takes it."""
        return {name: value for name, value in asdict(self).items() if value is not None}


EVEN = PipelineSplit()
"""One chunk a stage, and equally many layers in each."""

_REPEATED = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))

MOST_LETTERS = 100_000
"""Longest layout with its repetitions written out: a few characters can stand for billions."""


def parsed_layout(layout: str) -> list[str]:
    """The letters of each chunk of a layout string, in model order, repetitions written out.

    ``(tt|)*2`` is ``tt|tt|`` and ``t*3`` is ``ttt``; commas are decoration.

    Raises:
        Refused: the layout stands for more than :data:`MOST_LETTERS` letters.
    """
    return list(_parsed(layout))


@lru_cache(maxsize=16)
def _laid_out(layout: str) -> tuple[range, ...]:
    """The layers of each chunk of a layout string, in model order, counted from 0."""
    ends = list(accumulate(letters.count("t") for letters in _parsed(layout)))
    return tuple(range(start, end) for start, end in pairwise([0, *ends]))


@lru_cache(maxsize=16)
def _parsed(layout: str) -> tuple[str, ...]:
    letters = layout.replace(",", "")
    for repeated in _REPEATED:
        if sum(_length(match) for match in repeated.finditer(letters)) > MOST_LETTERS:
            rule = f"stands for more than {MOST_LETTERS} letters"
            given = layout if len(layout) <= 80 else f"{layout[:77]}..."
            raise Refused([Fault("pipeline.pipeline_model_parallel_layout", given, rule)])
        letters = repeated.sub(lambda match: match[1] * int(match[2]), letters)
    return tuple(letters.split("|"))


def _length(repetition: re.Match[str]) -> int:
    """Letters that a repetition stands for; Python reads no number of thousands of digits."""
    number = repetition[2]
    return MOST_LETTERS + 1 if len(number) > len(str(MOST_LETTERS)) else len(repetition[1]) * int(number)
