# SPDX-License-Identifier: Apache-2.0
"""The exchange, played through in one process: every element arrives, once, where it belongs."""

import math
from collections.abc import Callable, Sequence
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hyper_parallel.core.optimizer.bucket import (
    HEADER_BYTES,
    Bucket,
    Orthogonalization,
    PlannedParam,
)
from hyper_parallel.core.optimizer.layout import AxisPlacement, MeshLayout, ParamLayout
from hyper_parallel.core.optimizer.matrix_view import MatrixView
from hyper_parallel.core.optimizer.planner import build_plan
from hyper_parallel.core.optimizer.regions import Box
from hyper_parallel.core.optimizer.routes import (
    Cargo,
    Exchange,
    exchanges_of,
    gather_route,
    relay_route,
    scatter_route,
    stored_cargo,
)

Route = Callable[[Sequence[PlannedParam], Bucket, int], Exchange]

R = AxisPlacement()
S0 = AxisPlacement(dim=0)
S1 = AxisPlacement(dim=1)
WORK = Orthogonalization(
    coefficients=((3.4445, -4.7750, 2.0315),),
    method="standard",
    eps=1e-7,
    dtype="float32",
    device_type="cpu",
)
LARGE = 1 << 40


def planned(
    layout: ParamLayout, *, view: MatrixView = None, name: str = "w", shard_momentum: bool = False
) -> PlannedParam:
    """A parameter whose momentum lives where its weight does, or is cut over its replicas."""
    source = layout.cut_over_replicas() if shard_momentum else layout
    return PlannedParam(name=name, layout=layout, source=source, view=view, work=WORK)


def layout_of(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], axes: Sequence[AxisPlacement]
) -> ParamLayout:
    mesh = MeshLayout(shape=mesh_shape, ranks=tuple(range(math.prod(mesh_shape))))
    return ParamLayout(shape=shape, mesh=mesh, axes=tuple(axes))


def buckets_of(
    params: Sequence[PlannedParam], bucket_bytes: int = LARGE, replica_route: str = "direct"
) -> tuple[Bucket, ...]:
    rank = params[0].layout.mesh.ranks[0]
    plan = build_plan(params, rank=rank, bucket_bytes=bucket_bytes, replica_route=replica_route)
    return plan.buckets


# Random parameters on meshes of up to eight ranks and three axes


@st.composite
def _meshes(draw: st.DrawFn) -> list[MeshLayout]:
    """All orders of the axes of one mesh shape, and the flat mesh, over the same ranks."""
    sizes = draw(
        st.lists(st.integers(1, 8), min_size=1, max_size=3).filter(lambda s: math.prod(s) <= 8)
    )
    ranks = tuple(2 + 3 * i for i in range(math.prod(sizes)))
    shapes = sorted({*permutations(sizes), (math.prod(sizes),)})
    return [MeshLayout(shape=shape, ranks=ranks) for shape in shapes]


def _axes(ndim: int) -> st.SearchStrategy[AxisPlacement]:
    dims = st.integers(0, ndim - 1)
    return st.just(R) | st.builds(AxisPlacement, dim=dims, split_factor=st.integers(1, 3))


@st.composite
def param_lists(draw: st.DrawFn) -> list[PlannedParam]:
    """One to three parameters over the same ranks: stacks, views, no rows, one row."""
    meshes = draw(_meshes())
    params = []
    for number in range(draw(st.integers(1, 3))):
        batch = draw(st.lists(st.integers(0, 4), max_size=2))
        view, num_rows = draw(
            st.sampled_from(
                [
                    (None, draw(st.integers(0, 9))),
                    (None, 1),
                    ("flatten", draw(st.integers(0, 9))),
                    (("heads", 3), 6),
                    (("split", (4, 1, 2)), 7),
                ]
            )
        )
        shape = (*batch, num_rows, draw(st.integers(0, 6)))
        mesh = draw(st.sampled_from(meshes))
        axes = tuple(draw(_axes(len(shape))) for _ in mesh.shape)
        layout = ParamLayout(shape=shape, mesh=mesh, axes=axes)
        shard_momentum = draw(st.booleans())
        params.append(planned(layout, view=view, name=f"w{number}", shard_momentum=shard_momentum))
    return params


any_bucket_bytes = st.sampled_from([1, 100, LARGE])
any_route = st.sampled_from(["direct", "staged"])


# One exchange in one process


def cut_out(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(start, stop) for start, stop in box)]


def local_of(whole: Tensor, layout: ParamLayout, rank: int) -> Tensor:
    for dim, spans in enumerate(layout.region(layout.mesh.coordinate(rank))):
        rows = [i for start, stop in spans for i in range(start, stop)]
        whole = whole.index_select(dim, torch.tensor(rows, dtype=torch.long))
    return whole


def numbered(params: Sequence[PlannedParam], first: int = 0) -> list[Tensor]:
    """Global tensors in which no two elements are equal, and none is negative."""
    tensors = []
    for param in params:
        numel = math.prod(param.layout.shape)
        tensors.append(torch.arange(first, first + numel).reshape(param.layout.shape))
        first += numel
    return tensors


def place(target: Tensor, values: Tensor) -> None:
    assert bool((target == -1).all()), "an element arrives twice"
    assert target.shape == values.shape
    target.copy_(values)


class World:
    """All ranks of some buckets, and what each of them holds.

    Attributes:
        sent: Elements that travelled from one rank to another.
    """

    def __init__(self, params: Sequence[PlannedParam], tensors: Sequence[Tensor]) -> None:
        self.params = params
        self.ranks = params[0].layout.mesh.ranks
        self.sent = 0
        self.momentum = {
            rank: [local_of(t, p.source, rank) for p, t in zip(params, tensors, strict=True)]
            for rank in self.ranks
        }
        self.update = {
            rank: [
                torch.full_like(local_of(t, p.layout, rank), -1)
                for p, t in zip(params, tensors, strict=True)
            ]
            for rank in self.ranks
        }

    def gather(self, bucket: Bucket) -> list[Tensor]:
        """Each matrix of the bucket as its owner puts it together."""
        wholes = [
            torch.full([stop - start for start, stop in m.matrix.box], -1) for m in bucket.matrices
        ]

        def read(rank: int, cargo: Cargo) -> Tensor:
            param = bucket.matrices[cargo.matrix].param
            return cut_out(self.momentum[rank][param], cargo.piece.fine)

        def write(rank: int, cargo: Cargo, values: Tensor) -> None:
            assert bucket.matrices[cargo.matrix].owner == rank
            place(cut_out(wholes[cargo.matrix], cargo.piece.inner), values)

        self._run(gather_route, bucket, read, write)
        return wholes

    def scatter(self, bucket: Bucket, wholes: Sequence[Tensor]) -> None:
        """Bring each matrix back from its owner to the ranks that hold a part."""

        def read(rank: int, cargo: Cargo) -> Tensor:
            assert bucket.matrices[cargo.matrix].owner == rank
            return cut_out(wholes[cargo.matrix], cargo.piece.inner)

        def write(rank: int, cargo: Cargo, values: Tensor) -> None:
            place(self._part(rank, bucket, cargo), values)

        self._run(scatter_route, bucket, read, write)

    def relay(self, bucket: Bucket) -> None:
        """Pass what has arrived on to the replicas."""

        def read(rank: int, cargo: Cargo) -> Tensor:
            return self._part(rank, bucket, cargo)

        def write(rank: int, cargo: Cargo, values: Tensor) -> None:
            place(self._part(rank, bucket, cargo), values)

        self._run(relay_route, bucket, read, write)

    def _part(self, rank: int, bucket: Bucket, cargo: Cargo) -> Tensor:
        param = bucket.matrices[cargo.matrix].param
        return cut_out(self.update[rank][param], cargo.piece.local)

    def _run(
        self,
        route: Route,
        bucket: Bucket,
        read: Callable[[int, Cargo], Tensor],
        write: Callable[[int, Cargo, Tensor], None],
    ) -> None:
        exchanges = {rank: route(self.params, bucket, rank) for rank in bucket.ranks}
        wire: dict[tuple[int, int], Tensor] = {}
        for rank, exchange in exchanges.items():
            for peer, parcel in exchange.sends.items():
                packed = torch.cat([read(rank, cargo).flatten() for cargo in parcel])
                wire[rank, peer] = packed
                self.sent += packed.numel()
        for rank, exchange in exchanges.items():
            for cargo in exchange.keeps:
                write(rank, cargo, read(rank, cargo))
            for peer, parcel in exchange.receives.items():
                packed = wire.pop((peer, rank))
                parts = packed.split([cargo.piece.numel for cargo in parcel])
                for cargo, part in zip(parcel, parts, strict=True):
                    shape = [stop - start for start, stop in cargo.piece.inner]
                    write(rank, cargo, part.reshape(shape))
        assert not wire, "something was sent that nobody expects"


def assert_each_element_arrives(
    params: Sequence[PlannedParam], bucket_bytes: int, replica_route: str
) -> None:
    momentum = numbered(params)
    world = World(params, momentum)
    updates = numbered(params, first=10**6)
    for bucket in buckets_of(params, bucket_bytes, replica_route):
        wholes = world.gather(bucket)
        for m, whole in zip(bucket.matrices, wholes, strict=True):
            assert torch.equal(whole, cut_out(momentum[m.param], m.matrix.box))
        world.scatter(bucket, [cut_out(updates[m.param], m.matrix.box) for m in bucket.matrices])
        if bucket.route == "staged":
            world.relay(bucket)
    for rank in world.ranks:
        for param, update, got in zip(params, updates, world.update[rank], strict=True):
            assert torch.equal(got, local_of(update, param.layout, rank))


@given(params=param_lists(), bucket_bytes=any_bucket_bytes, replica_route=any_route)
@settings(max_examples=120)
def test_exchange_brings_each_element_to_its_owner_and_back_once(
    params: list[PlannedParam], bucket_bytes: int, replica_route: str
) -> None:
    assert_each_element_arrives(params, bucket_bytes, replica_route)


@pytest.mark.parametrize("axes", [(R, S0), (S0, R), (S0, S1)])
def test_exchange_holds_among_meshes_that_arrange_the_same_ranks_otherwise(
    axes: tuple[AxisPlacement, ...],
) -> None:
    params = []
    for ranks in [(0, 1, 2, 3), (0, 2, 1, 3)]:
        mesh = MeshLayout(shape=(2, 2), ranks=ranks)
        layout = ParamLayout(shape=(5, 4), mesh=mesh, axes=axes)
        params += [planned(layout, name=f"{ranks}{i}") for i in range(3)]
    assert_each_element_arrives(params, LARGE, "direct")


@given(params=param_lists(), bucket_bytes=any_bucket_bytes, replica_route=any_route)
@settings(max_examples=80)
def test_exchanges_send_what_the_peer_expects_in_the_same_order(
    params: list[PlannedParam], bucket_bytes: int, replica_route: str
) -> None:
    for bucket in buckets_of(params, bucket_bytes, replica_route):
        by_rank = [exchanges_of(params, bucket, rank) for rank in bucket.ranks]
        assert {len(exchanges) for exchanges in by_rank} == {bucket.num_collectives}
        for exchanges in zip(*by_rank, strict=True):
            assert_matched(dict(zip(bucket.ranks, exchanges, strict=True)))


def assert_matched(exchanges: dict[int, Exchange]) -> None:
    """One all-to-all, or several side by side, as all of its ranks see it."""
    for rank, exchange in exchanges.items():
        assert rank in exchange.ranks
        assert exchange.ranks == tuple(sorted(exchange.ranks))
        assert {exchanges[peer].ranks for peer in exchange.ranks} == {exchange.ranks}
        assert {*exchange.sends, *exchange.receives} <= {*exchange.ranks} - {rank}
    sent = {(s, r): parcel for s, e in exchanges.items() for r, parcel in e.sends.items()}
    expected = {(s, r): parcel for r, e in exchanges.items() for s, parcel in e.receives.items()}
    assert sent == expected
    assert all(parcel for parcel in sent.values())
    numel = {pair: sum(cargo.piece.numel for cargo in parcel) for pair, parcel in sent.items()}
    for rank, exchange in exchanges.items():
        assert exchange.numel_sent() == sum(n for (s, _), n in numel.items() if s == rank)
        assert exchange.numel_received() == sum(n for (_, r), n in numel.items() if r == rank)


@given(params=param_lists(), bucket_bytes=any_bucket_bytes, replica_route=any_route)
@settings(max_examples=60)
def test_gather_takes_each_element_once_from_the_owners_own_copy(
    params: list[PlannedParam], bucket_bytes: int, replica_route: str
) -> None:
    """Whatever the replicas, a gather stays inside the ranks that hold one copy."""
    for bucket in buckets_of(params, bucket_bytes, replica_route):
        numels = [0] * len(bucket.matrices)
        for rank in bucket.ranks:
            exchange = gather_route(params, bucket, rank)
            for owner, parcel in exchange.sends.items():
                for cargo in parcel:
                    source = params[bucket.matrices[cargo.matrix].param].source
                    at = source.mesh.coordinate
                    assert source.replica_of(at(rank), like=at(owner))
                    numels[cargo.matrix] += cargo.piece.numel
            for cargo in exchange.keeps:
                numels[cargo.matrix] += cargo.piece.numel
        assert numels == [m.matrix.numel for m in bucket.matrices]


@given(params=param_lists(), bucket_bytes=any_bucket_bytes)
@settings(max_examples=60)
def test_bucket_says_whether_anything_travels(
    params: list[PlannedParam], bucket_bytes: int
) -> None:
    for bucket in buckets_of(params, bucket_bytes):
        for route, travels in ((gather_route, bucket.gathers), (scatter_route, bucket.scatters)):
            numels = [route(params, bucket, rank).numel_sent() for rank in bucket.ranks]
            assert (sum(numels) > 0) == travels


@given(params=param_lists())
@settings(max_examples=60)
def test_staged_route_brings_each_rank_as_many_elements_as_the_direct_one(
    params: list[PlannedParam],
) -> None:
    direct, staged = buckets_of(params), buckets_of(params, replica_route="staged")
    for rank in params[0].layout.mesh.ranks:
        numels = [
            sum(e.numel_received() for b in buckets for e in exchanges_of(params, b, rank))
            for buckets in (direct, staged)
        ]
        assert numels[0] == numels[1]


@given(params=param_lists(), bucket_bytes=any_bucket_bytes)
@settings(max_examples=60)
def test_stored_cargo_is_all_of_a_ranks_momentum_once(
    params: list[PlannedParam], bucket_bytes: int
) -> None:
    world = World(params, numbered(params))
    for rank in world.ranks:
        seen = [torch.full_like(local, -1) for local in world.momentum[rank]]
        for bucket in buckets_of(params, bucket_bytes):
            for cargo in stored_cargo(params, bucket, rank):
                part = cut_out(seen[bucket.matrices[cargo.matrix].param], cargo.piece.fine)
                place(part, torch.ones_like(part))
        assert all(bool((local == 1).all()) for local in seen)


# Layouts that people use


def peers(route: Route, params: Sequence[PlannedParam], bucket: Bucket) -> set[tuple[int, int]]:
    return {(rank, peer) for rank in bucket.ranks for peer in route(params, bucket, rank).sends}


def test_gather_of_replicated_parameters_sends_nothing() -> None:
    params = [planned(layout_of((6, 4), (2, 2), (R, R)), name=f"w{i}") for i in range(3)]
    (bucket,) = buckets_of(params)
    assert not bucket.gathers
    for rank in bucket.ranks:
        gather = gather_route(params, bucket, rank)
        assert (gather.sends, gather.receives) == ({}, {})
        owned = [i for i, m in enumerate(bucket.matrices) if m.owner == rank]
        assert [cargo.matrix for cargo in gather.keeps] == owned


def test_gather_under_hsdp_stays_inside_each_copy() -> None:
    params = [planned(layout_of((6, 4), (2, 2), (R, S0)), name=f"w{i}") for i in range(4)]
    (bucket,) = buckets_of(params)
    assert peers(gather_route, params, bucket) == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert len(peers(scatter_route, params, bucket)) == 12  # every owner to every other rank


def test_scatter_carries_a_shard_to_each_of_its_replicas() -> None:
    params = [planned(layout_of((6, 4), (2, 2), (R, S0)))]
    (bucket,) = buckets_of(params)
    assert bucket.matrices[0].owner == 0
    scatter = scatter_route(params, bucket, 0)
    assert {peer: [c.piece.inner for c in parcel] for peer, parcel in scatter.sends.items()} == {
        1: [((3, 6), (0, 4))],
        2: [((0, 3), (0, 4))],
        3: [((3, 6), (0, 4))],
    }


def test_gather_of_cut_momentum_comes_from_every_replica() -> None:
    params = [planned(layout_of((8, 4), (2, 2), (R, S0)), shard_momentum=True)]
    (bucket,) = buckets_of(params)
    (matrix,) = bucket.matrices
    gather = gather_route(params, bucket, matrix.owner)
    assert sorted(gather.receives) == sorted(set(bucket.ranks) - {matrix.owner})
    assert gather.numel_received() == 24


def test_staged_route_keeps_to_small_groups() -> None:
    params = [planned(layout_of((6, 4), (2, 3), (R, S0)), name=f"w{i}") for i in range(6)]
    (bucket,) = buckets_of(params, replica_route="staged")
    groups = [
        {exchanges_of(params, bucket, rank)[stage].ranks for rank in bucket.ranks}
        for stage in range(3)
    ]
    copies, replicas = {(0, 1, 2), (3, 4, 5)}, {(0, 3), (1, 4), (2, 5)}
    assert groups == [copies, copies, replicas]


def test_exchange_counts_a_header_for_each_peer() -> None:
    assert Exchange(ranks=(0, 2, 5)).header_bytes() == 2 * HEADER_BYTES
    assert Exchange(ranks=(0,)).header_bytes() == 0


def test_route_gives_empty_shards_nothing_to_do() -> None:
    """C02: a rank without rows made an exchange hang."""
    params = [planned(layout_of((1, 4), (4,), (S0,)))]
    (bucket,) = buckets_of(params)
    for rank in (1, 2, 3):
        for route in (gather_route, scatter_route):
            assert route(params, bucket, rank) == Exchange(ranks=(0, 1, 2, 3))


def test_exchange_of_a_matrix_that_lies_whole_on_one_rank_is_empty() -> None:
    params = [planned(layout_of((4, 3, 5), (4,), (S0,)))]
    (bucket,) = buckets_of(params)
    assert bucket.num_collectives == 0
    assert peers(gather_route, params, bucket) | peers(scatter_route, params, bucket) == set()


@pytest.mark.parametrize(
    ("layout", "most"),
    [
        (layout_of((17, 8), (2,), (S0,)), 8 * 8 + 8 * 8),
        (layout_of((16, 8), (4,), (S0,)), 12 * 8 * 2),
        (layout_of((17, 8), (4,), (S0,)), 12 * 8 * 2),
        (layout_of((16, 8), (2, 2), (S0, S1)), 96 * 2),
    ],
)
def test_exchange_sends_no_padding(layout: ParamLayout, most: int) -> None:
    """E03: padding in the wrong place sent four times the bytes."""
    params = [planned(layout)]
    world = World(params, numbered(params))
    (bucket,) = buckets_of(params)
    world.scatter(bucket, world.gather(bucket))
    assert world.sent <= most
