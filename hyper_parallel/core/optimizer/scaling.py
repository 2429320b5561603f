# SPDX-License-Identifier: Apache-2.0
"""How a step changes with the number of ranks, everything else equal. No torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from hyper_parallel.core.optimizer.bucket import PlannedParam
from hyper_parallel.core.optimizer.hardware import Hardware
from hyper_parallel.core.optimizer.layout import MeshLayout, ParamLayout
from hyper_parallel.core.optimizer.plan import Plan
from hyper_parallel.core.optimizer.planner import build_plan
from hyper_parallel.core.optimizer.simulation import Simulation, reference_mesh, simulate

FACTORS: Final = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
"""How much longer the mesh axis becomes."""

_FEW_FACTORS: Final = (1 / 4, 1, 4)
_MANY_MATRICES: Final = 20_000  # planning again takes seconds: fewer points are enough


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """A step on some number of ranks.

    Attributes:
        num_ranks: Ranks.
        mesh_shape: The mesh.
        step_s: Predicted seconds.
        ideal_s: Seconds if the work of all ranks were spread evenly and nothing else took time.
        max_flops: Operations of the busiest rank.
        received_bytes: Bytes that the busiest rank receives.
        peak_extra_bytes: Memory that its step allocates.
        num_idle: Ranks without a matrix.
    """

    num_ranks: int
    mesh_shape: tuple[int, ...]
    step_s: float
    ideal_s: float
    max_flops: int
    received_bytes: int
    peak_extra_bytes: int
    num_idle: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        return asdict(self)


def scaling_curve(
    plan: Plan,
    hardware: Hardware,
    *,
    axis: int | None = None,
    factors: Sequence[float] | None = None,
    replica_route: str = "auto",
) -> tuple[ScalingPoint, ...]:
    """Plan and simulate again on longer and shorter meshes.

    Args:
        plan: A plan whose parameters all lie on one mesh.
        hardware: What it runs on.
        axis: The mesh axis that changes. None takes the longest that cuts a parameter.
        factors: How much longer it becomes; sizes that are not whole or below 1 are left out.
            None takes :data:`FACTORS`, or three of them for very many matrices.
        replica_route: As for :func:`~.planner.build_plan`.

    Returns:
        Points by number of ranks; none if the parameters lie on several meshes or on one rank.
    """
    if not plan.params:
        return ()
    mesh = reference_mesh(plan.params)
    same = all(param.layout.mesh == mesh for param in plan.params)
    if not same or len(mesh.ranks) == 1:
        return ()
    if axis is None:
        cuts = {i for param in plan.params for i in param.layout.shard_axes}
        axis = max(cuts or range(len(mesh.shape)), key=lambda i: mesh.shape[i])
    if factors is None:
        num_matrices = sum(len(bucket.matrices) for bucket in plan.buckets)
        factors = FACTORS if num_matrices <= _MANY_MATRICES else _FEW_FACTORS
    points = []
    for factor in factors:
        size = mesh.shape[axis] * factor
        if size < 1 or size != int(size):
            continue
        longer = _resized(mesh, axis, int(size))
        params = [_on(param, longer) for param in plan.params]
        again = build_plan(
            params, rank=0, bucket_bytes=plan.bucket_bytes, replica_route=replica_route
        )
        points.append(_point(simulate(again, hardware)))
    return tuple(points)


def _resized(mesh: MeshLayout, axis: int, size: int) -> MeshLayout:
    shape = (*mesh.shape[:axis], size, *mesh.shape[axis + 1 :])
    num_ranks = len(mesh.ranks) // mesh.shape[axis] * size
    return MeshLayout(shape=shape, ranks=tuple(range(num_ranks)))


def _on(param: PlannedParam, mesh: MeshLayout) -> PlannedParam:
    layout = ParamLayout(shape=param.layout.shape, mesh=mesh, axes=param.layout.axes)
    finer = param.source is not param.layout
    return replace(param, layout=layout, source=layout.cut_over_replicas() if finer else layout)


def _point(simulation: Simulation) -> ScalingPoint:
    busiest = simulation.busiest
    compute = busiest.seconds_by_lane["orthogonalize"]
    return ScalingPoint(
        num_ranks=len(simulation.ranks),
        mesh_shape=simulation.mesh_shape,
        step_s=simulation.step_s,
        ideal_s=compute / simulation.imbalance,
        max_flops=busiest.flops,
        received_bytes=busiest.received_bytes,
        peak_extra_bytes=busiest.peak_extra_bytes,
        num_idle=simulation.num_idle,
    )
