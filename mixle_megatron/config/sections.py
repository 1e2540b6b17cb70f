"""The sections of a config file but for the model and the optimizer, which have their own modules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, create_model

from mixle_megatron.config.data import ValidationSetSection
from mixle_megatron.config.fields import (
    LARGEST_SIZE,
    AutoOrBool,
    AutoOrCount,
    Count,
    CountOrZero,
    FolderName,
    OffWord,
    Section,
    Text,
)


class _Resume(Section):
    """What a run begins from that has no checkpoints of its own."""

    @property
    def path(self) -> Path:
        """The folder that ``from`` names."""
        return Path(getattr(self, "from")).expanduser()


# ``from`` is a word of Python's, and so no field that a class body can state.
ResumeSection = create_model(
    "ResumeSection",
    __base__=_Resume,
    __module__=__name__,
    __doc__=_Resume.__doc__,
    **{
        "from": (
            Text,
            Field(description="Another run's folder, for its newest checkpoint; or a checkpoint's."),
        ),
        "what": (
            Literal["all", "model"],
            Field(
                default="all",
                description="all: go on with weights, optimizer, step and place in the data; model: begin "
                "with the weights alone.",
            ),
        ),
    },
)


class RunSection(Section):
    """What the run is called, where it writes, and how long it is."""

    name: FolderName = Field(description="Name of the run, and of its folder in run.dir.")
    dir: Text = Field(default="runs", description="Folder that holds the run folders.")
    seed: CountOrZero = Field(
        default=1234, description="Seed of the initial weights, the order of the data, and dropout."
    )
    steps: Count = Field(description="Optimizer updates of the whole run.")
    resume: ResumeSection | None = Field(
        default=None,
        description="What the run begins from while it has no checkpoints of its own; null: anew.",
    )


class PlanSection(Section):
    """How many ranks the model and its batch are split over, axis by axis."""

    dp_replicate: Count = Field(
        default=1, description="Replicas of the sharded optimizer (HSDP): gradients are all-reduced across."
    )
    dp_shard: Count = Field(
        default=1,
        description="Ranks that optimizer state and fp32 main parameters are sharded over (ZeRO-1; "
        "parameters and gradients are not).",
    )
    tp: Count = Field(default=1, description="Tensor-parallel ranks; sequence parallelism is on when > 1.")
    pp: Count = Field(default=1, description="Pipeline stages.")
    cp: Count = Field(default=1, description="Context-parallel ranks, which split each sequence.")
    ep: Count = Field(default=1, description="Expert-parallel ranks, cut from the data-parallel ones.")
    etp: Count = Field(default=1, description="Tensor-parallel ranks of each expert.")
    microbatches: AutoOrCount = Field(
        default="auto",
        description="Microbatches of one schedule call; auto: global_batch_size / (micro_batch_size · "
        "dp · gradient_accumulation_steps).",
    )
    gradient_accumulation_steps: Count = Field(default=1, description="Schedule calls of one update.")
    elastic: bool = Field(
        default=False,
        description="Where a launcher starts another number of ranks: dp_replicate, dp_shard, microbatches "
        "and accumulation follow from the ranks that are there, and the global batch stays.",
    )


class PipelineSection(Section):
    """Which layers each pipeline stage holds, by the names of Megatron's TransformerConfig."""

    virtual_pipeline_model_parallel_size: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description="Chunks of layers on each stage (interleaved schedule); null: one."
    )
    num_layers_in_first_pipeline_stage: Count | None = Field(
        default=None, description="Layers of the first stage, the rest shared out; null: as many as others."
    )
    num_layers_in_last_pipeline_stage: Count | None = Field(
        default=None, description="Layers of the last stage, the rest shared out; null: as many as others."
    )
    pipeline_model_parallel_layout: Text | None = Field(
        default=None,
        description="Every chunk's layers, such as Ett|tt|tt|ttL: E embedding, t layer, m prediction layer, "
        "L loss, | ends a chunk.",
    )


class BatchSection(Section):
    """The batch of one optimizer update; it belongs to the experiment, not to the plan."""

    global_batch_size: Count = Field(description="Sequences of one optimizer update, over all ranks.")
    micro_batch_size: Count = Field(description="Sequences of one microbatch on one data-parallel rank.")


class CheckpointSection(Section):
    """When checkpoints are written, and how many stay."""

    every: CountOrZero = Field(
        default=0, description="Updates between checkpoints; 0 writes none, not even at the end."
    )
    keep: Count = Field(default=2, description="Newest checkpoints that are kept.")
    keep_every: CountOrZero = Field(
        default=0, description="Checkpoints whose step is a multiple of it are kept too; 0 keeps no others."
    )
    asynchronous: bool = Field(
        default=False,
        description="Train on while a checkpoint is written; the next one, and the run's end, wait for it.",
    )
    optimizer_format: Literal["fully_reshardable", "dp_reshardable"] = Field(
        default="fully_reshardable",
        description="fully_reshardable loads under every plan; dp_reshardable gathers nothing, and loads "
        "where only dp_replicate, dp_shard and cp change.",
    )


class EvaluationSection(Section):
    """When the held-out text is evaluated."""

    every: CountOrZero = Field(default=0, description="Updates between evaluations; 0 means never.")
    batches: Count = Field(default=8, description="Global batches of one evaluation, of each set.")
    sets: dict[FolderName, ValidationSetSection] = Field(
        default={}, description="Further sets by name: each has paths, blend or path."
    )


class LoggingSection(Section):
    """What a run shows and writes about itself."""

    progress: Annotated[Literal["auto", "bar", "plain", "off"], OffWord] = Field(
        default="auto", description="auto: a bar on a terminal, plain lines elsewhere."
    )
    every: Count = Field(default=1, description="Updates between progress lines.")
    tensorboard: AutoOrBool = Field(
        default="auto", description="TensorBoard events; auto: where tensorboard is installed."
    )


class HostSection(Section):
    """What of this host a run uses."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: cuda where a GPU is there, else cpu."
    )
    timeout_minutes: Annotated[int, Field(ge=1, le=LARGEST_SIZE // 60_000)] = Field(
        default=10, description="Minutes after which a collective that does not end fails."
    )
    threads_per_rank: AutoOrCount = Field(
        default="auto", description="CPU threads of each local rank; auto: the cores shared out."
    )
