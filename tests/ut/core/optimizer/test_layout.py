# SPDX-License-Identifier: Apache-2.0
"""Regions against torch's own splitting of a tensor, without processes."""

import math
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from hyper_parallel.core.optimizer.layout import AxisPlacement, Coordinate, MeshLayout, ParamLayout
from hyper_parallel.core.optimizer.regions import (
    Box,
    Region,
    chunk_bounds,
    pieces_of,
    spans_after_cuts,
)
from hyper_parallel.core.optimizer.torch_private import StridedShard
from tests.fake_group import fake_process_group

R = AxisPlacement()
S0 = AxisPlacement(dim=0)
S1 = AxisPlacement(dim=1)
FSDP_OVER_TP = (AxisPlacement(dim=0, split_factor=2), S0)


def layout_of(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], axes: tuple[AxisPlacement, ...]
) -> ParamLayout:
    """A layout on ranks that are not their own positions: 10, 13, 16, ..."""
    ranks = tuple(10 + 3 * i for i in range(math.prod(mesh_shape)))
    return ParamLayout(shape=shape, mesh=MeshLayout(shape=mesh_shape, ranks=ranks), axes=axes)


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def coordinates(layout: ParamLayout) -> list[Coordinate]:
    return list(product(*map(range, layout.mesh.shape)))


def torch_placement(axis: AxisPlacement) -> Placement:
    if axis.dim is None:
        return Replicate()
    if axis.split_factor == 1:
        return Shard(axis.dim)
    strided: Placement = StridedShard(axis.dim, split_factor=axis.split_factor)
    return strided


def torch_local(whole: Tensor, layout: ParamLayout, coordinate: Coordinate) -> Tensor:
    """The oracle: torch's own placements, applied left to right."""
    local = whole
    for axis, size, index in zip(layout.axes, layout.mesh.shape, coordinate, strict=True):
        placement = torch_placement(axis)
        if isinstance(placement, Shard | StridedShard):
            local = placement._split_tensor(local, size, with_padding=False)[0][index]
    return local


def indices_of(region: Region) -> list[list[int]]:
    return [[i for start, stop in spans for i in range(start, stop)] for spans in region]


def select(whole: Tensor, region: Region) -> Tensor:
    """The elements that a region names, in local order."""
    for dim, indices in enumerate(indices_of(region)):
        whole = whole.index_select(dim, torch.tensor(indices, dtype=torch.long))
    return whole


def cut_out(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(start, stop) for start, stop in box)]


@st.composite
def layouts(draw: st.DrawFn, *, shortest: int = 0) -> ParamLayout:
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    shape = tuple(draw(st.lists(st.integers(shortest, 9), min_size=1, max_size=3)))
    shard = st.builds(
        AxisPlacement, dim=st.integers(0, len(shape) - 1), split_factor=st.integers(1, 3)
    )
    axes = tuple(draw(st.just(R) | shard) for _ in mesh_shape)
    return layout_of(shape, mesh_shape, axes)


@st.composite
def layouts_with_box(draw: st.DrawFn) -> tuple[ParamLayout, Box]:
    layout = draw(layouts(shortest=1))
    ends = [sorted(draw(st.tuples(*[st.integers(0, n - 1)] * 2))) for n in layout.shape]
    return layout, tuple((low, high + 1) for low, high in ends)


# Meshes and records


def test_mesh_layout_refuses_a_shape_that_its_ranks_do_not_fill() -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 2\) cannot hold 3 ranks"):
        MeshLayout(shape=(2, 2), ranks=(0, 1, 2))


def test_param_layout_refuses_another_number_of_placements_than_mesh_axes() -> None:
    with pytest.raises(ValueError, match=r"1 placements for a mesh of shape \(2, 2\)"):
        layout_of((4, 4), (2, 2), (S0,))


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (2, 1, 3), (2, 2, 2, 2)])
def test_mesh_layout_numbers_ranks_row_major(shape: tuple[int, ...]) -> None:
    mesh = MeshLayout(shape=shape, ranks=tuple(7 + 2 * i for i in range(math.prod(shape))))
    positions = list(product(*map(range, shape)))
    assert [mesh.coordinate(rank) for rank in mesh.ranks] == positions
    assert tuple(mesh.rank_at(position) for position in positions) == mesh.ranks


def test_mesh_layout_refuses_a_position_with_too_few_axes() -> None:
    with pytest.raises(ValueError, match="zip"):
        MeshLayout(shape=(2, 2), ranks=(0, 1, 2, 3)).rank_at((1,))


def test_param_layout_equals_and_hashes_by_value_whatever_it_has_cached() -> None:
    one, other = (layout_of((4, 4), (2, 2), (R, S0)) for _ in range(2))
    assert one.shard_axes == (1,)
    assert one.mesh.coordinate(13) == (0, 1)
    assert one == other
    assert hash(one) == hash(other)


def test_param_layout_says_its_placements_in_short() -> None:
    axes = (R, S1, AxisPlacement(dim=0, split_factor=3))
    assert layout_of((4, 4), (1, 2, 2), axes).placements_text() == "R S(1) S(0/3)"


def test_param_layout_does_not_count_axes_of_size_one() -> None:
    layout = layout_of((4, 4), (1, 2, 1, 3), (R, R, S0, S1))
    assert layout.replicate_axes == (1,)
    assert layout.shard_axes == (3,)
    assert (layout.num_replicas, layout.num_shards) == (2, 3)


# Regions


@pytest.mark.parametrize("num_chunks", range(1, 7))
@pytest.mark.parametrize("length", [0, 1, 2, 5, 6, 9, 13])
def test_chunk_bounds_follow_torch_chunk(length: int, num_chunks: int) -> None:
    expected = [chunk.tolist() for chunk in torch.arange(length).chunk(num_chunks)]
    expected += [[]] * (num_chunks - len(expected))
    bounds = [chunk_bounds(length, num_chunks, i) for i in range(num_chunks)]
    assert [list(range(*b)) for b in bounds] == (expected if length else [[]] * num_chunks)


CUTS = [(size, factor) for size in range(1, 5) for factor in range(1, 4)]


@pytest.mark.parametrize("length", range(10))
def test_spans_after_cuts_name_torchs_rows_for_every_small_case(length: int) -> None:
    whole = torch.arange(length)
    for cuts in [(), *((cut,) for cut in CUTS), *product(CUTS, CUTS)]:
        axes = tuple(AxisPlacement(dim=0, split_factor=factor) for _, factor in cuts)
        parts: list[tuple[Coordinate, Tensor]] = [((), whole)]
        for axis, (size, _) in zip(axes, cuts, strict=True):
            placement = torch_placement(axis)
            assert isinstance(placement, Shard | StridedShard)
            parts = [
                ((*at, i), piece)
                for at, local in parts
                for i, piece in enumerate(
                    placement._split_tensor(local, size, with_padding=False)[0]
                )
            ]
        for at, local in parts:
            numbers = tuple((n, i, f) for (n, f), i in zip(cuts, at, strict=True))
            spans = spans_after_cuts(length, numbers)
            rows = [row for span in spans for row in range(*span)]
            assert rows == local.tolist(), (length, numbers)


@given(
    length=st.integers(0, 200),
    cuts=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 8), st.integers(1, 6)), max_size=4),
)
@settings(max_examples=100)
def test_spans_after_cuts_ascend_and_are_neither_empty_nor_adjacent(
    length: int, cuts: list[tuple[int, int, int]]
) -> None:
    spans = spans_after_cuts(length, tuple((n, i % n, factor) for n, i, factor in cuts))
    assert all(start < stop for start, stop in spans)
    assert all(left[1] < right[0] for left, right in pairwise(spans))
    assert not spans or (spans[0][0] >= 0 and spans[-1][1] <= length)


@given(layout=layouts())
@settings(max_examples=100)
def test_region_names_the_elements_of_torchs_local_tensor(layout: ParamLayout) -> None:
    whole = numbered(layout.shape)
    for coordinate in coordinates(layout):
        local = torch_local(whole, layout, coordinate)
        assert torch.equal(select(whole, layout.region(coordinate)), local)
        assert layout.local_shape(coordinate) == tuple(local.shape)


@pytest.mark.parametrize(
    ("mesh_shape", "axes"),
    [
        ((4,), (S0,)),
        ((2, 2), (S0, S0)),
        ((2, 2), (R, S1)),
        ((2, 2), FSDP_OVER_TP),
        ((1, 2, 2), (S1, *FSDP_OVER_TP)),
        ((2, 1, 2), (R, S1, S0)),
    ],
)
@pytest.mark.parametrize("shape", [(8, 3), (5, 4), (3, 2), (0, 4)])
def test_region_is_what_distribute_tensor_gives_each_rank(
    mesh_shape: tuple[int, ...], axes: tuple[AxisPlacement, ...], shape: tuple[int, ...]
) -> None:
    """The oracle of the other tests, left to right, is itself what DTensor does."""
    layout = layout_of(shape, mesh_shape, axes)
    whole = numbered(shape)
    for rank, coordinate in enumerate(coordinates(layout)):
        with fake_process_group(len(layout.mesh.ranks), rank):
            mesh = init_device_mesh("cpu", mesh_shape)
            placements = [torch_placement(axis) for axis in axes]
            local = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
        assert torch.equal(select(whole, layout.region(coordinate)), local)


@pytest.mark.parametrize(
    ("num_rows", "mesh_shape", "expected"),
    [
        (5, (4,), [2, 2, 1, 0]),
        (9, (4,), [3, 3, 3, 0]),
        (3, (4,), [1, 1, 1, 0]),
        (5, (2, 2), [2, 1, 1, 1]),
        (3, (2, 2), [1, 1, 1, 0]),
    ],
)
def test_local_shape_is_uneven_and_empty_where_torch_makes_it_so(
    num_rows: int, mesh_shape: tuple[int, ...], expected: list[int]
) -> None:
    layout = layout_of((num_rows, 2), mesh_shape, (S0,) * len(mesh_shape))
    assert [layout.local_shape(c) for c in coordinates(layout)] == [(n, 2) for n in expected]


def test_region_of_fsdp_over_tensor_parallel_is_not_in_rank_order() -> None:
    """A04: gathers that join shards in rank order gave back permuted rows."""
    layout = layout_of((8, 4), (2, 2), FSDP_OVER_TP)
    rows = [indices_of(layout.region(c))[0] for c in coordinates(layout)]
    assert rows == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_region_of_a_strided_shard_may_have_several_spans() -> None:
    """Torch's own example: nine rows, two blocks, four ranks."""
    layout = layout_of((9, 1), (4,), (AxisPlacement(dim=0, split_factor=2),))
    rows = [indices_of(layout.region(c))[0] for c in coordinates(layout)]
    assert rows == [[0, 1, 5], [2, 3, 6], [4, 7], [8]]
    assert layout.region((0,))[0] == ((0, 2), (5, 6))


# Copies and replicas


@given(layout=layouts())
@settings(max_examples=60)
def test_regions_of_one_copy_hold_each_element_once(layout: ParamLayout) -> None:
    whole = numbered(layout.shape)
    for coordinate in coordinates(layout):
        held = [select(whole, layout.region(c)) for c in layout.copy_coordinates(coordinate)]
        found = torch.cat([part.flatten() for part in held]).sort().values
        assert torch.equal(found, whole.flatten())


@given(layout=layouts())
@settings(max_examples=60)
def test_copies_and_replicas_partition_the_mesh(layout: ParamLayout) -> None:
    everyone = coordinates(layout)
    assert layout.num_shards * layout.num_replicas == len(everyone)
    for coordinate in everyone:
        copy = list(layout.copy_coordinates(coordinate))
        assert coordinate in copy
        assert len(copy) == layout.num_shards
        assert copy == [c for c in everyone if layout.replica_of(c, like=coordinate)]
        covered = [c for shard_at in copy for c in layout.replica_coordinates(shard_at)]
        assert sorted(covered) == everyone
        replicas = list(layout.replica_coordinates(coordinate))
        assert coordinate in replicas
        assert {layout.region(c) for c in replicas} == {layout.region(coordinate)}


@given(layout=layouts())
@settings(max_examples=60)
def test_without_replicas_keeps_one_copy_as_it_was(layout: ParamLayout) -> None:
    for rank in layout.mesh.ranks:
        alone = layout.without_replicas(rank)
        at = layout.mesh.coordinate(rank)
        expected = tuple(layout.mesh.rank_at(c) for c in layout.copy_coordinates(at))
        assert alone.mesh.ranks == expected
        assert (alone.num_replicas, alone.num_shards) == (1, layout.num_shards)
        for member in expected:
            before = layout.region(layout.mesh.coordinate(member))
            assert alone.region(alone.mesh.coordinate(member)) == before


@given(case=layouts_with_box())
@settings(max_examples=100)
def test_holders_and_their_replicas_are_all_the_ranks_that_hold_a_box_whole(
    case: tuple[ParamLayout, Box],
) -> None:
    layout, box = case

    def holds(coordinate: Coordinate) -> bool:
        held = indices_of(layout.region(coordinate))
        return all(
            set(range(*span)) <= set(indices) for span, indices in zip(box, held, strict=True)
        )

    found = [r for c in layout.holders(box) for r in layout.replica_coordinates(c)]
    assert sorted(found) == [c for c in coordinates(layout) if holds(c)]


def test_holders_of_an_expert_are_listed_once_for_all_replicas() -> None:
    layout = layout_of((4, 6, 6), (2, 2), (R, S0))
    assert layout.holders(((1, 2), (0, 6), (0, 6))) == [(0, 0)]
    assert layout.holders(((1, 3), (0, 6), (0, 6))) == []


# Pieces


@given(case=layouts_with_box())
@settings(max_examples=100)
def test_pieces_of_one_copy_cover_a_box_once_and_say_where(case: tuple[ParamLayout, Box]) -> None:
    layout, box = case
    whole = numbered(layout.shape)
    matrix = cut_out(whole, box)
    times = torch.zeros_like(matrix)
    for coordinate in layout.copy_coordinates(coordinates(layout)[-1]):
        local = torch_local(whole, layout, coordinate)
        for piece in pieces_of(layout.region(coordinate), box):
            assert piece.numel > 0
            assert torch.equal(cut_out(local, piece.local), cut_out(matrix, piece.inner))
            assert piece.numel == cut_out(local, piece.local).numel()
            assert piece.fine == piece.local
            cut_out(times, piece.inner).add_(1)
    assert bool((times == 1).all())


@given(case=layouts_with_box())
@settings(max_examples=60)
def test_pieces_are_in_row_major_local_order(case: tuple[ParamLayout, Box]) -> None:
    layout, box = case
    for coordinate in coordinates(layout):
        places = [piece.local for piece in pieces_of(layout.region(coordinate), box)]
        assert places == sorted(set(places))


def test_pieces_of_an_empty_shard_are_none() -> None:
    layout = layout_of((5, 4), (4,), (S0,))
    assert pieces_of(layout.region((3,)), ((0, 5), (0, 4))) == ()


# Momentum cut over the replicas


@given(layout=layouts())
@settings(max_examples=100)
def test_cut_over_replicas_leaves_every_rank_a_part_of_what_it_held(layout: ParamLayout) -> None:
    finer = layout.cut_over_replicas()
    assert (finer.shape, finer.mesh) == (layout.shape, layout.mesh)
    assert set(finer.replicate_axes) <= set(layout.replicate_axes)
    for before, after in zip(layout.axes, finer.axes, strict=True):
        assert before.dim is None or before == after
    for coordinate in coordinates(layout):
        held = indices_of(layout.region(coordinate))
        kept = indices_of(finer.region(coordinate))
        assert 0 in map(len, kept) or all(map(_is_part, kept, held))


def _is_part(kept: list[int], held: list[int]) -> bool:
    return set(kept) <= set(held)


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "axes", "expected"),
    [
        ((8, 4), (4,), (R,), "S(0)"),
        ((3, 4), (4,), (R,), "S(1)"),
        ((8, 4), (2, 2), (R, S0), "S(1) S(0)"),
        ((8, 1), (2, 2), (R, S0), "S(0/2) S(0)"),
        ((6, 1), (2, 2), (R, S0), "S(1) S(0)"),
        ((8, 4), (2, 2), (S0, R), "S(0) S(0)"),
        ((8, 4), (1, 2), (R, S0), "R S(0)"),
        ((8, 4), (2,), (S0,), "S(0)"),
    ],
)
def test_cut_over_replicas_chooses_a_dim_whose_cut_comes_last_or_divides(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    axes: tuple[AxisPlacement, ...],
    expected: str,
) -> None:
    assert layout_of(shape, mesh_shape, axes).cut_over_replicas().placements_text() == expected


@given(case=layouts_with_box())
@settings(max_examples=100)
def test_pieces_of_a_finer_layout_cover_a_box_once_and_say_where(
    case: tuple[ParamLayout, Box],
) -> None:
    layout, box = case
    finer = layout.cut_over_replicas()
    whole = numbered(layout.shape)
    matrix = cut_out(whole, box)
    times = torch.zeros_like(matrix)
    for coordinate in finer.copy_coordinates(coordinates(layout)[0]):
        weight = torch_local(whole, layout, coordinate)
        momentum = torch_local(whole, finer, coordinate)
        for piece in pieces_of(layout.region(coordinate), box, finer.region(coordinate)):
            expected = cut_out(matrix, piece.inner)
            assert torch.equal(cut_out(weight, piece.local), expected)
            assert torch.equal(cut_out(momentum, piece.fine), expected)
            cut_out(times, piece.inner).add_(1)
    assert bool((times == 1).all())
