# SPDX-License-Identifier: Apache-2.0
"""Simulated steps: sums over all ranks against the routes of each, the clock, and size."""

import json
import math
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.core.optimizer.hardware_presets import PRESETS
from hyper_parallel.core.optimizer.layout import AxisPlacement, MeshLayout
from hyper_parallel.core.optimizer.matrix_view import MatrixView
from hyper_parallel.core.optimizer.planner import build_plan
from hyper_parallel.core.optimizer.report import received_bytes
from hyper_parallel.core.optimizer.simulation import rank_step, simulate
from hyper_parallel.core.optimizer.timeline import LANES
from tests.planned import S0, S1, R, experts, mesh_of, plan_of, planned, transformer

AXES = st.sampled_from([R, S0, S1, AxisPlacement(dim=0, split_factor=2)])
VIEWS: list[MatrixView] = [None, ("heads", 2), ("split", (1, 5))]


@settings(max_examples=60, deadline=None)
@given(
    mesh_shape=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    kinds=st.lists(
        st.tuples(
            st.tuples(AXES, AXES, AXES),
            st.sampled_from([(6, 4), (6, 1), (3, 6, 4), (0, 4)]),
            st.sampled_from(VIEWS),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ),
    bucket_bytes=st.sampled_from([16, 200, 1 << 40]),
    replica_route=st.sampled_from(["direct", "staged"]),
)
def test_sums_over_all_ranks_are_those_of_each_ranks_routes(
    mesh_shape: list[int],
    kinds: list[tuple[tuple[AxisPlacement, ...], tuple[int, ...], MatrixView, bool]],
    bucket_bytes: int,
    replica_route: str,
) -> None:
    mesh = mesh_of(*mesh_shape)
    params = []
    for axes, shape, view, shard_momentum in kinds:
        param = planned(shape, mesh, axes[: len(mesh_shape)])
        source = param.layout.cut_over_replicas() if shard_momentum else param.layout
        view = view if shape[-2] == 6 else None
        params.append(replace(param, source=source, view=view))
    plan = build_plan(params, rank=0, bucket_bytes=bucket_bytes, replica_route=replica_route)
    said = simulate(plan, PRESETS["h100"])
    for i, rank in enumerate(said.ranks):
        received = sum(received_bytes(plan.params, bucket, rank) for bucket in plan.buckets)
        assert said.received_bytes[i] == received
        owned = [p for bucket in plan.buckets for p in bucket.matrices if p.owner == rank]
        assert said.matrices[i] == len(owned)
        assert said.flops[i] == sum(plan.params[p.param].work.flops(p.matrix) for p in owned)
        step = rank_step(plan, rank, PRESETS["h100"], mesh=mesh, axis_names=["a"] * len(mesh_shape))
        assert step.received_bytes == received
        assert sum(step.received_by_axis.values()) == received


def test_bytes_cross_the_axes_that_the_mesh_says() -> None:
    """Two replicas of two shards: an owner gathers within its copy and answers everybody."""
    mesh = mesh_of(2, 2)
    plan = plan_of([planned((8, 8), mesh, (R, S0)) for _ in range(4)])
    hardware = replace(PRESETS["h100"], ranks_per_node=2)
    step = simulate(plan, hardware, axis_names=("replicate", "shard")).busiest
    half, header = 8 * 8 // 2 * 2, 16
    # In: half of its own matrix. Back: from each of three owners half a matrix.
    assert step.received_by_axis == {
        "replicate": half + 2 * header,
        "shard": 2 * half + 2 * header,
        "replicate + shard": half + 2 * header,
    }
    assert step.received_by_link == {
        "within_node": 2 * half + 2 * header,
        "between_nodes": 2 * half + 4 * header,
    }


def test_a_replica_by_itself_is_taken_for_all_of_them() -> None:
    mesh = mesh_of(2, 3)
    shared = [planned((12, 12), mesh, (R, S0)) for _ in range(2)]
    layout = shared[0].layout.without_replicas(4)
    alone = [replace(p, layout=layout, source=layout, name="alone") for p in shared]
    said = simulate(plan_of(alone, rank=4), PRESETS["h100"], mesh=mesh)
    assert said.ranks == tuple(range(6))
    assert said.flops[:3] == said.flops[3:]
    assert said.matrices == (1, 1, 0, 1, 1, 0)
    assert said.received_bytes[:3] == said.received_bytes[3:]
    together = simulate(plan_of([*shared, *alone], rank=4), PRESETS["h100"])
    assert sum(together.matrices) == 2 + 4


def test_idle_ranks_and_imbalance_are_counted() -> None:
    said = simulate(plan_of([planned((64, 64), mesh_of(8), (S0,))] * 2), PRESETS["h100"])
    assert said.num_idle == 6
    assert said.imbalance == 4
    assert said.busiest.rank == 0


def test_the_clock_keeps_the_executors_order() -> None:
    mesh = mesh_of(8)
    params = transformer(mesh, (S0,), num_layers=8, width=512)
    said = simulate(plan_of(params, bucket_bytes=1 << 20), PRESETS["h100"])
    assert said.num_buckets > 3
    assert {span.lane for span in said.busiest.timeline} == set(LANES)
    starts = {(span.lane, span.bucket): span.start_s for span in said.busiest.timeline}
    stops = {(span.lane, span.bucket): span.stop_s for span in said.busiest.timeline}
    for k in range(said.num_buckets - 1):
        assert starts["exchange in", k + 1] <= starts["orthogonalize", k]
        assert stops["orthogonalize", k] <= stops["exchange back", k]
        assert stops["exchange back", k] <= starts["apply", k]
        if k:
            assert starts["orthogonalize", k] <= starts["apply", k - 1]
    own = [s for s in said.busiest.timeline if s.lane in ("prepare", "orthogonalize", "apply")]
    for before, after in pairwise(own):
        assert before.stop_s <= after.start_s, "a rank does one thing at a time"
    assert said.step_s == max(span.stop_s for span in said.busiest.timeline)


def test_slower_links_and_fewer_cores_take_longer() -> None:
    plan = plan_of(transformer(mesh_of(4), (S0,), num_layers=2, width=256))
    cpu = replace(PRESETS["cpu"], cores_per_node=4)
    fast = simulate(plan, cpu).step_s
    link = replace(cpu.within_node, bytes_per_s=cpu.within_node.bytes_per_s / 10)
    assert simulate(plan, replace(cpu, within_node=link)).step_s > fast
    assert 1.4 * fast < simulate(plan, replace(cpu, cores_per_node=2)).step_s <= 2 * fast


def test_a_simulation_is_json() -> None:
    said = simulate(plan_of([planned((8, 8), mesh_of(2), (S0,))]), PRESETS["cpu"])
    assert json.loads(json.dumps(said.to_dict()))["imbalance"] == 2


def test_bad_input_is_named() -> None:
    plan = plan_of([planned((8, 8), mesh_of(2, 2), (S0, R))])
    with pytest.raises(ValueError, match=r"axis_names: expected 2 for a mesh of shape \(2, 2\)"):
        simulate(plan, PRESETS["h100"], axis_names=("dp",))
    with pytest.raises(ValueError, match="expected at least one parameter"):
        simulate(plan_of([]), PRESETS["h100"])
    slow = replace(
        PRESETS["h100"], matrix_rates={"float32": PRESETS["h100"].matrix_rates["float32"]}
    )
    with pytest.raises(ValueError, match="no matrix rate for bfloat16"):
        simulate(plan, slow)


def test_a_trillion_parameters_on_4096_ranks_take_seconds() -> None:
    """DESIGN: at most ten seconds and a gigabyte on one core, from layouts to the report."""
    mesh = mesh_of(64, 64)
    params = experts(mesh, num_layers=60, num_experts=384)
    assert sum(math.prod(param.layout.shape) for param in params) > 1e12
    plan = plan_of(params, bucket_bytes=1 << 30)
    begun = time.process_time()
    said = simulate(plan, PRESETS["h200"], axis_names=("dp", "ep"))
    took = time.process_time() - begun
    assert len(said.flops) == 4096
    assert took <= 10


def test_a_mesh_may_start_anywhere() -> None:
    mesh = MeshLayout(shape=(4,), ranks=(8, 9, 10, 11))
    said = simulate(plan_of([planned((8, 8), mesh, (S0,))], rank=9), PRESETS["h100"])
    assert said.ranks == (8, 9, 10, 11)
    assert said.busiest.rank == 8
