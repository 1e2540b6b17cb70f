"""Running the trials of claims, and judging what comes of them. No torch: ranks do all that needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mixle_megatron.capability.facts import HostFacts
from mixle_megatron.evidence import calls
from mixle_megatron.evidence.claims import GIVEN, Claim, Trial
from mixle_megatron.evidence.local_ranks import LocalRanks, RanksFailed
from mixle_megatron.evidence.origin import Origin, origin_of
from mixle_megatron.evidence.record import (
    ClaimEvidence,
    Error,
    Evidence,
    Measurement,
    RankOutcome,
    beyond,
    evidence_id,
)

RunOn = Callable[..., list[Any]]
"""``run_on(ranks, function, *args)``: what the function gave on each of so many ranks."""

MOST_ON_A_CPU = 4

RUNS = 2
"""Runs of each trial, which are compared to the last bit."""


@dataclass(frozen=True)
class Terms:
    """What trials run on.

    Attributes:
        run_on: starts them.
        device: ``cpu`` or ``cuda``.
        most_ranks: how many ranks there can be at a time.
        origin: versions and machine.
    """

    run_on: RunOn
    device: str
    most_ranks: int
    origin: Origin


def verify(claims: Sequence[Claim], terms: Terms, begins: Callable[[Trial], None]) -> Evidence:
    """Run every trial of the claims.

    Args:
        claims: what is to be shown.
        terms: what the trials run on.
        begins: called before each trial that is run.
    """
    with TemporaryDirectory(prefix="mixle-megatron-evidence-") as folder:
        bench = _Bench(terms, Path(folder))
        found = tuple(_evidence_of(claim, bench, begins) for claim in claims)
    return Evidence(terms.origin, found, datetime.now(UTC).isoformat(timespec="seconds"))


def verify_here(
    claims: Sequence[Claim], device: str, facts: HostFacts, begins: Callable[[Trial], None]
) -> Evidence:
    """:func:`verify` on ranks that are started on this host.

    Args:
        claims: what is to be shown.
        device: ``cpu`` or ``cuda``.
        facts: those of this host.
        begins: called before each trial that is run.
    """
    with LocalRanks("nccl" if device == "cuda" else "gloo") as ranks:
        terms = Terms(ranks.run_on, device, most_ranks(device, facts), origin_of(facts))
        return verify(claims, terms, begins)


def most_ranks(device: str, facts: HostFacts) -> int:
    """How many ranks this host can have at a time: one a CUDA device, or four on a CPU."""
    return len(facts.cuda.devices) if device == "cuda" else MOST_ON_A_CPU


def _evidence_of(claim: Claim, bench: _Bench, begins: Callable[[Trial], None]) -> ClaimEvidence:
    measurements = []
    for trial in runnable([claim], bench.terms.most_ranks):
        begins(trial)
        measurements.append(bench.measure(trial))
    return ClaimEvidence(claim.name, claim.kind, tuple(measurements), _missing(claim, bench.terms.most_ranks))


def runnable(claims: Iterable[Claim], most_ranks: int) -> Iterator[Trial]:
    """The trials that so many ranks suffice for."""
    return (trial for claim in claims for trial in claim.trials if trial.ranks <= most_ranks)


def _missing(claim: Claim, most_ranks: int) -> str:
    too_large = [f"{trial.name} needs {trial.ranks}" for trial in claim.trials if trial.ranks > most_ranks]
    return f"not run: {', '.join(too_large)} ranks, and this host has {most_ranks}" if too_large else ""


@dataclass
class _Bench:
    """Where trials run, with the references that they are held against."""

    terms: Terms
    folder: Path
    _references: dict[tuple[str, str], str | RanksFailed] = field(default_factory=dict)

    def measure(self, trial: Trial) -> Measurement:
        """Run a trial twice, and judge it. What fails on a rank is a problem of the trial alone."""
        try:
            runs = self._runs(trial)
        except RanksFailed as failure:
            return self._measurement(trial, [], problem=str(failure).splitlines()[0])
        return self._measurement(trial, runs)

    def _runs(self, trial: Trial) -> list[list[RankOutcome]]:
        reference, folder = self._reference(trial), None
        run_on, device = self.terms.run_on, self.terms.device
        if trial.saved_under is not None:
            folder = str(self.folder / trial.optimizer_format)
            run_on(trial.ranks_that_save, calls.save_checkpoint, trial, folder, device)
        return [
            run_on(trial.ranks_that_compare, calls.compare, trial, reference, folder, device)
            for _ in range(RUNS)
        ]

    def _reference(self, trial: Trial) -> str:
        """The file of what the trial is held against, which is made when it is first needed."""
        key = trial.against, trial.model
        if key not in self._references:
            path = str(self.folder / "-".join(key).replace(" ", "-"))
            plain = trial.against == "plain torch"
            make = calls.record_plain_torch if plain else calls.record_one_rank
            try:
                self.terms.run_on(1, make, trial.model, path, self.terms.device)
                self._references[key] = path
            except RanksFailed as failure:
                self._references[key] = RanksFailed(
                    f"{trial.against}, that it is held against, fails: {failure}"
                )
        found = self._references[key]
        if isinstance(found, RanksFailed):
            raise found
        return found

    def _measurement(self, trial: Trial, runs: list[list[RankOutcome]], problem: str = "") -> Measurement:
        outcomes = [outcome for run in runs for outcome in run]
        loss, gradient, parameters = (
            reduce(Error.or_worse, (getattr(each, kind) for each in outcomes), Error())
            for kind in ("loss", "gradient", "parameters")
        )
        digests = [[outcome.digest for outcome in run] for run in runs]
        bounds = trial.bounds
        problems = [
            problem,
            beyond(loss, bounds.loss, "loss"),
            beyond(gradient, bounds.gradient, "gradient"),
            beyond(parameters, bounds.parameters, "parameters"),
            *(_not_in_force(trial, outcome) for outcome in outcomes[:1]),
        ]
        return Measurement(
            evidence_id=evidence_id(trial, self.terms.origin, GIVEN | {"device": self.terms.device}),
            trial=trial.name,
            plan=dict(trial.plan),
            precision=trial.precision,
            device=self.terms.device,
            ranks=trial.ranks,
            samples=sum(run[0].updates for run in runs),
            bit_identical=bool(runs) and all(each == digests[0] for each in digests),
            loss=loss,
            gradient=gradient,
            parameters=parameters,
            problem="; ".join(filter(None, problems)),
        )


def _not_in_force(trial: Trial, outcome: RankOutcome) -> str:
    wrong = [
        f"Megatron's {axis} group has {outcome.in_force[axis]} ranks, not {size}"
        for axis, size in trial.plan.items()
        if outcome.in_force[axis] != size
    ]
    return ", ".join(wrong)
