"""What Megatron's pipeline layout string must satisfy (``PipelineParallelLayerLayout``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mixle_megatron.errors import Fault, Refused
from mixle_megatron.pipeline_split import PipelineSplit, parsed_layout
from mixle_megatron.rules.dimensions import ModelDimensions
from mixle_megatron.rules.nearest import listed, multiples_around
from mixle_megatron.rules.verdict import NOT_EXECUTED

NAME = "pipeline_model_parallel_layout"
LETTERS = {"E": "the embedding", "t": "a layer", "m": "a prediction layer", "L": "the loss"}


@dataclass(frozen=True)
class _Layout:
    """A layout string taken apart, and what its faults are called.

    Attributes:
        text: the string.
        chunks: the letters of each chunk, in model order.
        pp: pipeline stages.
        field: the dotted name of its key.
        plan_prefix: what the plan's fields are called after.
        model_prefix: what the model's fields are called after.
    """

    text: str
    chunks: tuple[str, ...]
    pp: int
    field: str
    plan_prefix: str
    model_prefix: str

    @property
    def letters(self) -> str:
        return "".join(self.chunks)

    def fault(self, rule: str, remedy: str = "") -> Fault:
        given = self.text if len(self.text) <= 80 else f"{self.text[:77]}..."
        return Fault(self.field, given, rule, remedy)


def layout_faults(
    pp: int,
    model: ModelDimensions,
    split: PipelineSplit,
    *,
    plan_prefix: str = "plan",
    model_prefix: str = "model",
    prefix: str = "pipeline",
) -> list[Fault]:
    """Everything that is wrong with a split's layout string; none where it has none.

    Args:
        pp: pipeline stages.
        model: the sizes, with defaults resolved.
        split: how layers are dealt to stages.
        plan_prefix: what the plan's fields are called after.
        model_prefix: what the model's fields are called after.
        prefix: what the split's fields are called after.
    """
    text = split.pipeline_model_parallel_layout
    if text is None:
        return []
    try:
        chunks = tuple(parsed_layout(text))
    except Refused as too_long:
        return list(too_long.faults)
    layout = _Layout(text, chunks, pp, f"{prefix}.{NAME}", plan_prefix, model_prefix)
    foreign = sorted(set(layout.letters) - set(LETTERS))
    if foreign:
        meanings = ", ".join(f"{letter} ({meaning})" for letter, meaning in LETTERS.items())
        return [layout.fault(f"has {listed(foreign)[:80]}, which means nothing", f"use {meanings} and |")]
    counts = [*_end_faults(layout), *_count_faults(layout, model), *_chunk_faults(layout, split, prefix)]
    return counts or list(_prediction_faults(layout))


def _end_faults(layout: _Layout) -> Iterator[Fault]:
    """The embedding opens the first chunk and the loss closes the last one, where Megatron puts them."""
    if layout.letters.count("E") != 1 or not layout.chunks[0].startswith("E"):
        yield layout.fault("does not begin with its one E, the embedding")
    if layout.letters.count("L") != 1 or not layout.chunks[-1].endswith("L"):
        yield layout.fault("does not end with its one L, the loss")


def _count_faults(layout: _Layout, model: ModelDimensions) -> Iterator[Fault]:
    for letter, name, wanted in (
        ("t", "num_layers", model.num_layers),
        ("m", "mtp_num_layers", model.mtp_num_layers or 0),
    ):
        found = layout.letters.count(letter)
        if found != wanted:
            stated = getattr(model, name)
            given = "null" if stated is None else stated
            rule = f"has {found} {letter}, not {layout.model_prefix}.{name}={given}"
            remedy = f"use {wanted} of them" + (f", or {layout.model_prefix}.{name}={found}" if found else "")
            yield layout.fault(rule, remedy)


def _chunk_faults(layout: _Layout, split: PipelineSplit, prefix: str) -> Iterator[Fault]:
    """Every stage has the same number of chunks, each of which holds something."""
    number, plan = len(layout.chunks), f"{layout.plan_prefix}.pp={layout.pp}"
    if layout.pp == 1 and number > 1:
        remedy = f"use {layout.plan_prefix}.pp={number} or a divisor of it above 1"
        yield layout.fault(f"has {number} chunks, which {plan} cannot interleave", remedy)
        return
    if "" in layout.chunks:
        empty = layout.chunks.index("") + 1
        yield layout.fault(f"has nothing in chunk {empty} of {number}")
    if number % layout.pp:
        chunks = listed(multiples_around(number, layout.pp))
        yield layout.fault(f"has {number} chunks, which is no multiple of {plan}", f"use {chunks} chunks")
        return
    stated, found = split.virtual_pipeline_model_parallel_size, number // layout.pp
    if stated is not None and stated != found:
        rule = f"is not the {found} chunks that the layout gives each of {plan} stages"
        remedy = f"use {found}, or leave it out"
        yield Fault(f"{prefix}.virtual_pipeline_model_parallel_size", stated, rule, remedy)


def _prediction_faults(layout: _Layout) -> Iterator[Fault]:
    """Prediction layers lie together, after all others, in the last chunk of a stage: the last one."""
    holding = [number for number, letters in enumerate(layout.chunks) if "m" in letters]
    if not holding:
        return
    last_turn = len(layout.chunks) - layout.pp
    if "t" in layout.letters[layout.letters.index("m") :]:
        yield layout.fault("has a layer t after a prediction layer m", "move every m behind the last t")
    elif len(holding) > 1:
        yield layout.fault(f"has m in {len(holding)} chunks", "put every m before the L")
    elif holding[0] < last_turn:
        rule = f"has m in chunk {holding[0] + 1}, which is not the last chunk of its stage"
        yield layout.fault(rule, "put every m before the L")
    elif holding[0] < len(layout.chunks) - 1:
        rule = NOT_EXECUTED + "prediction layers use the embedding, which only the first and last stage hold"
        yield layout.fault(rule, "put every m before the L")
    elif "t" not in layout.chunks[-1]:
        rule = (
            NOT_EXECUTED
            + "prediction layers are built like the last layer t of their own chunk, which has none"
        )
        yield layout.fault(rule, "put a t before the m")
