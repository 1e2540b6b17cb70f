"""What this backend executes, in mixle's terms: everywhere, and on a host whose facts are known.

Nothing is claimed that no test runs (tests/test_claims.py).
"""

from __future__ import annotations

from mixle.utils.parallel.training_contracts import BackendCapabilities, ParallelAxis

from mixle_megatron.capability.decide import CapabilityTable, decide
from mixle_megatron.capability.facts import HostFacts, Package
from mixle_megatron.capability.gather import facts_of_this_host
from mixle_megatron.capability.requirements import REQUIREMENTS, Found

WEAKEST_HOST = HostFacts(
    python="3.11.0",
    packages={each.name: Package(each.at_least or "1") for each in REQUIREMENTS if each.name != "python"},
)
"""A host that has what training needs, each in its oldest version, and nothing else: a CPU."""


def capabilities(facts: HostFacts | None = None) -> BackendCapabilities:
    """What a host executes, as mixle asks for it.

    Args:
        facts: those of the host; by default this one's, as far as they are known without importing
            anything or making a CUDA context.
    """
    table = decide(facts_of_this_host() if facts is None else facts)
    return _in_mixles_terms(table, tuple(_beside(found) for found in table.requirements))


def _in_mixles_terms(table: CapabilityTable, requirements: tuple[str, ...]) -> BackendCapabilities:
    features = set(table.executed("feature"))
    return BackendCapabilities(
        name="megatron",
        axes=frozenset(ParallelAxis(axis) for axis in table.executed("axis")),
        precisions=frozenset(table.executed("precision")),
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
