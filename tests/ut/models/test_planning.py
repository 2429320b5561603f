# SPDX-License-Identifier: Apache-2.0
"""More data-parallel ranks: the same model by the same recipe, on one mesh or on several."""

from itertools import pairwise

import pytest

from hyper_parallel.core.optimizer.hardware_presets import PRESETS
from hyper_parallel.core.optimizer.scaling import ScalingPoint, scaling_curve
from hyper_parallel.core.optimizer.simulation import Simulation, simulate
from hyper_parallel.models.catalog import preset
from hyper_parallel.models.mesh_axes import parse_mesh
from hyper_parallel.models.model_param import Model, ModelParam
from hyper_parallel.models.planning import (
    PlannedModel,
    PlanSettings,
    data_parallel_axis,
    plan_model,
)

H100 = PRESETS["h100"]
DEFAULTS = PlanSettings()


def mixture(*, stacked: bool = True) -> Model:
    """Four layers of attention and 16 experts, stacked or parameters of their own."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(4):
        shapes[f"layers.{layer}.q_proj.weight"] = (64, 64)
        shapes[f"layers.{layer}.o_proj.weight"] = (64, 64)
        if stacked:
            shapes[f"layers.{layer}.experts.gate_up_proj"] = (16, 64, 32)
        else:
            shapes |= {f"layers.{layer}.experts.{i}.up_proj.weight": (32, 64) for i in range(16)}
    params = [
        ModelParam(name=name, shape=shape, algorithm="muon", role="")
        for name, shape in shapes.items()
    ]
    return Model(name="mixture", params=tuple(params), source="here", num_heads=8)


def simulated(planned: PlannedModel) -> Simulation:
    mesh = planned.parallelism.dense_mesh(planned.stage).layout
    return simulate(planned.plan, H100, mesh=mesh)


def curve(planned: PlannedModel, settings: PlanSettings = DEFAULTS) -> tuple[ScalingPoint, ...]:
    return scaling_curve(simulated(planned), H100, data_parallel_axis(planned, settings))


def of_mixture(mesh: str, settings: PlanSettings = DEFAULTS) -> PlannedModel:
    return plan_model(mixture(), parse_mesh(mesh), settings)


MESHES = (
    "dp_shard=8,ep=4",
    "dp_replicate=2,dp_shard=4,tp=2,ep=4",
    "pp=2,dp_shard=4,cp=2,ep=4",
    "dp_replicate=2,dp_shard=4",
    "dp_replicate=4",
    "dp_shard=1,tp=4",
)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "own"])
def test_the_recipe_at_the_same_size_makes_the_same_plan(mesh: str, *, stacked: bool) -> None:
    planned = plan_model(mixture(stacked=stacked), parse_mesh(mesh), DEFAULTS)
    axis = data_parallel_axis(planned, DEFAULTS)
    found = axis.plan_at(axis.size)
    assert found is not None
    again, around = found
    assert again == planned.plan
    assert simulate(again, H100, mesh=around) == simulated(planned)


@pytest.mark.parametrize("mesh", MESHES)
def test_the_plan_itself_is_a_point_of_its_curve(mesh: str) -> None:
    planned = of_mixture(mesh)
    here = simulated(planned)
    (point,) = (p for p in curve(planned) if p.num_ranks == planned.parallelism.ranks_per_stage)
    assert point.mesh_shape == here.mesh_shape
    assert point.step_s == here.step_s
    assert point.max_flops == here.busiest.flops
    assert point.received_bytes == here.busiest.received_bytes
    assert point.peak_extra_bytes == here.busiest.peak_extra_bytes
    assert point.num_idle == here.num_idle


@pytest.mark.parametrize(
    "settings",
    [
        DEFAULTS,
        PlanSettings(share_replicas=False, bucket_bytes=4096),
        PlanSettings(shard_momentum=True, replica_route="staged"),
    ],
    ids=["defaults", "not shared", "momentum once"],
)
def test_a_point_is_what_planning_for_that_mesh_would_say(settings: PlanSettings) -> None:
    mesh = "dp_replicate=2,dp_shard={},tp=2,ep=4"
    points = curve(of_mixture(mesh.format(8), settings), settings)
    assert [point.axis_size for point in points] == [2, 4, 8, 16, 32]
    for point in points:
        there = simulated(of_mixture(mesh.format(point.axis_size), settings))
        assert point.step_s == there.step_s
        assert point.received_bytes == there.busiest.received_bytes
        assert point.peak_extra_bytes == there.busiest.peak_extra_bytes
        assert point.num_ranks == 4 * point.axis_size


def test_sizes_that_the_recipe_refuses_are_left_out() -> None:
    """Eight ranks share the experts out: fewer than that cannot."""
    points = curve(of_mixture("dp_shard=16,ep=8"))
    assert [point.axis_size for point in points] == [8, 16, 32, 64]
    assert {point.axis for point in points} == {"dp_shard"}


def test_experts_are_cut_by_rows_where_ranks_outnumber_them() -> None:
    planned = of_mixture("dp_shard=16,ep=4")
    found = data_parallel_axis(planned, DEFAULTS).plan_at(32)
    assert found is not None
    texts = [
        {p.layout.placements_text() for p in plan.params if "experts" in p.name}
        for plan in (planned.plan, found[0])
    ]
    assert texts == [{"S(0/4) S(0)"}, {"S(1) S(0)"}]


@pytest.mark.parametrize(
    ("mesh", "name"),
    [
        ("dp_replicate=4", "dp_replicate"),
        ("dp_replicate=4,tp=2", "dp_replicate"),
        ("dp_replicate=4,dp_shard=2", "dp_shard"),
        ("tp=2", "dp_shard"),
        ("dp_shard=1", "dp_shard"),
    ],
)
def test_replicas_grow_only_where_nothing_is_sharded_over_them(mesh: str, name: str) -> None:
    assert data_parallel_axis(of_mixture(mesh), DEFAULTS).name == name


@pytest.mark.parametrize(
    ("model", "mesh", "stage"),
    [
        ("qwen3-30b-a3b", "dp_shard=16,ep=8", None),
        ("deepseek-v3", "pp=16,dp_shard=64,ep=16", 3),
        ("kimi-k2", "pp=16,dp_replicate=2,dp_shard=64,ep=16", 3),
    ],
)
def test_a_preset_with_experts_has_a_curve_along_which_ranks_have_less_to_do(
    model: str, mesh: str, stage: int | None
) -> None:
    points = curve(plan_model(preset(model), parse_mesh(mesh), DEFAULTS, stage=stage))
    assert len(points) >= 4
    for fewer, more in pairwise(points):
        assert more.axis_size == 2 * fewer.axis_size
        assert more.max_flops < fewer.max_flops
        assert more.received_bytes < fewer.received_bytes
