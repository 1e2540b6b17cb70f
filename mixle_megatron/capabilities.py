"""What this version of the plugin executes. Nothing is claimed that no test runs."""

from __future__ import annotations

from mixle.utils.parallel.training_contracts import BackendCapabilities, ParallelAxis

EXECUTED_AXES = frozenset(ParallelAxis)
"""Axes that run in every combination: proven on the CPU (tests/test_plan_matrix.py), not yet on CUDA."""

EXECUTED_PRECISIONS = frozenset({"fp32", "bf16"})
"""Precisions that run on every host."""

CAPABILITIES = BackendCapabilities(
    name="megatron",
    axes=EXECUTED_AXES,
    precisions=EXECUTED_PRECISIONS,
    distributed_optimizer=True,
    reshardable_checkpoint=True,
    elastic_restart=False,
    requirements=("megatron-core>=0.16,<0.20", "torch>=2.6"),
)
"""What is executed wherever the package can be imported."""
