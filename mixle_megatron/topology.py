"""Where each rank of a plan sits, and which ranks it communicates with. Pure arithmetic.

Megatron lays two grids over the same ranks, both with the first axis fastest (its order
``tp-cp-ep-dp-pp``; ``megatron.core.parallel_state.RankGenerator``):

* the dense grid  tp · cp · dp · pp, with dp = dp_replicate · dp_shard;
* the expert grid etp · ep · edp · pp, with edp = tp · cp · dp / (etp · ep).

Experts add no ranks: the expert grid regroups those of the dense one within each pipeline stage.

Megatron's partial data-parallel groups are *contiguous* parts of the data-parallel group, so the
shard is the inner dimension: dp index = dp_replicate index · dp_shard + dp_shard index. mixle's own
order (``attest_worker_coordinate``) is dp_replicate, dp_shard, tp, pp, cp with cp fastest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import gcd, prod

from mixle_megatron.errors import Fault, Refused, refuse_if_any
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.rules.plan import grid_faults

MESH_AXES = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
"""The axes of mixle's mesh, outermost first."""

GROUP_AXES: dict[str, tuple[str, tuple[str, ...]]] = {
    "tp": ("dense", ("tp",)),
    "cp": ("dense", ("cp",)),
    "dp": ("dense", ("dp_inner", "dp_outer")),
    "pp": ("dense", ("pp",)),
    "mp": ("dense", ("tp", "pp")),
    "tp_cp": ("dense", ("tp", "cp")),
    "tp_dp": ("dense", ("tp", "dp_inner", "dp_outer")),
    "tp_dp_cp": ("dense", ("tp", "cp", "dp_inner", "dp_outer")),
    "dp_cp": ("dense", ("cp", "dp_inner", "dp_outer")),
    "intra_dp_cp": ("dense", ("cp", "dp_inner")),
    "embd": ("dense", ("pp",)),
    "pos_embd": ("dense", ("pp",)),
    "ep": ("expert", ("ep",)),
    "expt_tp": ("expert", ("etp",)),
    "tp_ep": ("expert", ("etp", "ep")),
    "tp_ep_pp": ("expert", ("etp", "ep", "pp")),
    "expt_dp": ("expert", ("edp_inner", "edp_outer")),
    "intra_expt_dp": ("expert", ("edp_inner",)),
    "inter_dist_opt": ("expert", ("edp_outer",)),
    "intra_dist_opt": ("expert", ("etp", "ep", "edp_inner", "pp")),
}
"""Each group by its name in Megatron's ``ProcessGroupCollection`` (and ``tp_dp``): the grid, and
the axes that its ranks differ in. ``inner`` and ``outer`` are the shards and the instances of the
distributed optimizer. ``embd`` and ``pos_embd`` keep only the ends of a pipeline."""


PIPELINE_ENDS = ("embd", "pos_embd")
"""Groups that only some stages of a pipeline are in."""


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A rank's place on Megatron's two grids; ``dp`` counts shards fastest."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Grid:
    """Named axes over consecutive ranks, the first one fastest.

    Attributes:
        sizes: size of each axis by its name, in order.
    """

    sizes: Mapping[str, int]

    @cached_property
    def strides(self) -> dict[str, int]:
        """Distance in ranks between neighbours along each axis."""
        strides, stride = {}, 1
        for axis, size in self.sizes.items():
            strides[axis] = stride
            stride *= size
        return strides

    def index(self, rank: int, axis: str) -> int:
        """The rank's index along an axis."""
        return rank // self.strides[axis] % self.sizes[axis]

    def rank(self, indices: Mapping[str, int]) -> int:
        """The rank at these indices, one for each axis."""
        return sum(indices[axis] * stride for axis, stride in self.strides.items())

    def offsets(self, axes: Iterable[str]) -> list[int]:
        """What is added to a rank at index 0 of ``axes`` to reach each place along them.

        In ascending order, as the axes are walked with the fastest one innermost.
        """
        wanted = set(axes)
        chosen = [axis for axis in self.sizes if axis in wanted]
        steps = [
            range(0, self.sizes[axis] * self.strides[axis], self.strides[axis]) for axis in reversed(chosen)
        ]
        return [sum(step) for step in product(*steps)]

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` only along ``axes``, itself included."""
        axes = tuple(axes)
        base = rank - sum(self.index(rank, axis) * self.strides[axis] for axis in axes)
        return tuple(base + offset for offset in self.offsets(axes))

    def groups(self, axes: Iterable[str]) -> list[tuple[int, ...]]:
        """All groups along ``axes``, in Megatron's order of their first ranks."""
        axes = tuple(axes)
        offsets = self.offsets(axes)
        bases = self.offsets(axis for axis in self.sizes if axis not in axes)
        return [tuple(base + offset for offset in offsets) for base in bases]


class Topology:
    """Coordinates and groups of every rank of a plan.

    Attributes:
        plan: the plan, as a torch-free record.
        num_distributed_optimizer_instances: copies of the sharded optimizer state. Megatron
            asserts that it divides the expert data-parallel size, so it is
            gcd(dp_replicate, edp): dp_replicate itself unless experts take ranks from it.
    """

    def __init__(self, plan: PlanRecord) -> None:
        """Lay out the plan.

        Args:
            plan: a :class:`PlanRecord`, or any object with its fields.

        Raises:
            Refused: the plan is no grid (a size below 1, or ep or etp that divide nothing).
        """
        self.plan = PlanRecord.from_plan(plan)
        refuse_if_any(grid_faults(self.plan))
        self.num_distributed_optimizer_instances = gcd(self.plan.dp_replicate, self.expert_data_parallel_size)

    @property
    def world_size(self) -> int:
        """Ranks of the plan."""
        return self.plan.world_size

    @property
    def expert_data_parallel_size(self) -> int:
        """Ranks that hold the same experts (edp)."""
        return self.plan.tp * self.plan.cp * self.plan.data_parallel_size // (self.plan.etp * self.plan.ep)

    @property
    def optimizer_shards(self) -> int:
        """Ranks that the optimizer state of dense parameters is sharded over, those of cp included."""
        ranks = self.plan.data_parallel_size * self.plan.cp
        return ranks // self.num_distributed_optimizer_instances

    @property
    def optimizer_shard_axes(self) -> tuple[str, ...]:
        """The axes, larger than 1, whose ranks those shards are.

        dp_replicate is one of them where experts leave fewer instances than it has ranks.
        """
        instances = self.num_distributed_optimizer_instances
        sizes = {"dp_replicate": self.plan.dp_replicate // instances, "dp_shard": self.plan.dp_shard}
        return tuple(axis for axis, size in (sizes | {"cp": self.plan.cp}).items() if size > 1)

    @property
    def expert_optimizer_shards(self) -> int:
        """Ranks that the optimizer state of expert parameters is sharded over."""
        return self.expert_data_parallel_size // self.num_distributed_optimizer_instances

    @property
    def dense_sizes(self) -> dict[str, int]:
        """The dense grid in numbers; their product is the world size."""
        return {
            "tp": self.plan.tp,
            "cp": self.plan.cp,
            "dp": self.plan.data_parallel_size,
            "pp": self.plan.pp,
        }

    @property
    def expert_sizes(self) -> dict[str, int]:
        """The expert grid in numbers; their product is the world size too."""
        edp = self.expert_data_parallel_size
        return {"etp": self.plan.etp, "ep": self.plan.ep, "edp": edp, "pp": self.plan.pp}

    @cached_property
    def _grids(self) -> dict[str, Grid]:
        instances = self.num_distributed_optimizer_instances
        dense = {
            "tp": self.plan.tp,
            "cp": self.plan.cp,
            "dp_inner": self.plan.data_parallel_size // instances,
            "dp_outer": instances,
            "pp": self.plan.pp,
        }
        expert = {
            "etp": self.plan.etp,
            "ep": self.plan.ep,
            "edp_inner": self.expert_optimizer_shards,
            "edp_outer": instances,
            "pp": self.plan.pp,
        }
        return {"dense": Grid(dense), "expert": Grid(expert)}

    @cached_property
    def _plain_grids(self) -> tuple[Grid, Grid]:
        return Grid(self.dense_sizes), Grid(self.expert_sizes)

    def coordinate(self, rank: int) -> Coordinate:
        """The rank's place on both of Megatron's grids."""
        self._check_rank(rank)
        dense, expert = self._plain_grids
        return Coordinate(
            *(dense.index(rank, axis) for axis in ("tp", "cp", "dp", "pp")),
            *(expert.index(rank, axis) for axis in ("etp", "ep", "edp")),
        )

    def coordinates(self) -> list[Coordinate]:
        """The places of all ranks."""
        return [self.coordinate(rank) for rank in range(self.world_size)]

    def mixle_coordinate(self, rank: int) -> dict[str, int]:
        """The same place in mixle's axis names; this is the session's coordinate."""
        place = self.coordinate(rank)
        replicate, shard = divmod(place.dp, self.plan.dp_shard)
        return dict(zip(MESH_AXES, (replicate, shard, place.tp, place.pp, place.cp), strict=True))

    def rank_of(
        self, *, dp_replicate: int = 0, dp_shard: int = 0, tp: int = 0, pp: int = 0, cp: int = 0
    ) -> int:
        """The rank at a coordinate in mixle's axis names: the inverse of :meth:`mixle_coordinate`."""
        indices = dict(zip(MESH_AXES, (dp_replicate, dp_shard, tp, pp, cp), strict=True))
        refuse_if_any(
            Fault(axis, index, f"is not on the axis of size {size}", f"use 0 to {size - 1}")
            for axis, index in indices.items()
            if not 0 <= index < (size := getattr(self.plan, axis))
        )
        dp = dp_replicate * self.plan.dp_shard + dp_shard
        return self._plain_grids[0].rank({"tp": tp, "cp": cp, "dp": dp, "pp": pp})

    def attested_coordinate(self, rank: int) -> dict[str, int]:
        """The coordinate that mixle's ``attest_worker_coordinate`` gives this rank.

        That order differs from Megatron's; only rank and world size of an attestation are binding.
        """
        self._check_rank(rank)
        sizes = {axis: getattr(self.plan, axis) for axis in reversed(MESH_AXES)}
        grid = Grid(sizes)
        return {axis: grid.index(rank, axis) for axis in MESH_AXES}

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's group, in ascending order.

        Empty for ``embd`` and ``pos_embd`` on a rank that is not in such a group.
        """
        if name in PIPELINE_ENDS:
            _, first, last = self.extent("pp", rank)
            ends = _pipeline_ends(name, (first, last))
            return ends if rank in ends else ()
        self._check_rank(rank)
        grid, axes = GROUP_AXES[name]
        return self._grids[grid].group(rank, axes)

    def extent(self, name: str, rank: int) -> tuple[int, int, int]:
        """Size, first and last rank of a rank's group, without walking it; size 0 where in none."""
        if name in PIPELINE_ENDS:
            ranks = self.group(name, rank)
            return (len(ranks), ranks[0], ranks[-1]) if ranks else (0, rank, rank)
        self._check_rank(rank)
        grid_name, axes = GROUP_AXES[name]
        grid = self._grids[grid_name]
        first = rank - sum(grid.index(rank, axis) * grid.strides[axis] for axis in axes)
        last = first + sum((grid.sizes[axis] - 1) * grid.strides[axis] for axis in axes)
        return prod(grid.sizes[axis] for axis in axes), first, last

    def groups(self, name: str) -> list[tuple[int, ...]]:
        """All groups of a name, in the order in which Megatron makes them."""
        grid, axes = GROUP_AXES[name]
        return [_pipeline_ends(name, ranks) for ranks in self._grids[grid].groups(axes)]

    def group_index(self, name: str) -> list[int | None]:
        """For each rank, which of :meth:`groups` it is in; None where in none."""
        index: list[int | None] = [None] * self.world_size
        for number, ranks in enumerate(self.groups(name)):
            for rank in ranks:
                index[rank] = number
        return index

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            rule = f"is not a rank of a plan of {self.world_size}"
            raise Refused([Fault("rank", rank, rule, f"use 0 to {self.world_size - 1}")])


def _pipeline_ends(name: str, pipeline: tuple[int, ...]) -> tuple[int, ...]:
    """Of a pipeline's ranks, those that hold what the group is about.

    Word embeddings live on the first and last stage, position embeddings on the first.
    """
    if name == "pos_embd":
        return pipeline[:1]
    return tuple(dict.fromkeys((pipeline[0], pipeline[-1]))) if name == "embd" else pipeline
