# SPDX-License-Identifier: Apache-2.0
"""Owners and buckets: balanced, whole, the same on every rank."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.core.optimizer.bucket import (
    Bucket,
    Orthogonalization,
    PlannedParam,
    owner_loads,
)
from hyper_parallel.core.optimizer.forms import Form, form_flops
from hyper_parallel.core.optimizer.layout import AxisPlacement, MeshLayout, ParamLayout
from hyper_parallel.core.optimizer.matrix_view import MatrixBox, MatrixView, matrices_of
from hyper_parallel.core.optimizer.owners import Item, assign_owners
from hyper_parallel.core.optimizer.plan import Plan
from hyper_parallel.core.optimizer.planner import (
    LARGEST_DIRECT_GROUP,
    REPLICA_ROUTES,
    build_plan,
)
from hyper_parallel.core.optimizer.report import received_bytes

R = AxisPlacement()
S0 = AxisPlacement(dim=0)
S1 = AxisPlacement(dim=1)
S0_OF_2 = AxisPlacement(dim=0, split_factor=2)
WORK = Orthogonalization(
    coefficients=((3.4445, -4.7750, 2.0315),) * 5,
    method="standard",
    eps=1e-7,
    dtype="bfloat16",
    device_type="cpu",
)
LARGE = 1 << 40


def mesh_of(*shape: int, first: int = 0) -> MeshLayout:
    return MeshLayout(shape=shape, ranks=tuple(range(first, first + math.prod(shape))))


def param(
    shape: tuple[int, ...],
    mesh: MeshLayout,
    axes: Sequence[AxisPlacement],
    *,
    name: str = "w",
    view: MatrixView = None,
    dtype: str = "bfloat16",
    shard_momentum: bool = False,
) -> PlannedParam:
    layout = ParamLayout(shape=shape, mesh=mesh, axes=tuple(axes))
    source = layout.cut_over_replicas() if shard_momentum else layout
    work = replace(WORK, dtype=dtype)
    return PlannedParam(name=name, layout=layout, source=source, view=view, work=work)


def plan_of(
    params: Sequence[PlannedParam],
    *,
    rank: int = 0,
    bucket_bytes: int = LARGE,
    replica_route: str = "auto",
) -> Plan:
    return build_plan(params, rank=rank, bucket_bytes=bucket_bytes, replica_route=replica_route)


def nbytes(bucket: Bucket, matrix: MatrixBox) -> int:
    return matrix.numel * bucket.itemsize


def bytes_by_owner(bucket: Bucket) -> dict[int, list[int]]:
    held: dict[int, list[int]] = defaultdict(list)
    for planned in bucket.matrices:
        held[planned.owner].append(nbytes(bucket, planned.matrix))
    return held


def loads_of(costs: Sequence[int], owners: Sequence[int], ranks: Sequence[int]) -> list[int]:
    loads = dict.fromkeys(ranks, 0)
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return list(loads.values())


def unrestricted(costs: Sequence[int]) -> list[Item]:
    return [Item(cost=cost, nbytes=1) for cost in costs]


# Owners

items_with_candidates = st.builds(
    Item,
    cost=st.integers(0, 20),
    nbytes=st.integers(0, 5),
    candidates=st.none() | st.sets(st.sampled_from((2, 3, 5, 7)), min_size=1).map(tuple),
)


@given(costs=st.lists(st.integers(0, 12), max_size=6), num_ranks=st.integers(1, 3))
@settings(max_examples=60)
def test_assign_owners_stays_within_grahams_bound(costs: list[int], num_ranks: int) -> None:
    ranks = tuple(range(num_ranks))
    largest = max(loads_of(costs, assign_owners(unrestricted(costs), ranks), ranks))
    best = min(max(loads_of(costs, o, ranks)) for o in product(ranks, repeat=len(costs)))
    assert 3 * num_ranks * largest <= (4 * num_ranks - 1) * best


@given(
    costs=st.lists(st.integers(0, 10**12), min_size=1, max_size=60), num_ranks=st.integers(1, 16)
)
@settings(max_examples=60)
def test_assign_owners_is_even_within_one_item(costs: list[int], num_ranks: int) -> None:
    ranks = tuple(range(num_ranks))
    loads = loads_of(costs, assign_owners(unrestricted(costs), ranks), ranks)
    assert max(loads) - min(loads) <= max(costs)


@given(items=st.lists(items_with_candidates, max_size=25))
@settings(max_examples=100)
def test_assign_owners_keeps_to_the_candidates(items: list[Item]) -> None:
    owners = assign_owners(items, (2, 3, 5, 7))
    assert len(owners) == len(items)
    for item, owner in zip(items, owners, strict=True):
        assert owner in (item.candidates or (2, 3, 5, 7))


@given(items=st.lists(items_with_candidates, max_size=25), data=st.data())
@settings(max_examples=60)
def test_assign_owners_does_not_depend_on_the_order_of_ranks(
    items: list[Item], data: st.DataObject
) -> None:
    ranks = tuple(data.draw(st.permutations((2, 3, 5, 7))))
    turned = [
        i if i.candidates is None else replace(i, candidates=i.candidates[::-1]) for i in items
    ]
    assert assign_owners(turned, ranks) == assign_owners(items, (2, 3, 5, 7))


@given(
    costs=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    num_ranks=st.integers(1, 4),
    data=st.data(),
)
@settings(max_examples=60)
def test_assign_owners_gives_the_same_loads_in_any_order_of_items(
    costs: list[int], num_ranks: int, data: st.DataObject
) -> None:
    ranks = tuple(range(num_ranks))
    shuffled = data.draw(st.permutations(costs))
    before = loads_of(costs, assign_owners(unrestricted(costs), ranks), ranks)
    after = loads_of(shuffled, assign_owners(unrestricted(shuffled), ranks), ranks)
    assert sorted(before) == sorted(after)


def test_assign_owners_gives_ties_to_the_lower_rank_and_the_earlier_item() -> None:
    assert assign_owners(unrestricted([5, 5, 5, 5]), (4, 1, 3)) == [1, 3, 4, 1]


def test_assign_owners_breaks_ties_of_cost_by_bytes() -> None:
    heavy_first = [Item(cost=5, nbytes=8), Item(cost=5, nbytes=2), Item(cost=0, nbytes=1)]
    assert assign_owners(heavy_first, (0, 1)) == [0, 1, 1]


def test_assign_owners_balances_the_rest_around_what_has_no_choice() -> None:
    bound = Item(cost=4, nbytes=0, candidates=(0,))
    assert assign_owners([Item(cost=9, nbytes=0), bound, bound, bound], (0, 1)) == [1, 0, 0, 0]


def test_assign_owners_of_nothing_is_nothing() -> None:
    assert assign_owners([], (0, 1)) == []


# Plans


@st.composite
def param_lists(draw: st.DrawFn) -> list[PlannedParam]:
    """Parameters on one or two meshes over the same ranks, with every kind of layout and view."""
    shape = tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=3)))
    first = draw(st.sampled_from([0, 5]))
    meshes = [mesh_of(*shape, first=first), mesh_of(math.prod(shape), first=first)]
    params = []
    for number in range(draw(st.integers(1, 5))):
        mesh = draw(st.sampled_from(meshes))
        batch = draw(st.lists(st.integers(0, 5), max_size=1))
        tensor_shape = (*batch, draw(st.integers(0, 4)) * 2, draw(st.integers(0, 6)))
        shard = st.builds(
            AxisPlacement,
            dim=st.integers(0, len(tensor_shape) - 1),
            split_factor=st.integers(1, 2),
        )
        params.append(
            param(
                tensor_shape,
                mesh,
                [draw(st.just(R) | shard) for _ in mesh.shape],
                name=f"w{number}",
                view=draw(st.sampled_from([None, "flatten", ("heads", 2)])),
                dtype=draw(st.sampled_from(["bfloat16", "float32", "float16"])),
                shard_momentum=draw(st.booleans()),
            )
        )
    return params


@given(params=param_lists(), bucket_bytes=st.sampled_from([1, 64, 200, LARGE]))
@settings(max_examples=100)
def test_build_plan_puts_each_matrix_that_is_not_empty_in_one_bucket(
    params: list[PlannedParam], bucket_bytes: int
) -> None:
    plan = plan_of(params, rank=params[0].layout.mesh.ranks[0], bucket_bytes=bucket_bytes)
    planned = Counter((m.param, m.matrix) for bucket in plan.buckets for m in bucket.matrices)
    expected = Counter(
        (index, matrix)
        for index, p in enumerate(params)
        for matrix in matrices_of(p.layout.shape, p.view, p.name)
        if matrix.numel
    )
    assert planned == expected
    assert all(bucket.matrices for bucket in plan.buckets)


@given(params=param_lists(), bucket_bytes=st.sampled_from([1, 64, 200, LARGE]))
@settings(max_examples=100)
def test_build_plan_gives_a_matrix_to_a_rank_that_holds_it_whole(
    params: list[PlannedParam], bucket_bytes: int
) -> None:
    plan = plan_of(params, bucket_bytes=bucket_bytes)
    for bucket in plan.buckets:
        travels = False
        for planned in bucket.matrices:
            p = params[planned.param]
            assert planned.owner in bucket.ranks
            assert bucket.ranks == tuple(sorted(p.layout.mesh.ranks))
            assert bucket.wire_dtype == p.work.wire_dtype
            holders = [
                p.source.mesh.rank_at(replica)
                for place in p.source.holders(planned.matrix.box)
                for replica in p.source.replica_coordinates(place)
            ]
            assert not holders or planned.owner in holders
            travels |= not holders
        assert bucket.gathers == travels


@given(params=param_lists(), bucket_bytes=st.sampled_from([1, 64, 200, LARGE]))
@settings(max_examples=100)
def test_build_plan_holds_each_owner_to_bucket_bytes_unless_one_matrix_is_larger(
    params: list[PlannedParam], bucket_bytes: int
) -> None:
    for bucket in plan_of(params, bucket_bytes=bucket_bytes).buckets:
        for held in bytes_by_owner(bucket).values():
            assert sum(held) <= bucket_bytes or len(held) == 1


def test_build_plan_adds_buckets_until_each_owners_matrices_fit() -> None:
    """Three matrices of 64 bytes are less than two buckets of 100, but no two fit in one."""
    plan = plan_of(
        [param((8, 4), mesh_of(1), [R], name=f"w{i}") for i in range(3)], bucket_bytes=100
    )
    assert [len(bucket.matrices) for bucket in plan.buckets] == [1, 1, 1]


@given(
    params=param_lists(),
    bucket_bytes=st.sampled_from([1, 200, LARGE]),
    route=st.sampled_from(REPLICA_ROUTES),
)
@settings(max_examples=40)
def test_build_plan_is_the_same_on_every_rank(
    params: list[PlannedParam], bucket_bytes: int, route: str
) -> None:
    ranks = params[0].layout.mesh.ranks
    plans = [
        plan_of(params, rank=rank, bucket_bytes=bucket_bytes, replica_route=route) for rank in ranks
    ]
    assert [plan.rank for plan in plans] == list(ranks)
    assert len({plan.buckets for plan in plans}) == 1
    assert len({plan.digest(ranks) for plan in plans}) == 1


def test_build_plan_of_no_parameters_is_empty() -> None:
    plan = plan_of([])
    assert (plan.buckets, plan.domains, plan.num_collectives) == ((), (), 0)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 4, 4), (2, 0, 4)])
def test_build_plan_plans_no_empty_matrix(shape: tuple[int, ...]) -> None:
    """C01, C02: nothing of it exists anywhere, so nothing of it may be waited for."""
    assert plan_of([param(shape, mesh_of(2), [S0])]).buckets == ()


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_build_plan_refuses_buckets_of_no_bytes(bucket_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"bucket_bytes must be positive, got {bucket_bytes}"):
        build_plan([], rank=0, bucket_bytes=bucket_bytes)


def test_build_plan_refuses_a_view_that_does_not_fit_and_names_the_parameter() -> None:
    with pytest.raises(ValueError, match=r"blocks\.3\.qkv: .*sums to 10 rows"):
        plan_of([param((18, 4), mesh_of(2), [S0], name="blocks.3.qkv", view=("split", (8, 1, 1)))])


# Who communicates


def test_build_plan_lets_a_matrix_of_one_rank_alone_stay_there() -> None:
    (bucket,) = plan_of([param((8, 4), mesh_of(1, first=3), [R])], rank=3).buckets
    assert (bucket.gathers, bucket.scatters, bucket.num_collectives) == (False, False, 0)
    assert [m.owner for m in bucket.matrices] == [3]


def test_build_plan_lets_experts_stay_where_they_lie() -> None:
    plan = plan_of([param((8, 6, 4), mesh_of(4), [S0])])
    assert plan.num_collectives == 0
    assert plan.domains == ()
    owners = {m.matrix.box[0][0]: m.owner for b in plan.buckets for m in b.matrices}
    assert owners == {expert: expert // 2 for expert in range(8)}


def test_build_plan_sends_a_replicated_parameter_back_only() -> None:
    plan = plan_of([param((8, 4), mesh_of(4), [R], name=f"w{i}") for i in range(4)])
    (bucket,) = plan.buckets
    assert (bucket.gathers, bucket.scatters) == (False, True)
    assert sorted(m.owner for m in bucket.matrices) == [0, 1, 2, 3]


def test_build_plan_shares_a_stack_of_whole_experts_between_replicas() -> None:
    (bucket,) = plan_of([param((4, 6, 4), mesh_of(2, 2), [R, S0])]).buckets
    assert (bucket.gathers, bucket.scatters) == (False, True)
    assert {m.matrix.box[0][0] // 2 for m in bucket.matrices if m.owner in (0, 2)} == {0}
    assert sorted(m.owner for m in bucket.matrices) == [0, 1, 2, 3]


def test_build_plan_spreads_the_experts_of_one_cut_stack_over_all_ranks() -> None:
    (bucket,) = plan_of([param((8, 6, 4), mesh_of(4), [S1])]).buckets
    assert bucket.num_collectives == 2
    assert Counter(m.owner for m in bucket.matrices) == dict.fromkeys(range(4), 2)


def test_build_plan_lets_meshes_over_the_same_ranks_share_buckets() -> None:
    params = [
        param((8, 4), mesh_of(4), [S0], name="one"),
        param((8, 4), mesh_of(2, 2), [R, S0], name="two"),
        param((8, 4), mesh_of(2, 2), [S0, S1], name="three"),
    ]
    (bucket,) = plan_of(params).buckets
    assert {m.param for m in bucket.matrices} == {0, 1, 2}
    assert len({m.owner for m in bucket.matrices}) == 3


def test_build_plan_gathers_replicated_parameters_whose_momentum_is_cut() -> None:
    (bucket,) = plan_of([param((8, 4), mesh_of(4), [R], shard_momentum=True)]).buckets
    assert (bucket.gathers, bucket.scatters) == (True, True)


def test_build_plan_sends_back_what_only_one_rank_has_momentum_for() -> None:
    (bucket,) = plan_of([param((4, 6, 4), mesh_of(4), [R], shard_momentum=True)]).buckets
    assert (bucket.gathers, bucket.scatters) == (False, True)
    assert [m.owner for m in bucket.matrices] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("replica_route", "num_ranks", "expected"),
    [
        ("direct", LARGEST_DIRECT_GROUP * 2, "direct"),
        ("staged", 4, "staged"),
        ("auto", LARGEST_DIRECT_GROUP, "direct"),
        ("auto", LARGEST_DIRECT_GROUP * 2, "staged"),
    ],
)
def test_build_plan_stages_on_request_or_among_many_ranks(
    replica_route: str, num_ranks: int, expected: str
) -> None:
    """B04: an all-to-all among thousands of ranks exhausts queue pairs."""
    params = [param((num_ranks, 4), mesh_of(2, num_ranks // 2), [R, S0])]
    plan = plan_of(params, replica_route=replica_route)
    assert [bucket.route for bucket in plan.buckets] == [expected]
    assert plan.num_collectives == (3 if expected == "staged" else 2)


@pytest.mark.parametrize("axes", [[S0, S1], [R, R]])
def test_build_plan_stages_only_what_has_shards_and_replicas(axes: list[AxisPlacement]) -> None:
    (bucket,) = plan_of([param((8, 4), mesh_of(2, 2), axes)], replica_route="staged").buckets
    assert bucket.route == "direct"


def test_build_plan_keeps_what_passes_through_other_groups_apart() -> None:
    params = [
        param((8, 4), mesh_of(2, 2), [R, S0]),
        param((8, 4), mesh_of(2, 2), [S0, R]),
        param((4, 8), mesh_of(2, 2), [R, S1]),
        param((4, 8), mesh_of(4), [S1]),
    ]
    plan = plan_of(params, replica_route="staged")
    together = sorted(sorted({m.param for m in b.matrices}) for b in plan.buckets)
    assert together == [[0, 2], [1], [3]]


def test_build_plan_separates_what_travels_in_another_dtype() -> None:
    params = [
        param((8, 4), mesh_of(2), [S0], dtype=dtype)
        for dtype in ("float32", "bfloat16", "float16", "bfloat16")
    ]
    together = {b.wire_dtype: {m.param for m in b.matrices} for b in plan_of(params).buckets}
    assert together == {"bfloat16": {1, 3}, "float32": {0, 2}}


# Order of domains


def domains_met_by(rank: int) -> list[MeshLayout]:
    """World, halves and pairs of eight ranks, as far as a rank is in them."""
    sizes = {8: [0], 4: [0, 2, 4], 2: [0, 1, 3, 4, 6]}
    meshes = [mesh_of(size, first=first) for size, at in sizes.items() for first in at]
    return [mesh for mesh in meshes if rank in mesh.ranks]


def test_build_plan_orders_domains_alike_on_all_ranks_whatever_the_order_of_parameters() -> None:
    """Two ranks that met two domains in opposite order would wait for each other."""
    orders = []
    for rank in range(8):
        meshes = domains_met_by(rank)
        meshes = meshes[rank % len(meshes) :] + meshes[: rank % len(meshes)]
        plan = plan_of([param((8, 4), mesh, [S0]) for mesh in meshes], rank=rank)
        assert set(plan.domains) == {mesh.ranks for mesh in meshes}
        orders.append(plan.domains)
    for one, other in combinations(orders, 2):
        common = set(one) & set(other)
        assert [d for d in one if d in common] == [d for d in other if d in common]


def test_build_plan_describes_a_domain_alike_whatever_else_its_ranks_do() -> None:
    common = [param((8, 4), mesh_of(2), [S0], name=f"common{i}") for i in range(3)]
    mine = [param((9, 5), mesh_of(1, first=rank), [R], name=f"own{rank}") for rank in range(2)]
    zero = plan_of([mine[0], *common], rank=0)
    one = plan_of([common[0], mine[1], *common[1:]], rank=1)
    assert zero.digest((0, 1)) == one.digest((0, 1))


# Balance


def test_build_plan_does_not_pile_big_matrices_on_one_rank() -> None:
    """E04: round robin by index gave one rank the big matrices."""
    shapes = [(256, 256)] + [(64, 64)] * 8 + [(16, 16)] * 16
    params = [param(s, mesh_of(4), [S0], name=f"w{i}") for i, s in enumerate(shapes)]
    plan = plan_of(params)
    loads = owner_loads(params, plan.buckets, range(4)).values()
    costs = [form_flops(Form(), *shape, 5) for shape in shapes]
    assert sum(loads) == sum(costs)
    assert 3 * max(loads) <= 4 * max(sum(costs) / 4, max(costs))
    assert sorted(loads)[-2] < 2 * sorted(loads)[0]  # the others share the rest


@given(
    num_matrices=st.integers(1, 40),
    num_ranks=st.integers(1, 6),
    matrices_per_bucket=st.integers(1, 5),
)
@settings(max_examples=60)
def test_build_plan_has_equal_matrices_even_over_owners_in_each_bucket(
    num_matrices: int, num_ranks: int, matrices_per_bucket: int
) -> None:
    mesh = mesh_of(num_ranks)
    params = [param((6, 6), mesh, [S0], name=f"w{i}") for i in range(num_matrices)]
    plan = plan_of(params, bucket_bytes=matrices_per_bucket * 72)
    for bucket in plan.buckets:
        held = bytes_by_owner(bucket)
        sums = [sum(held.get(rank, ())) for rank in mesh.ranks]
        assert max(sums) - min(sums) <= 72


@given(params=param_lists(), bucket_bytes=st.sampled_from([64, 200, 1000]))
@settings(max_examples=60)
def test_build_plan_deals_each_owners_bytes_evenly_within_one_matrix(
    params: list[PlannedParam], bucket_bytes: int
) -> None:
    plan = plan_of(params, bucket_bytes=bucket_bytes)
    kinds: dict[tuple[str, bool], list[Bucket]] = defaultdict(list)
    for bucket in plan.buckets:
        kinds[bucket.wire_dtype, bucket.scatters].append(bucket)
    for buckets in kinds.values():
        held = [bytes_by_owner(bucket) for bucket in buckets]
        for rank in buckets[0].ranks:
            sums = [sum(owned.get(rank, ())) for owned in held]
            assert max(sums) - min(sums) <= max(b for owned in held for b in owned.get(rank, [0]))


def blocks(
    mesh: MeshLayout, rowwise: Sequence[AxisPlacement], colwise: Sequence[AxisPlacement]
) -> list[PlannedParam]:
    """Four transformer blocks of width 256; ``colwise`` and ``rowwise`` as tensor parallelism."""
    d = 256
    shapes = {"qkv": (3 * d, d), "out": (d, d), "up": (4 * d, d), "down": (d, 4 * d)}
    return [
        param(shape, mesh, rowwise if kind in ("out", "down") else colwise, name=f"{i}.{kind}")
        for i in range(4)
        for kind, shape in shapes.items()
    ]


@pytest.mark.parametrize(
    ("mesh", "rowwise", "colwise", "most_mb", "num_collectives"),
    [
        (mesh_of(4), [S0], [S0], 2.5, 2),
        (mesh_of(2, 2), [R, S0], [R, S0], 3.2, 2),
        (mesh_of(2, 2), [S0, S1], [S0_OF_2, S0], 2.5, 2),
        (mesh_of(4), [R], [R], 4.8, 1),
    ],
    ids=["fsdp", "hsdp", "fsdp_tp", "ddp"],
)
def test_build_plan_keeps_to_the_promised_work_bytes_and_collectives(
    mesh: MeshLayout,
    rowwise: list[AxisPlacement],
    colwise: list[AxisPlacement],
    most_mb: float,
    num_collectives: int,
) -> None:
    params = blocks(mesh, rowwise, colwise)
    plan = plan_of(params)
    assert plan.num_collectives == num_collectives
    loads = owner_loads(params, plan.buckets, mesh.ranks).values()
    assert max(loads) <= 0.26 * sum(loads)
    for rank in mesh.ranks:
        received = sum(received_bytes(params, bucket, rank) for bucket in plan.buckets)
        assert received <= most_mb * 1e6


def test_build_plan_of_ten_thousand_parameters_on_64_ranks_takes_seconds() -> None:
    mesh = mesh_of(4, 16)
    shapes = [(512, 128), (128, 512), (384, 128), (128, 128)]
    params = [param(shapes[i % 4], mesh, [R, S0], name=f"w{i}") for i in range(10_000)]
    start = time.process_time()
    plan = plan_of(params, bucket_bytes=64 << 20)
    assert time.process_time() - start < 20
    assert sum(len(bucket.matrices) for bucket in plan.buckets) == 10_000


def test_bucket_bytes_bounds_what_replicas_receive() -> None:
    """Every rank receives every update of replicated parameters, so those count, too."""
    mesh = MeshLayout(shape=(4,), ranks=(0, 1, 2, 3))
    params = [param((8, 8), mesh, (R,), name=f"w{i}") for i in range(32)]
    size = 8 * 8 * 2
    plan = plan_of(params, bucket_bytes=8 * size)
    assert len(plan.buckets) == 4
    for bucket in plan.buckets:
        assert Counter(m.owner for m in bucket.matrices) == dict.fromkeys(mesh.ranks, 2)
    assert len(plan_of(params, bucket_bytes=1).buckets) == 8  # one matrix of each owner


def test_meshes_that_arrange_ranks_otherwise_share_no_staged_bucket() -> None:
    meshes = [MeshLayout(shape=(2, 2), ranks=r) for r in ((0, 1, 2, 3), (0, 2, 1, 3))]
    params = [param((8, 4), mesh, (R, S0)) for mesh in meshes]
    plan = build_plan(params, rank=0, bucket_bytes=LARGE, replica_route="staged")
    assert [{m.param for m in bucket.matrices} for bucket in plan.buckets] == [{0}, {1}]


def test_digest_tells_routes_and_large_meshes_apart() -> None:
    ranks = tuple(range(4))
    sharded = param((8, 4), MeshLayout(shape=(2, 2), ranks=ranks), (R, S0))
    digests = {
        build_plan([sharded], rank=0, bucket_bytes=LARGE, replica_route=route).digest(ranks)
        for route in ("direct", "staged")
    }
    assert len(digests) == 2
    large = tuple(range(128))
    swapped = (*large[:60], 61, 60, *large[62:])
    texts = {MeshLayout(shape=(128,), ranks=r).text for r in (large, swapped)}
    assert len(texts) == 2


def test_planning_does_not_grow_as_parameters_times_replicas() -> None:
    mesh = MeshLayout(shape=(1024,), ranks=tuple(range(1024)))
    params = [param((64, 64), mesh, (R,), name=f"w{i}") for i in range(2000)]
    start = time.process_time()
    plan_of(params, bucket_bytes=LARGE)
    assert time.process_time() - start < 20
