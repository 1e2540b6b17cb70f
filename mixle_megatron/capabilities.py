"""What this backend executes, in mixle's terms: everywhere, and on a host whose facts are known.

Nothing is claimed that no test runs (tests/test_claims.py).
"""

from __future__ import annotations

from mixle.utils.parallel.training_contracts import BackendCapabilities, ParallelAxis

from mixle_megatron.capability.decide import CapabilityTable, decide
from mixle_megatron.capability.facts import HostFacts, Package
from mixle_megatron.capability.gather import facts_of_this_host
from mixle_megatron.capability.requirements import REQUIREMENTS, Found
from mixle_megatron.evidence.coverage import uncovered
from mixle_megatron.evidence.store import kept_evidence

WEAKEST_HOST = HostFacts(
    python="3.11.0",
    packages={each.name: Package(each.at_least or "1") for each in REQUIREMENTS if each.name != "python"},
)
"""A host that has what training needs, each in its oldest version, and nothing else: a CPU."""


def capabilities(facts: HostFacts | None = None, *, evidence: bool = False) -> BackendCapabilities:
    """What a host executes, as mixle asks for it.

    Args:
        facts: those of the host; by default this one's, as far as they are known without importing
            anything or making a CUDA context.
        evidence: claim only what ``mixle-megatron verify`` has shown with these versions on this machine;
            ``requirements`` then say of the rest what is missing.
    """
    facts = facts_of_this_host() if facts is None else facts
    table = decide(facts)
    requirements = tuple(_beside(found) for found in table.requirements)
    if not evidence:
        return _in_mixles_terms(table, requirements)
    kept = kept_evidence(facts)
    if kept.evidence is None:
        nothing = frozenset(each.name for each in table.capabilities)
        return _in_mixles_terms(table, (*requirements, f"evidence: {kept.message}"), nothing)
    missing = uncovered(table, kept.evidence)
    lacking = (f"evidence for {name}: {why}" for name, why in missing.items())
    return _in_mixles_terms(table, (*requirements, *lacking), frozenset(missing))


def _in_mixles_terms(
    table: CapabilityTable, requirements: tuple[str, ...], but: frozenset[str] = frozenset()
) -> BackendCapabilities:
    """The table as mixle has it, without the capabilities that ``but`` names."""
    features = set(table.executed("feature")) - but
    return BackendCapabilities(
        name="megatron",
        axes=frozenset(ParallelAxis(axis) for axis in table.executed("axis") if axis not in but),
        precisions=frozenset(table.executed("precision")) - but,
        distributed_optimizer="distributed_optimizer" in features,
        reshardable_checkpoint="reshardable_checkpoint" in features,
        elastic_restart="elastic_restart" in features,
        requirements=requirements,
        # Every pair of axes is tested in one session; see docs/parallelism.md.
        incompatible_axis_sets=(),
    )


def _beside(found: Found) -> str:
    """A requirement and what the host has: ``torch>=2.6: 2.14.1``."""
    return f"{found.name}{found.needs}: {found.problem or found.found}"


CAPABILITIES = _in_mixles_terms(decide(WEAKEST_HOST), tuple(map(str, REQUIREMENTS)))
"""What is executed wherever the package can be imported: no more than the weakest host does."""
