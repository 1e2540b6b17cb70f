"""What is run for each claim, and how far from one rank in fp32 it may end. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mixle_megatron.plan_record import PlanRecord

FULLY_RESHARDABLE, DP_RESHARDABLE = "fully_reshardable", "dp_reshardable"
"""The formats of a checkpoint's optimizer, as :mod:`mixle_megatron.checkpoint.stored_state` names them."""

DENSE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "vocab_size": 257,
    "init_method_std": 0.1,
}
"""A GPT with tied embeddings, and a vocabulary that no even number of ranks divides."""

MIXTURE: dict[str, Any] = DENSE | {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
}

MODELS = {"dense": DENSE, "mixture": MIXTURE}

UPDATES = 3
"""Committed updates of a trial."""

SEED = 7
"""What the weights are drawn from; the tokens of update ``u`` are drawn from ``100 * SEED + u``."""

MICROBATCHES, MICRO_BATCH = 4, 2
"""The global batch of an update: whole microbatches, which are dealt to the replicas."""

OPTIMIZER: dict[str, Any] = {
    "name": "adam",
    "lr": 1e-3,
    "weight_decay": 0.1,
    "adam_eps": 1e-2,
    "clip_grad": 1.0,
}
"""Adam moves an element by lr * g / (|g| + eps). With torch's eps of 1e-8 an element whose gradient is all
rounding moves by a whole learning rate, either way, and says nothing; with 1e-2 an error of the gradient
becomes at most lr / eps = 1/10 of it in an update, and parameters are as exact as gradients."""

GIVEN: dict[str, Any] = {
    "models": MODELS,
    "updates": UPDATES,
    "seed": SEED,
    "batch": [MICROBATCHES, MICRO_BATCH],
    "optimizer": OPTIMIZER,
}
"""Everything that trials have in common, which their evidence ids are a digest of too."""


@dataclass(frozen=True)
class Bounds:
    """The largest relative errors with which a claim holds.

    See :class:`mixle_megatron.evidence.record.Error` for what they are relative to.
    """

    loss: float
    gradient: float
    parameters: float


# u is the unit roundoff: 2^-24 in fp32, 2^-8 in bf16, 2^-11 in fp16. In fp32 two plans add the same numbers
# in another order. A sum of n <= 1,000 terms then differs by about sqrt(n) u = 32 u, and some 20 such sums
# (four layers forwards and backwards) follow on one another: 20 * 32 * u = 4e-5. In 16 bits sums are in
# fp32, and each of the 20 results is rounded once: 20 u. A loss is a mean over all tokens, whose errors
# have both signs: design figures of 1e-5, and 1e-4 with experts. Experts are chosen by comparing numbers;
# near a tie a token goes elsewhere in 16 bits, and an expert's gradient is of a few dozen tokens: half of it
# has to be enough there, and fp32 shows the rest.
BOUNDS: dict[tuple[str, str], Bounds] = {
    ("dense", "fp32"): Bounds(loss=1e-5, gradient=1e-4, parameters=1e-4),
    ("mixture", "fp32"): Bounds(loss=1e-4, gradient=1e-3, parameters=1e-3),
    ("dense", "bf16"): Bounds(loss=1e-2, gradient=1e-1, parameters=1e-1),
    ("mixture", "bf16"): Bounds(loss=1e-2, gradient=5e-1, parameters=1e-1),
    ("dense", "fp16"): Bounds(loss=1e-3, gradient=1e-2, parameters=1e-2),
}
"""By model and precision; docs/verify.md derives them."""


@dataclass(frozen=True)
class Trial:
    """Updates of one model under one plan.

    Attributes:
        plan: the axes larger than 1, and their sizes.
        precision: what the passes compute in.
        model: a key of :data:`MODELS`.
        pipeline: fields of PipelineSplit, where layers are not dealt evenly.
        saved_under: the plan of a session that makes the first update and saves; the trial goes on from that.
        optimizer_format: of that checkpoint.
        against: ``one rank`` in fp32, or ``plain torch``: the same model in a loop without Megatron's.
    """

    plan: Mapping[str, int] = field(default_factory=dict)
    precision: str = "fp32"
    model: str = "dense"
    pipeline: Mapping[str, int] = field(default_factory=dict)
    saved_under: Mapping[str, int] | None = None
    optimizer_format: str = FULLY_RESHARDABLE
    against: str = "one rank"

    @property
    def ranks_that_compare(self) -> int:
        """How many ranks its own plan has."""
        return PlanRecord(**self.plan).world_size

    @property
    def ranks_that_save(self) -> int:
        """How many ranks write the checkpoint that it goes on from; 0 where there is none."""
        return 0 if self.saved_under is None else PlanRecord(**self.saved_under).world_size

    @property
    def ranks(self) -> int:
        """How many ranks it takes at a time."""
        return max(self.ranks_that_compare, self.ranks_that_save)

    @property
    def bounds(self) -> Bounds:
        """How far it may end from what it is held against."""
        return BOUNDS[self.model, self.precision]

    @property
    def name(self) -> str:
        """In words: ``tp=2 etp=2, mixture, fp32``."""
        sizes = [f"{axis}={size}" for axis, size in {**self.plan, **_short(self.pipeline)}.items()]
        plan = " ".join(sizes) or "one rank"
        if self.saved_under is not None:
            saved = " ".join(f"{axis}={size}" for axis, size in self.saved_under.items())
            plan = f"{self.optimizer_format} {saved} to {plan}"
        return ", ".join((plan, *(["mixture"] if self.model == "mixture" else []), self.precision))


@dataclass(frozen=True)
class Claim:
    """Something that is claimed, and what is run for it.

    Attributes:
        name: of the axis, precision or optimizer format.
        kind: ``axis``, ``precision``, ``checkpoint``, or ``combination`` for an axis in a precision.
        trials: it holds where all of them do.
    """

    name: str
    kind: str
    trials: tuple[Trial, ...]


def _short(pipeline: Mapping[str, int]) -> dict[str, int]:
    return {name.partition("_pipeline")[0]: size for name, size in pipeline.items()}


_VIRTUAL = {"virtual_pipeline_model_parallel_size": 2}
_AXES: dict[str, tuple[Trial, ...]] = {
    "dp_replicate": (Trial({"dp_replicate": 2}), Trial({"dp_replicate": 2, "dp_shard": 2})),
    "dp_shard": (Trial({"dp_shard": 2}),),
    "tp": (Trial({"tp": 2}),),
    "pp": (Trial({"pp": 2}), Trial({"pp": 2}, pipeline=_VIRTUAL), Trial({"tp": 2, "pp": 2})),
    "cp": (Trial({"cp": 2}),),
    "ep": (Trial({"dp_shard": 2, "ep": 2}, model="mixture"),),
    "etp": (Trial({"tp": 2, "etp": 2}, model="mixture"),),
}
_PRECISIONS = {
    "fp32": (Trial(against="plain torch"),),
    "bf16": (Trial(precision="bf16"),),
    "fp16": (Trial(precision="fp16"),),
}


def combination(axis: str, precision: str) -> str:
    """The name of the claim of an axis in a precision: in fp32 that is the axis's own."""
    return axis if precision == "fp32" else f"{axis} in {precision}"


def _combinations() -> Iterator[Claim]:
    """Each axis in each precision but fp32, which the axis's own claim is in; fp16 has no experts."""
    for axis, (trial, *_) in _AXES.items():
        for precision in ("bf16", "fp16"):
            if precision == "bf16" or trial.model == "dense":
                yield Claim(
                    combination(axis, precision), "combination", (replace(trial, precision=precision),)
                )


CLAIMS: tuple[Claim, ...] = (
    *(Claim(name, "axis", trials) for name, trials in _AXES.items()),
    *(Claim(name, "precision", trials) for name, trials in _PRECISIONS.items()),
    Claim(FULLY_RESHARDABLE, "checkpoint", (Trial({"tp": 2}, saved_under={"dp_shard": 2}),)),
    Claim(
        DP_RESHARDABLE,
        "checkpoint",
        (Trial(saved_under={"dp_shard": 2}, optimizer_format=DP_RESHARDABLE),),
    ),
    *_combinations(),
)
"""Everything that can be claimed and has something to be run for it."""

FEATURES = {
    "distributed_optimizer": "dp_shard",
    "reshardable_checkpoint": FULLY_RESHARDABLE,
    "elastic_restart": FULLY_RESHARDABLE,
}
"""The features that mixle asks for, and the claim that speaks for each.

A restart goes on from a checkpoint under another plan, which is what is run here; only tests kill ranks.
"""
