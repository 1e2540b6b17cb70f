"""All that is to be said of a host, as one plain object: what ``mixle-megatron doctor`` shows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mixle_megatron.capability.decide import CapabilityTable, decide
from mixle_megatron.capability.facts import HostFacts
from mixle_megatron.capability.hazards import Hazard, hazards
from mixle_megatron.evidence.store import Kept

SCHEMA_VERSION = 1
"""Of :meth:`Diagnosis.as_dict`. Keys are added under the same number; one that goes raises it."""


@dataclass(frozen=True)
class Diagnosis:
    """A host, what it executes, what is worth a look on it, and what is kept as evidence if that is known."""

    facts: HostFacts
    table: CapabilityTable
    hazards: tuple[Hazard, ...]
    evidence: Kept | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data with stable keys, which docs/doctor.md lists."""
        return {
            "schema_version": SCHEMA_VERSION,
            "trains": self.table.trains,
            "requirements": [found.as_dict() for found in self.table.requirements],
            "capabilities": [capability.as_dict() for capability in self.table.capabilities],
            "warnings": [asdict(hazard) for hazard in self.hazards],
            "evidence": self.evidence.as_dict() if self.evidence else None,
            "facts": self.facts.as_dict(),
        }


def diagnose(facts: HostFacts, evidence: Kept | None = None) -> Diagnosis:
    """What is to be said of a host with these facts, and of what is kept as evidence there."""
    return Diagnosis(facts, decide(facts), hazards(facts), evidence)
