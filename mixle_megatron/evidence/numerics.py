"""What was observed, in the declarations of a session: the numerics fields of mixle's DistributedUpdate."""

from __future__ import annotations

from dataclasses import replace

from mixle.utils.parallel.training_contracts import CollectiveKind, DistributedUpdate

from mixle_megatron.evidence.claims import combination
from mixle_megatron.evidence.record import Evidence, Measurement


def with_evidence(
    updates: tuple[DistributedUpdate, ...], evidence: Evidence | None, precision: str, device: str
) -> tuple[DistributedUpdate, ...]:
    """The same declarations with what evidence shows of the axes that each communicates over.

    The numbers are the worst of the trials of these axes in this precision, with as many ranks as those had,
    which the last note of an update names. An update with an axis that is not shown to hold there stays as it
    is, and so does one that exchanges nothing.

    Args:
        updates: the declarations of a session.
        evidence: of this machine and these versions; None for none.
        precision: of the session.
        device: ``cpu`` or ``cuda``.
    """
    if evidence is None:
        return updates
    return tuple(_observed(update, evidence, precision, device) for update in updates)


def _observed(
    update: DistributedUpdate, evidence: Evidence, precision: str, device: str
) -> DistributedUpdate:
    if update.collective is CollectiveKind.NONE or not update.mesh_axes:
        return update
    seen: list[Measurement] = []
    for axis in update.mesh_axes:
        shown = evidence[combination(axis.value, precision)]
        if shown is None or not shown.holds:
            return update
        seen += shown.measurements
    if any(each.device != device for each in seen):
        return update
    return replace(
        update,
        determinism_observed=all(each.bit_identical for each in seen),
        maximum_absolute_error=max(each.worst[0] for each in seen),
        maximum_relative_error=max(each.worst[1] for each in seen),
        numerics_evidence_id="+".join(dict.fromkeys(each.evidence_id for each in seen)),
        numerics_sample_count=sum(each.samples for each in seen),
        notes=(*update.notes, "observed against one rank in fp32: " + "; ".join(each.trial for each in seen)),
    )
