"""Evidence as plain data: what was measured of each claim, on what, and whether the claim holds. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mixle_megatron.evidence.claims import Trial
from mixle_megatron.evidence.origin import Origin

SCHEMA_VERSION = 1
"""Of :meth:`Evidence.as_dict`. Keys are added under the same number; one that goes raises it."""


@dataclass(frozen=True)
class Error:
    """How far numbers are from those that they are held against.

    Attributes:
        absolute: the largest difference of two numbers.
        relative: the largest difference in a tensor, over the largest number of that tensor; of losses, the
            largest difference over the loss.
        where: the parameter, or the update, that has the largest relative one.
    """

    absolute: float = 0.0
    relative: float = 0.0
    where: str = ""

    def or_worse(self, other: Error) -> Error:
        """Both together."""
        worse = other if other.relative > self.relative else self
        return Error(max(self.absolute, other.absolute), worse.relative, worse.where)


@dataclass(frozen=True)
class RankOutcome:
    """What one rank says of one run of a trial.

    Attributes:
        updates: how many it compared.
        loss: error of the losses.
        gradient: error of the parts of the gradient that it holds.
        parameters: error of the parameters that it holds.
        digest: of every loss, gradient and parameter, to the last bit.
        in_force: how many ranks Megatron's groups of each axis have.
    """

    updates: int
    loss: Error
    gradient: Error
    parameters: Error
    digest: str
    in_force: Mapping[str, int]


@dataclass(frozen=True)
class Measurement:
    """What a trial measured.

    Attributes:
        evidence_id: digest of versions, hardware, and everything that decides what the trial computes.
        trial: its name.
        plan: the sizes of its axes larger than 1.
        precision: what it computed in.
        device: ``cpu`` or ``cuda``.
        ranks: how many there were.
        samples: committed updates that were compared, over both runs.
        bit_identical: whether two runs were equal to the last bit in every loss, gradient and parameter.
        loss: error of the losses of all updates.
        gradient: error of the gradients, whole and not clipped, of all updates.
        parameters: error of the parameters after each update.
        problem: why what the trial stands for does not hold; empty where it does.
    """

    evidence_id: str
    trial: str
    plan: Mapping[str, int]
    precision: str
    device: str
    ranks: int
    samples: int
    bit_identical: bool
    loss: Error
    gradient: Error
    parameters: Error
    problem: str = ""

    @property
    def holds(self) -> bool:
        """Whether it is within its bounds."""
        return not self.problem

    @property
    def worst(self) -> tuple[float, float]:
        """The largest absolute and the largest relative error of all kinds."""
        kinds = (self.loss, self.gradient, self.parameters)
        return max(kind.absolute for kind in kinds), max(kind.relative for kind in kinds)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measurement:
        """What ``asdict`` made."""
        errors = {name: Error(**values[name]) for name in ("loss", "gradient", "parameters")}
        return cls(**({field.name: values[field.name] for field in fields(cls)} | errors))


@dataclass(frozen=True)
class ClaimEvidence:
    """What there is for one claim.

    Attributes:
        name: of the claim.
        kind: ``axis``, ``precision``, ``checkpoint`` or ``combination``.
        measurements: of its trials.
        missing: why it has not been run, for trials that have not; empty where all have.
    """

    name: str
    kind: str
    measurements: tuple[Measurement, ...]
    missing: str = ""

    @property
    def problem(self) -> str:
        """Why it does not hold; empty where it does."""
        found = [f"{each.trial}: {each.problem}" for each in self.measurements if not each.holds]
        return "; ".join([*found, *([self.missing] if self.missing else [])])

    @property
    def holds(self) -> bool:
        """Whether every trial was run and is within its bounds."""
        return not self.problem

    @property
    def withdrawn(self) -> bool:
        """Whether a trial was run and shows that the claim does not hold."""
        return not all(each.holds for each in self.measurements)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {
            "measurements": [asdict(each) for each in self.measurements],
            "holds": self.holds,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ClaimEvidence:
        """What :meth:`as_dict` made."""
        measurements = tuple(map(Measurement.from_dict, values["measurements"]))
        return cls(values["name"], values["kind"], measurements, values["missing"])


@dataclass(frozen=True)
class Evidence:
    """Everything that was measured on one machine with one set of versions.

    Attributes:
        origin: those versions and that machine.
        claims: what there is for each claim.
        made_at: when the last of it was measured, in UTC, as ISO 8601 has it.
    """

    origin: Origin
    claims: tuple[ClaimEvidence, ...]
    made_at: str

    def __getitem__(self, name: str) -> ClaimEvidence | None:
        return next((each for each in self.claims if each.name == name), None)

    def measurements(self) -> Iterable[Measurement]:
        """Those of all claims."""
        return (each for claim in self.claims for each in claim.measurements)

    def with_newer(self, newer: Evidence) -> Evidence:
        """The newer evidence, and of this what that says nothing of; both are of one origin."""
        replaced = {each.name for each in newer.claims}
        kept = tuple(each for each in self.claims if each.name not in replaced)
        return Evidence(newer.origin, kept + newer.claims, newer.made_at)

    def as_dict(self) -> dict[str, Any]:
        """Plain data with stable keys, which docs/verify.md lists."""
        return {
            "schema_version": SCHEMA_VERSION,
            "made_at": self.made_at,
            "origin": self.origin.as_dict(),
            "claims": [each.as_dict() for each in self.claims],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Evidence:
        """What :meth:`as_dict` made.

        Raises:
            KeyError: something is missing.
            TypeError: something is of another kind.
        """
        claims = tuple(map(ClaimEvidence.from_dict, values["claims"]))
        return cls(Origin.from_dict(values["origin"]), claims, str(values["made_at"]))


def evidence_id(trial: Trial, origin: Origin, given: Mapping[str, Any]) -> str:
    """The digest of everything that decides what a trial computes: 16 hexadecimal digits.

    Args:
        trial: with its plan and precision.
        origin: versions and hardware.
        given: model sizes, seeds, batches, optimizer.
    """
    everything = {"trial": asdict(trial), "origin": origin.as_dict(), "given": dict(given)}
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:16]


def beyond(error: Error, bound: float, what: str) -> str:
    """What is wrong with an error above its bound, in words; empty where nothing is."""
    if error.relative <= bound:
        return ""
    return f"{what} off by {error.relative:.1e} at {error.where}, where {bound:.0e} is allowed"
