# SPDX-License-Identifier: Apache-2.0
"""How a step changes with the number of ranks, everything else equal. No torch."""

from collections.abc import Callable, Sequence
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

_FEW_FACTORS: Final = (1 / 4, 1 / 2, 1, 2, 4)
_MANY_MATRICES: Final = 20_000  # planning again takes seconds: fewer points are enough


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizableAxis:
    """A mesh axis that could have more or fewer ranks, everything else equal.

    Attributes:
        name: Its name.
        size: Its ranks in the plan at hand.
        plan_at: For another size, the plan of any rank and the mesh of all of them; None where the
            model does not fit on that many.
    """

    name: str
    size: int
    plan_at: Callable[[int], tuple[Plan, MeshLayout] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """A step on some number of ranks.

    Attributes:
        axis: Name of the mesh axis that grows from point to point.
        axis_size: Its size.
        num_ranks: Ranks.
        mesh_shape: The mesh.
        step_s: Predicted seconds.
        ideal_s: Seconds if the work of all ranks were spread evenly and nothing else took time.
        max_flops: Operations of the busiest rank.
        received_bytes: Bytes that the busiest rank receives.
        peak_extra_bytes: Memory that its step allocates.
        num_idle: Ranks without a matrix.
    """

    axis: str
    axis_size: int
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
    simulation: Simulation,
    hardware: Hardware,
    axis: ResizableAxis,
    *,
    storage_dtype: str = "float32",
) -> tuple[ScalingPoint, ...]:
    """Plan and simulate again for more and for fewer ranks.

    Args:
        simulation: That of the plan at hand, which is one of the points.
        hardware: What it runs on.
        axis: What becomes longer and shorter, by :data:`FACTORS`, or by some of them for very many
            matrices; sizes that are not whole or below 1 are left out.
        storage_dtype: Dtype of gradients and momentum.

    Returns:
        Points by number of ranks.
    """
    points = []
    for factor in FACTORS if simulation.num_matrices <= _MANY_MATRICES else _FEW_FACTORS:
        size = axis.size * factor
        if size < 1 or size != int(size):
            continue
        again: Simulation | None = simulation
        if factor != 1:
            found = axis.plan_at(int(size))
            again = found and simulate(
                found[0], hardware, mesh=found[1], storage_dtype=storage_dtype
            )
        if again is not None:
            points.append(_point(axis.name, int(size), again))
    return tuple(points)


def longest_axis(
    plan: Plan,
    *,
    axis_names: Sequence[str] | None = None,
    mesh: MeshLayout | None = None,
    replica_route: str = "auto",
) -> ResizableAxis | None:
    """The longest mesh axis that cuts a parameter, for a plan of which no more is known.

    Placements stay as they are, so all parameters have to lie on the mesh that is resized.

    Args:
        plan: The plan.
        axis_names: Names of the mesh axes; ``axis 0`` and so on if None.
        mesh: The mesh of all ranks. None takes the largest of the parameters' meshes.
        replica_route: As the plan was built with.

    Returns:
        The axis; None if there is no parameter, but one rank, or a parameter on another mesh.
    """
    if not plan.params:
        return None
    around = mesh or reference_mesh(plan.params)
    if len(around.ranks) == 1 or any(param.layout.mesh != around for param in plan.params):
        return None
    cuts = {i for param in plan.params for i in param.layout.shard_axes}
    longest = max(cuts or range(len(around.shape)), key=lambda i: around.shape[i])

    def plan_at(size: int) -> tuple[Plan, MeshLayout]:
        longer = _resized(around, longest, size)
        params = [_on(param, longer) for param in plan.params]
        again = build_plan(
            params, rank=0, bucket_bytes=plan.bucket_bytes, replica_route=replica_route
        )
        return again, longer

    return ResizableAxis(
        name=axis_names[longest] if axis_names else f"axis {longest}",
        size=around.shape[longest],
        plan_at=plan_at,
    )


def _resized(mesh: MeshLayout, axis: int, size: int) -> MeshLayout:
    shape = (*mesh.shape[:axis], size, *mesh.shape[axis + 1 :])
    num_ranks = len(mesh.ranks) // mesh.shape[axis] * size
    return MeshLayout(shape=shape, ranks=tuple(range(num_ranks)))


def _on(param: PlannedParam, mesh: MeshLayout) -> PlannedParam:
    layout = ParamLayout(shape=param.layout.shape, mesh=mesh, axes=param.layout.axes)
    finer = param.source is not param.layout
    return replace(param, layout=layout, source=layout.cut_over_replicas() if finer else layout)


def _point(axis: str, size: int, simulation: Simulation) -> ScalingPoint:
    busiest = simulation.busiest
    compute = busiest.seconds_by_lane["orthogonalize"]
    return ScalingPoint(
        axis=axis,
        axis_size=size,
        num_ranks=len(simulation.ranks),
        mesh_shape=simulation.mesh_shape,
        step_s=simulation.step_s,
        ideal_s=compute / simulation.imbalance,
        max_flops=busiest.flops,
        received_bytes=busiest.received_bytes,
        peak_extra_bytes=busiest.peak_extra_bytes,
        num_idle=simulation.num_idle,
    )
