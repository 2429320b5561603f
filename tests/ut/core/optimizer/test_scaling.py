# SPDX-License-Identifier: Apache-2.0
"""Scaling curves: sizes that exist, few points where planning is slow, and bare plans."""

from dataclasses import replace

import pytest

from hyper_parallel.core.optimizer.bucket import PlannedParam
from hyper_parallel.core.optimizer.hardware_presets import PRESETS
from hyper_parallel.core.optimizer.layout import MeshLayout
from hyper_parallel.core.optimizer.plan import Plan
from hyper_parallel.core.optimizer.scaling import ResizableAxis, longest_axis, scaling_curve
from hyper_parallel.core.optimizer.simulation import simulate
from tests.planned import S0, R, mesh_of, plan_of, planned, transformer

H100 = PRESETS["h100"]


def test_a_bare_plan_is_resized_along_its_longest_axis_that_cuts() -> None:
    plan = plan_of(transformer(mesh_of(2, 8), (R, S0), num_layers=8, width=1024))
    axis = longest_axis(plan, axis_names=("dp_replicate", "dp_shard"))
    assert axis is not None
    here = simulate(plan, H100)
    points = scaling_curve(here, H100, axis)
    assert {point.axis for point in points} == {"dp_shard"}
    assert [(p.axis_size, p.num_ranks) for p in points] == [
        (n, 2 * n) for n in (1, 2, 4, 8, 16, 32)
    ]
    assert next(p.step_s for p in points if p.axis_size == 8) == here.step_s
    flops = [p.max_flops for p in points]
    assert flops == sorted(flops, reverse=True)
    assert points[-1].num_idle == 32


@pytest.mark.parametrize(
    ("params", "mesh"),
    [
        ([], None),
        ([planned((8, 8), mesh_of(1), (R,))], None),
        ([planned((8, 8), mesh_of(2), (S0,)), planned((8, 8), mesh_of(2, 2), (R, S0))], None),
        ([planned((8, 8), mesh_of(2), (S0,))], mesh_of(2, 2)),
    ],
    ids=["nothing", "one rank", "two meshes", "part of a mesh"],
)
def test_a_bare_plan_off_the_mesh_has_no_axis(
    params: list[PlannedParam], mesh: MeshLayout | None
) -> None:
    assert longest_axis(plan_of(params), mesh=mesh) is None


@pytest.mark.parametrize(
    ("num_matrices", "expected"),
    [(20_000, [3, 6, 12, 24, 48, 96, 192]), (20_001, [12, 24, 48, 96, 192])],
)
def test_very_many_matrices_are_planned_for_fewer_sizes(
    num_matrices: int, expected: list[int]
) -> None:
    plan = plan_of([planned((8, 8), mesh_of(4), (S0,))])
    here = replace(simulate(plan, H100), num_matrices=num_matrices)
    axis = ResizableAxis(name="dp_shard", size=48, plan_at=lambda _: (plan, mesh_of(4)))
    assert [point.axis_size for point in scaling_curve(here, H100, axis)] == expected


def test_sizes_that_are_not_whole_or_do_not_fit_are_left_out() -> None:
    plan = plan_of([planned((8, 8), mesh_of(4), (S0,))])
    asked: list[int] = []

    def plan_at(size: int) -> tuple[Plan, MeshLayout] | None:
        asked.append(size)
        return None if size == 3 else (plan, mesh_of(4))

    axis = ResizableAxis(name="dp_shard", size=6, plan_at=plan_at)
    points = scaling_curve(simulate(plan, H100), H100, axis)
    assert asked == [3, 12, 24], "6 is planned already"
    assert [point.axis_size for point in points] == [6, 12, 24]
