# SPDX-License-Identifier: Apache-2.0
"""Grouping by layout: every rule, every worked value, on torch's meshes and on look-alikes."""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hyper_parallel.core.optimizer.param_grouping import (
    CommParamGroup,
    ShardInfo,
    _is_no_comm_param,
    _placements_key,
    _validate_param_ndim,
    calculate_replicate_group,
    calculate_shard_group,
    extract_shard_info,
    group_parameters_by_sharding,
)
from hyper_parallel.core.optimizer.torch_private import StridedShard
from tests.fake_group import fake_process_group

MESH_2X4 = [[0, 1, 2, 3], [4, 5, 6, 7]]
MESH_2X2X2 = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)

both_kinds = pytest.mark.parametrize("kind", ["torch", "duck"])


@dataclass
class DuckPlacement:
    """A placement that owes torch nothing."""

    kind: str
    dim: int = -99
    reduce_op: str = ""

    def is_shard(self) -> bool:
        return self.kind == "shard"

    def is_replicate(self) -> bool:
        return self.kind == "replicate"

    def is_partial(self) -> bool:
        return self.kind == "partial"


def duck_mesh(ranks: Any, rank: int) -> SimpleNamespace:
    grid = torch.as_tensor(ranks)
    return SimpleNamespace(
        mesh_shape=tuple(grid.shape), rank_list=tuple(grid.flatten().tolist()), rank=rank
    )


def duck(shape: Sequence[int], placements: Sequence[Any], mesh: Any) -> SimpleNamespace:
    return SimpleNamespace(shape=tuple(shape), placements=placements, device_mesh=mesh)


def dtensor(shape: Sequence[int], placements: Sequence[Placement], mesh: DeviceMesh) -> DTensor:
    # The local tensor is a stand-in: grouping reads metadata only.
    stride = torch.empty(shape, device="meta").stride()
    local = torch.empty([0] * len(shape))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


@contextmanager
def param_on(
    kind: str, shape: Sequence[int], placements: Sequence[Placement], ranks: Any, rank: int = 0
) -> Iterator[Any]:
    """One parameter on the mesh ``ranks``, as seen by ``rank``."""
    if kind == "duck":
        yield duck(shape, placements, duck_mesh(ranks, rank))
        return
    with fake_process_group(max(int(torch.tensor(ranks).max()), rank) + 1, rank):
        yield dtensor(shape, placements, DeviceMesh("cpu", ranks))


def is_comm(param: Any) -> bool:
    no_comm, groups = group_parameters_by_sharding([param])
    assert len(no_comm) + len(groups) == 1
    return bool(groups)


# --- Number of dims -------------------------------------------------------------------------


@both_kinds
@pytest.mark.parametrize("placements", [(R, R), (S0, R), (R, S0)])
def test_one_dim_raises_whatever_the_placements(kind: str, placements: list[Placement]) -> None:
    with (
        param_on(kind, [128], placements, MESH_2X4) as param,
        pytest.raises(ValueError, match=r"at least 2 dimensions, got shape \(128,\).*AdamW"),
    ):
        group_parameters_by_sharding([param])


@pytest.mark.parametrize("read", [_validate_param_ndim, extract_shard_info])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (128,)])
def test_fewer_than_two_dims_raise_with_the_shape(read: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least 2 dimensions") as caught:
        read(duck(shape, [R], duck_mesh([0], 0)))
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize("calculate", [calculate_replicate_group, calculate_shard_group])
def test_calculating_a_group_of_a_one_dim_parameter_raises(calculate: Any) -> None:
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        calculate(duck([128], [R], duck_mesh([0], 0)))


@pytest.mark.parametrize("shape", [(1, 1), (8, 16), (0, 4), (4, 8, 16), (2, 3, 4, 5)])
def test_validate_param_ndim_accepts_matrices_and_stacks(shape: tuple[int, ...]) -> None:
    _validate_param_ndim(duck(shape, [R], duck_mesh([0], 0)))


def test_grouping_returns_nothing_when_the_last_parameter_has_one_dim() -> None:
    mesh = duck_mesh([0, 1], 0)
    params = [duck([8, 16], [S0], mesh), duck([4, 8, 16], [S0], mesh), duck([128], [R], mesh)]
    with pytest.raises(ValueError, match="at least 2 dimensions") as caught:
        group_parameters_by_sharding(params)
    assert caught.value.__notes__ == ["while grouping the parameter at index 2"]


def test_flat_parameter_of_fsdp1_is_refused_with_the_way_out() -> None:
    """A21: a flattened shard looks like a bias; silence would hand every matrix to AdamW."""
    with pytest.raises(ValueError, match="shard the model with fully_shard"):
        group_parameters_by_sharding([nn.Parameter(torch.empty(1_500_000, device="meta"))])


# --- What is read from a parameter ----------------------------------------------------------


@both_kinds
def test_extract_shard_info_gives_the_fields_of_the_contract(kind: str) -> None:
    with param_on(kind, [4, 8, 16], [R, S2], MESH_2X4) as param:
        info = extract_shard_info(param)
        assert [field.name for field in fields(info)] == [
            "tensor_ndim",
            "placements",
            "device_mesh",
            "shard_dims",
            "replicate_mesh_dims",
        ]
        assert info.tensor_ndim == 3
        assert list(info.placements) == [R, S2]
        assert info.device_mesh is param.device_mesh
        assert info.shard_dims == {2}
        assert info.replicate_mesh_dims == [0]


@both_kinds
@pytest.mark.parametrize(
    ("placements", "shard_dims", "replicate_mesh_dims"),
    [
        ([R, R, R], set(), [0, 1, 2]),
        ([S0, R, S1], {0, 1}, [1]),
        ([S1, S1, S1], {1}, []),
        ([S0, S1, S2], {0, 1, 2}, []),
        ([Partial(), R, S2], {2}, [1]),
        ([StridedShard(1, split_factor=2), R, S1], {1}, [1]),
    ],
)
def test_extract_shard_info_reads_every_axis(
    kind: str,
    placements: list[Placement],
    shard_dims: set[int],
    replicate_mesh_dims: list[int],
) -> None:
    with param_on(kind, [4, 8, 16], placements, MESH_2X2X2) as param:
        info = extract_shard_info(param)
        assert info.shard_dims == shard_dims
        assert info.replicate_mesh_dims == replicate_mesh_dims


@pytest.mark.parametrize("calculate", [extract_shard_info, calculate_replicate_group])
def test_plain_tensor_raises_a_type_error_that_says_what_to_do(calculate: Any) -> None:
    """A05: the local tensor of a shard must not pass for the parameter itself."""
    with (
        param_on("torch", [6, 10], [S0, S1], [[0, 1], [2, 3]]) as param,
        pytest.raises(TypeError, match=r"Tensor of shape \(0, 0\) is not a DTensor.*fully_shard"),
    ):
        calculate(param.to_local())


def test_grouping_refuses_a_plain_parameter_and_tells_its_index() -> None:
    params = [duck([8, 16], [S0], duck_mesh([0], 0)), nn.Parameter(torch.empty(4, 4))]
    with pytest.raises(TypeError, match=r"Parameter of shape \(4, 4\)") as caught:
        group_parameters_by_sharding(params)
    assert caught.value.__notes__ == ["while grouping the parameter at index 1"]


@pytest.mark.parametrize("dim", [2, 5, -3])
@pytest.mark.parametrize("make", [Shard, lambda dim: StridedShard(dim, split_factor=2)])
def test_shard_dim_out_of_range_raises_with_shape_and_placement(make: Any, dim: int) -> None:
    param = duck([8, 16], [make(dim)], duck_mesh([0, 1], 0))
    with pytest.raises(ValueError, match=rf"dim={dim}\b.*out of range.*\(8, 16\)"):
        extract_shard_info(param)


@pytest.mark.parametrize("placement", [Placement(), object(), "Shard(0)", None])
def test_unknown_placement_raises_a_type_error(placement: object) -> None:
    with pytest.raises(TypeError, match="unknown placement"):
        extract_shard_info(duck([8, 16], [placement], duck_mesh([0, 1], 0)))


@both_kinds
def test_negative_shard_dim_counts_from_the_end(kind: str) -> None:
    with param_on(kind, [4, 8, 16], [R, Shard(-1)], MESH_2X4, rank=2) as param:
        assert extract_shard_info(param).shard_dims == {2}
        assert is_comm(param)
        assert calculate_replicate_group(param) == [2, 6]


def test_negative_leading_shard_dim_needs_no_communication() -> None:
    assert not is_comm(duck([4, 8, 16], [Shard(-3)], duck_mesh([0, 1], 0)))


def test_negative_and_positive_spelling_share_a_group() -> None:
    mesh = duck_mesh([0, 1], 0)
    params = [duck([8, 16], [Shard(dim)], mesh) for dim in (-1, 1, 0, -2)]
    _, groups = group_parameters_by_sharding(params)
    assert [group.params for group in groups] == [params[:2], params[2:]]


# --- Who needs communication ----------------------------------------------------------------


@both_kinds
@pytest.mark.parametrize(
    ("shape", "placements", "comm"),
    [
        ([8, 16], [R, R], False),
        ([8, 16], [S0, R], True),
        ([8, 16], [R, S1], True),
        ([4, 8, 16], [S0, R], False),
        ([4, 8, 16], [R, S2], True),
        ([4, 8, 16], [R, S1], True),
        # Several axes: one in the last two dims is enough.
        ([4, 8, 16], [S0, S1], True),
        ([4, 8, 16], [S0, S0], False),
        ([8, 16], [S0, S1], True),
        # More dims, the same rule.
        ([2, 4, 8, 16], [S0, S1], False),
        ([2, 4, 8, 16], [S0, S2], True),
        ([2, 4, 8, 16], [Shard(3), R], True),
        ([4, 8, 16], [R, R], False),
    ],
)
def test_last_two_dims_decide(
    kind: str, shape: list[int], placements: list[Placement], comm: bool
) -> None:
    with param_on(kind, shape, placements, MESH_2X4) as param:
        assert is_comm(param) is comm
        assert _is_no_comm_param(extract_shard_info(param)) is not comm


@pytest.mark.parametrize(
    ("ndim", "shard_dims", "no_comm"),
    [(2, set(), True), (2, {0}, False), (3, {0}, True), (3, {0, 1}, False), (5, {0, 1, 2}, True)],
)
def test_is_no_comm_param_reads_the_record_alone(
    ndim: int, shard_dims: set[int], no_comm: bool
) -> None:
    assert _is_no_comm_param(ShardInfo(ndim, [], None, shard_dims, [])) is no_comm


@both_kinds
def test_partial_does_not_make_a_parameter_comm(kind: str) -> None:
    with param_on(kind, [8, 16], [Partial(), R], MESH_2X4) as param:
        assert not is_comm(param)


@pytest.mark.parametrize("shape", [[8, 16], [4, 8, 6]])
@both_kinds
def test_strided_shard_is_sharded_and_never_a_replica(kind: str, shape: list[int]) -> None:
    """A03: in torch 2.13 ``is_shard()`` of a strided shard is false."""
    dim = len(shape) - 2
    layout = [StridedShard(dim, split_factor=2), Shard(dim)]
    with param_on(kind, shape, layout, [[0, 1], [2, 3]], rank=1) as param:
        info = extract_shard_info(param)
        assert info.shard_dims == {dim}
        assert info.replicate_mesh_dims == []
        assert is_comm(param)
        assert calculate_replicate_group(param) == [1]
        assert calculate_shard_group(param) == [0, 1, 2, 3]


def test_strided_shard_of_a_batch_dim_is_no_comm() -> None:
    layout = [StridedShard(0, split_factor=2), S0]
    assert not is_comm(duck([4, 8, 16], layout, duck_mesh([[0, 1], [2, 3]], 0)))


def test_strided_shards_with_other_split_factors_do_not_share_a_group() -> None:
    """A03: the same rows lie on other ranks."""
    mesh = duck_mesh([[0, 1], [2, 3]], 0)
    params = [duck([8, 16], [StridedShard(0, split_factor=f), S0], mesh) for f in (2, 4, 2)]
    params.append(duck([8, 16], [S0, S0], mesh))
    _, groups = group_parameters_by_sharding(params)
    assert [len(group.params) for group in groups] == [2, 1, 1]


# --- Replicate and shard groups -------------------------------------------------------------


@both_kinds
@pytest.mark.parametrize(
    ("shape", "ranks", "rank", "placements", "replicate_group", "shard_group"),
    [
        ([8, 16], MESH_2X4, 2, [R, S1], [2, 6], [0, 1, 2, 3]),
        ([8, 16], MESH_2X4, 2, [S0, S1], [2], [0, 1, 2, 3, 4, 5, 6, 7]),
        ([8, 16], MESH_2X4, 2, [S0, R], [0, 1, 2, 3], [2, 6]),
        ([8, 16], MESH_2X4, 6, [S0, R], [4, 5, 6, 7], [2, 6]),
        ([8, 16], MESH_2X4, 2, [R, R], [0, 1, 2, 3, 4, 5, 6, 7], [2]),
        ([8, 16], MESH_2X2X2, 0, [R, R, S1], [0, 2, 4, 6], [0, 1]),
        ([8, 16], MESH_2X2X2, 3, [R, R, S1], [1, 3, 5, 7], [2, 3]),
        ([8, 16], MESH_2X2X2, 5, [R, S0, R], [0, 1, 4, 5], [5, 7]),
        ([4, 8, 16], MESH_2X2X2, 5, [S0, S1, S2], [5], [0, 1, 2, 3, 4, 5, 6, 7]),
        # A partial axis is no replica, and the value is the sum over it.
        ([8, 16], MESH_2X4, 2, [Partial(), S1], [2], [0, 1, 2, 3, 4, 5, 6, 7]),
        ([8, 16], MESH_2X4, 2, [R, Partial("avg")], [2, 6], [0, 1, 2, 3]),
    ],
)
def test_groups_have_the_worked_values(
    kind: str,
    shape: list[int],
    ranks: Any,
    rank: int,
    placements: list[Placement],
    replicate_group: list[int],
    shard_group: list[int],
) -> None:
    with param_on(kind, shape, placements, ranks, rank) as param:
        assert calculate_replicate_group(param) == replicate_group
        assert calculate_shard_group(param) == shard_group


@both_kinds
def test_groups_reuse_a_given_shard_info(kind: str) -> None:
    with param_on(kind, [8, 16], [R, S1], MESH_2X4, rank=2) as param:
        info = extract_shard_info(param)
        assert calculate_replicate_group(param, info) == [2, 6]
        assert calculate_replicate_group(param, shard_info=info) == [2, 6]
        assert calculate_shard_group(param, shard_info=info) == [0, 1, 2, 3]


@both_kinds
@pytest.mark.parametrize(
    ("ranks", "rank", "replicate_group", "shard_group"),
    [
        ([[6, 2], [1, 5]], 2, [2, 5], [2, 6]),  # permuted
        ([[6, 2], [1, 5]], 1, [1, 6], [1, 5]),
        ([[1, 3], [5, 7]], 7, [3, 7], [5, 7]),  # every second rank
        ([[4, 5, 6, 7]], 5, [5], [4, 5, 6, 7]),  # the upper half
    ],
)
def test_groups_follow_permuted_and_sliced_meshes(
    kind: str, ranks: Any, rank: int, replicate_group: list[int], shard_group: list[int]
) -> None:
    with param_on(kind, [8, 16], [R, S0], ranks, rank) as param:
        assert calculate_replicate_group(param) == replicate_group
        assert calculate_shard_group(param) == shard_group


def test_groups_on_slices_of_a_torch_mesh_stay_in_the_slice() -> None:
    with fake_process_group(8, rank=6):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        on_tp = dtensor([8, 16], [S1], mesh["tp"])
        on_both = dtensor([8, 16], [R, S1], mesh["dp", "tp"])
        on_flat = dtensor([8, 16], [S0], mesh["pp", "dp"]._flatten("world"))
        assert calculate_shard_group(on_tp) == [6, 7]
        assert calculate_replicate_group(on_both) == [4, 6]
        assert calculate_shard_group(on_both) == [6, 7]
        assert calculate_shard_group(on_flat) == [0, 2, 4, 6]


@pytest.mark.parametrize("rank", range(6))
def test_torch_and_duck_meshes_agree(rank: int) -> None:
    ranks = [[5, 0, 3], [2, 4, 1]]
    with fake_process_group(6, rank):
        mesh = DeviceMesh("cpu", ranks)
        at = mesh.get_coordinate()
        assert at is not None
        assert ranks[at[0]][at[1]] == rank
        for placements in itertools.product([R, S0, S1, Partial()], repeat=2):
            param = dtensor([8, 16], placements, mesh)
            twin = duck([8, 16], placements, duck_mesh(ranks, rank))
            assert calculate_replicate_group(param) == calculate_replicate_group(twin)
            assert calculate_shard_group(param) == calculate_shard_group(twin)


@pytest.mark.parametrize("read", [calculate_replicate_group, calculate_shard_group, is_comm])
@pytest.mark.parametrize("placement", [R, S0])
@both_kinds
def test_mesh_without_this_rank_raises_with_rank_and_mesh(
    kind: str, placement: Placement, read: Any
) -> None:
    """B05: outside its mesh a parameter has no coordinate and a local tensor of shape (0,)."""
    with (
        param_on(kind, [4, 4], [placement], [0, 2], rank=1) as param,
        pytest.raises(ValueError, match=r"rank 1 is not in the mesh of shape \(2,\).*\[0, 2\]"),
    ):
        read(param)


def test_error_about_a_large_mesh_stays_short() -> None:
    param = duck([4, 4], [S0], duck_mesh(range(4096), 5000))
    with pytest.raises(ValueError, match="rank 5000 is not in the mesh") as caught:
        calculate_replicate_group(param)
    assert len(str(caught.value)) < 200


@both_kinds
def test_mesh_with_two_axes_one_of_size_one_is_an_ordinary_mesh(kind: str) -> None:
    """B05: ``get_group()`` without an axis raises on such a mesh; grouping never asks for it."""
    with param_on(kind, [4, 4], [S0, R], [[0], [1]], rank=1) as param:
        assert calculate_replicate_group(param) == [1]
        assert calculate_shard_group(param) == [0, 1]


@both_kinds
@pytest.mark.parametrize(
    ("ranks", "placements", "replicate_group", "shard_group"),
    [
        ([0], [S0], [0], [0]),
        ([0], [R], [0], [0]),
        ([[0]], [R, S1], [0], [0]),
        ([[0, 1]], [S0, R], [0, 1], [0]),
        ([[0, 1]], [R, S0], [0], [0, 1]),
        ([[0], [1]], [R, S0], [0, 1], [0]),
    ],
)
def test_axis_of_size_one_adds_neither_replica_nor_shard(
    kind: str,
    ranks: Any,
    placements: list[Placement],
    replicate_group: list[int],
    shard_group: list[int],
) -> None:
    """C13: one replica, one shard and a world of one rank are ordinary cases."""
    with param_on(kind, [4, 4], placements, ranks) as param:
        assert calculate_replicate_group(param) == replicate_group
        assert calculate_shard_group(param) == shard_group


def test_number_of_placements_must_match_the_mesh() -> None:
    param = duck([4, 4], [S0], duck_mesh([[0, 1], [2, 3]], 0))
    for read in (calculate_replicate_group, calculate_shard_group, is_comm):
        with pytest.raises(ValueError, match=r"do not fit a mesh of shape \(2, 2\)"):
            read(param)


def test_rank_list_must_fill_the_mesh_shape() -> None:
    mesh = SimpleNamespace(mesh_shape=(2, 4), rank_list=range(6), rank=0)
    with pytest.raises(ValueError, match=r"shape \(2, 4\) cannot have 6 ranks"):
        calculate_replicate_group(duck([8, 16], [S0, R], mesh))


mesh_shapes = st.lists(st.integers(1, 3), min_size=1, max_size=3)
placements_of_matrices = st.sampled_from(
    [R, S0, S1, Shard(-1), Partial(), StridedShard(0, split_factor=2)]
)


@given(st.data())
def test_groups_partition_the_mesh(data: st.DataObject) -> None:
    shape = data.draw(mesh_shapes)
    size = math.prod(shape)
    pool = data.draw(st.permutations(range(2 * size)))  # with gaps, in any arrangement
    grid = torch.tensor(pool[:size]).view(shape)
    placements = data.draw(
        st.lists(placements_of_matrices, min_size=len(shape), max_size=len(shape))
    )
    replicate_groups, shard_groups = {}, {}
    for rank in pool[:size]:
        param = duck([12, 12], placements, duck_mesh(grid, rank))
        replicate_groups[rank] = calculate_replicate_group(param)
        shard_groups[rank] = calculate_shard_group(param)
    for rank in pool[:size]:
        mine, parts = replicate_groups[rank], shard_groups[rank]
        assert mine == sorted(mine)
        assert parts == sorted(parts)
        assert set(mine) & set(parts) == {rank}
        # Membership is mutual, so the groups of all ranks partition the mesh.
        assert all(replicate_groups[other] == mine for other in mine)
        assert all(shard_groups[other] == parts for other in parts)
        # Replicas of my parts are all ranks, each once.
        reached = [other for part in parts for other in replicate_groups[part]]
        assert sorted(reached) == sorted(pool[:size])


@given(st.data())
def test_groups_are_true_of_the_data(data: st.DataObject) -> None:
    """The replicate group holds equal pieces; the pieces of the shard group make the whole."""
    shape = data.draw(mesh_shapes)
    ranks = data.draw(st.permutations(range(math.prod(shape))))
    placements = data.draw(
        st.lists(st.sampled_from([R, S0, S1]), min_size=len(shape), max_size=len(shape))
    )
    coordinates = list(itertools.product(*map(range, shape)))
    pieces = {}
    for rank, coordinate in zip(ranks, coordinates, strict=True):
        piece = torch.arange(27 * 27).view(27, 27)  # large enough that no piece is empty
        for placement, at, size in zip(placements, coordinate, shape, strict=True):
            if isinstance(placement, Shard):
                piece = piece.tensor_split(size, placement.dim)[at]
        pieces[rank] = frozenset(piece.flatten().tolist())
    for rank in ranks:
        param = duck([27, 27], placements, duck_mesh(torch.tensor(ranks).view(shape), rank))
        holders = [other for other in sorted(ranks) if pieces[other] == pieces[rank]]
        assert calculate_replicate_group(param) == holders
        parts = [pieces[other] for other in calculate_shard_group(param)]
        assert sum(map(len, parts)) == 27 * 27
        assert frozenset().union(*parts) == frozenset(range(27 * 27))


# --- Keys -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "key"),
    [
        (S0, ("Shard", 0)),
        (S1, ("Shard", 1)),
        (R, ("Replicate",)),
        (Partial(), ("Partial", "sum")),
        (Partial("avg"), ("Partial", "avg")),
        (StridedShard(0, split_factor=2), ("StridedShard", 0, 2)),
        (StridedShard(1, split_factor=4), ("StridedShard", 1, 4)),
        (DuckPlacement("shard", dim=3), ("Shard", 3)),
        (DuckPlacement("replicate"), ("Replicate",)),
        (DuckPlacement("partial", reduce_op="max"), ("Partial", "max")),
    ],
)
def test_placements_key_spells_each_kind(placement: object, key: tuple[object, ...]) -> None:
    assert _placements_key([placement]) == (key,)


def test_placements_key_is_hashable_and_keeps_the_order_of_axes() -> None:
    key = _placements_key([S0, R, Partial()])
    assert key == (("Shard", 0), ("Replicate",), ("Partial", "sum"))
    assert hash(key) == hash(_placements_key((Shard(0), Replicate(), Partial())))
    assert key != _placements_key([R, S0, Partial()])


def test_partials_with_other_reductions_do_not_share_a_group() -> None:
    mesh = duck_mesh([[0, 1], [2, 3]], 0)
    params = [duck([8, 16], [Partial(op), S0], mesh) for op in ("sum", "avg", "sum")]
    _, groups = group_parameters_by_sharding(params)
    assert [len(group.params) for group in groups] == [2, 1]


def test_duck_placements_are_grouped_like_torch_placements() -> None:
    mesh = duck_mesh(MESH_2X4, 2)
    theirs = duck([8, 16], [DuckPlacement("replicate"), DuckPlacement("shard", dim=1)], mesh)
    ours = duck([8, 16], [R, S1], mesh)
    no_comm, groups = group_parameters_by_sharding([theirs, ours])
    assert not no_comm
    assert [group.params for group in groups] == [[theirs, ours]]
    assert groups[0].replicate_group == [2, 6]


def test_duck_strided_shard_that_answers_is_shard_keeps_its_split_factor() -> None:
    strided = SimpleNamespace(is_shard=lambda: True, dim=0, split_factor=2)
    assert _placements_key([strided]) == (("StridedShard", 0, 2),)


def test_mocks_serve_as_parameters() -> None:
    shard, replicate = MagicMock(), MagicMock()
    shard.is_shard.return_value, shard.is_replicate.return_value, shard.dim = True, False, 1
    replicate.is_shard.return_value, replicate.is_replicate.return_value = False, True
    param = MagicMock()
    param.shape, param.placements = (8, 16), [replicate, shard]
    param.device_mesh.mesh_shape = (2, 4)
    param.device_mesh.rank_list = list(range(8))
    param.device_mesh.rank = 2
    assert _placements_key(param.placements) == (("Replicate",), ("Shard", 1))
    assert calculate_replicate_group(param) == [2, 6]
    assert is_comm(param)


# --- Grouping -------------------------------------------------------------------------------


def test_grouping_nothing_gives_nothing() -> None:
    assert group_parameters_by_sharding([]) == ([], [])


def test_grouping_takes_any_iterable_once() -> None:
    mesh = duck_mesh([0, 1], 0)
    no_comm, groups = group_parameters_by_sharding(duck([4, 4], [p], mesh) for p in (R, S0, S0))
    assert len(no_comm) == 1
    assert [len(group.params) for group in groups] == [2]


@both_kinds
def test_grouping_keeps_the_order_of_first_appearance(kind: str) -> None:
    make: Any = duck if kind == "duck" else dtensor
    with fake_process_group(8, rank=2) if kind == "torch" else nullcontext():
        mesh: Any = duck_mesh(MESH_2X4, 2) if kind == "duck" else DeviceMesh("cpu", MESH_2X4)
        layouts = [[R, S1], [R, R], [S0, R], [R, S1], [R, R], [S0, S1], [S0, R]]
        params = [make([8, 16], layout, mesh) for layout in layouts]
        no_comm, groups = group_parameters_by_sharding(params)
        assert [id(p) for p in no_comm] == [id(params[1]), id(params[4])]
        assert [[id(p) for p in group.params] for group in groups] == [
            [id(params[0]), id(params[3])],
            [id(params[2]), id(params[6])],
            [id(params[5])],
        ]
        assert [group.replicate_group for group in groups] == [[2, 6], [0, 1, 2, 3], [2]]


def test_group_has_the_fields_of_the_contract() -> None:
    param = duck([8, 16], [R, S1], duck_mesh(MESH_2X4, 2))
    _, (group,) = group_parameters_by_sharding([param])
    assert [field.name for field in fields(CommParamGroup)] == [
        "params",
        "shard_info",
        "replicate_group",
    ]
    assert group == CommParamGroup([param], extract_shard_info(param), [2, 6])


def test_shape_does_not_split_a_group_but_ndim_does() -> None:
    mesh = duck_mesh([0, 1], 0)
    params = [duck(shape, [S1], mesh) for shape in ([8, 16], [4, 4], [4, 8, 16])]
    _, groups = group_parameters_by_sharding(params)
    assert [group.params for group in groups] == [params[:2], params[2:]]
    assert [group.shard_info.tensor_ndim for group in groups] == [2, 3]


def test_equal_but_distinct_torch_meshes_share_a_group() -> None:
    with fake_process_group(4, rank=1):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        slices = [mesh["tp"], mesh["tp"], DeviceMesh("cpu", [0, 1])]
        assert len({id(part) for part in slices}) == 3
        _, groups = group_parameters_by_sharding([dtensor([8, 16], [S0], m) for m in slices])
        assert [len(group.params) for group in groups] == [3]


def test_equal_but_distinct_duck_meshes_share_a_group() -> None:
    params = [duck([8, 16], [S0, R], duck_mesh(MESH_2X4, 2)) for _ in range(3)]
    _, groups = group_parameters_by_sharding(params)
    assert [len(group.params) for group in groups] == [3]


def test_meshes_made_anew_at_each_access_are_not_confused() -> None:
    """The id of a mesh that is gone may come back as that of another one."""

    class Fresh:
        shape, placements = (8, 16), (S0,)

        def __init__(self, ranks: Sequence[int]) -> None:
            self.ranks = ranks

        @property
        def device_mesh(self) -> SimpleNamespace:
            return SimpleNamespace(mesh_shape=(2,), rank_list=self.ranks, rank=0)

    peers = torch.randint(1, 6, [500]).tolist()
    _, groups = group_parameters_by_sharding([Fresh([0, peer]) for peer in peers])
    assert len(groups) == 5
    for group in groups:
        assert len({param.ranks[1] for param in group.params}) == 1


@both_kinds
def test_parameters_of_different_meshes_never_share_a_group(kind: str) -> None:
    """C10: dense, tensor-parallel and expert meshes live side by side in one model."""
    make: Any = duck if kind == "duck" else dtensor
    with fake_process_group(4, rank=1) if kind == "torch" else nullcontext():
        grids = [[0, 1], [1, 3], [1, 0], [0, 1, 2, 3]]  # tp, dp, tp reversed, flat
        meshes: list[Any] = [
            duck_mesh(grid, 1) if kind == "duck" else DeviceMesh("cpu", grid) for grid in grids
        ]
        params = [make([4, 4], [S0], mesh) for mesh in meshes * 2]
        _, groups = group_parameters_by_sharding(params)
        assert [[id(p) for p in group.params] for group in groups] == [
            [id(params[at]), id(params[at + 4])] for at in range(4)
        ]


def test_same_ranks_in_another_mesh_shape_are_another_mesh() -> None:
    """C10: the same placements cut a 2x4 and a 4x2 mesh differently."""
    params = [
        duck([8, 16], [R, S0], duck_mesh(torch.arange(8).view(shape), 2))
        for shape in ((2, 4), (4, 2))
    ]
    _, groups = group_parameters_by_sharding(params)
    assert [group.replicate_group for group in groups] == [[2, 6], [0, 2, 4, 6]]


def test_every_rank_finds_the_same_groups() -> None:
    layouts: list[list[Placement]] = [[S1, R], [R, R], [S0, S1], [S1, R], [R, S0], [S0, S1]]
    found = set()
    for rank in range(8):
        params = [duck([8, 16], layout, duck_mesh(MESH_2X4, rank)) for layout in layouts]
        no_comm, groups = group_parameters_by_sharding(params)
        number = {id(param): index for index, param in enumerate(params)}
        sorted_params = [no_comm, *(group.params for group in groups)]
        found.add(str([[number[id(param)] for param in part] for part in sorted_params]))
    assert found == {"[[1], [0, 3], [2, 5], [4]]"}


# --- Real models on torch's meshes ----------------------------------------------------------


def mlp(device: str = "cpu") -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 8, bias=False, device=device), nn.Linear(8, 4, bias=False, device=device)
    )


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 8, 16))


def test_fsdp_parameters_share_one_group_of_one_replica() -> None:
    with fake_process_group(4, rank=3):
        model = mlp()
        for layer in model:
            fully_shard(layer, mesh=init_device_mesh("cpu", (4,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        no_comm, groups = group_parameters_by_sharding(model.parameters())
        assert not no_comm
        assert [len(group.params) for group in groups] == [2]
        assert groups[0].replicate_group == [3]
        assert calculate_shard_group(model[0].weight) == [0, 1, 2, 3]


def test_the_usage_example_sorts_a_model_with_biases() -> None:
    with fake_process_group(2):
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        muon_params = [p for p in model.parameters() if len(p.shape) >= 2]
        adamw_params = [p for p in model.parameters() if len(p.shape) < 2]
        no_comm, groups = group_parameters_by_sharding(muon_params)
        assert not no_comm
        assert [len(group.params) for group in groups] == [1]
        with pytest.raises(ValueError, match="AdamW"):
            group_parameters_by_sharding(adamw_params)


def test_hsdp_replicates_over_the_first_axis() -> None:
    with fake_process_group(8, rank=2):
        model = mlp()
        axes = ("dp_replicate", "dp_shard")
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=axes))
        no_comm, groups = group_parameters_by_sharding(model.parameters())
        assert not no_comm
        assert [(len(group.params), group.replicate_group) for group in groups] == [(2, [2, 6])]
        assert calculate_shard_group(model[0].weight) == [0, 1, 2, 3]


def test_tensor_parallel_colwise_and_rowwise_are_two_groups() -> None:
    with fake_process_group(4, rank=2):
        model = mlp()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tensor_parallel(model, mesh["tp"])
        _, groups = group_parameters_by_sharding(model.parameters())
        assert [group.shard_info.shard_dims for group in groups] == [{0}, {1}]
        assert [group.replicate_group for group in groups] == [[2], [2]]
        assert calculate_shard_group(model[0].weight) == [2, 3]


def test_fsdp_over_tensor_parallel_shards_both_axes() -> None:
    """A03: the colwise weight is (StridedShard(0), Shard(0)), and no axis of it is replicated."""
    with fake_process_group(4, rank=2):
        model = mlp()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tensor_parallel(model, mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])
        no_comm, (colwise, rowwise) = group_parameters_by_sharding(model.parameters())
        assert not no_comm
        assert _placements_key(colwise.shard_info.placements) == (
            ("StridedShard", 0, 2),
            ("Shard", 0),
        )
        assert _placements_key(rowwise.shard_info.placements) == (("Shard", 0), ("Shard", 1))
        for weight in model.parameters():
            assert calculate_replicate_group(weight) == [2]
            assert calculate_shard_group(weight) == [0, 1, 2, 3]


def test_hsdp_over_tensor_parallel_keeps_the_replicate_axis() -> None:
    """A03: of three axes only the first holds replicas."""
    with fake_process_group(8, rank=5):
        model = mlp()
        names = ("dp_replicate", "dp_shard", "tp")
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
        tensor_parallel(model, mesh["tp"])
        fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])
        _, groups = group_parameters_by_sharding(model.parameters())
        assert [group.replicate_group for group in groups] == [[1, 5], [1, 5]]
        assert calculate_shard_group(model[0].weight) == [4, 5, 6, 7]


@pytest.mark.parametrize(("dim", "comm"), [(0, False), (1, True), (2, True)])
def test_expert_stack_needs_communication_only_inside_the_matrices(dim: int, comm: bool) -> None:
    with fake_process_group(2):
        model = Experts()
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: Shard(dim))
        assert is_comm(model.weight) is comm


@pytest.mark.parametrize("rank", range(4))
def test_groups_come_from_the_global_shape_when_local_shards_are_empty(rank: int) -> None:
    """A05: 3 rows on 4 ranks leave rank 3 without a row, and its groups are those of all."""
    with fake_process_group(4, rank):
        model = nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(3, 1, bias=False))
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        first = model[0].weight
        assert isinstance(first, DTensor)
        assert first.to_local().shape == (1 if rank < 3 else 0, 5)
        no_comm, groups = group_parameters_by_sharding(model.parameters())
        assert not no_comm
        assert [len(group.params) for group in groups] == [2]
        assert groups[0].shard_info.shard_dims == {0}


def test_meta_parameters_are_grouped_by_their_shape() -> None:
    """A21: a model on the meta device has its shapes, and is grouped like any other."""
    with fake_process_group(2):
        model = mlp(device="meta")
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        with torch.device("meta"):
            _, groups = group_parameters_by_sharding(model.parameters())
        assert [len(group.params) for group in groups] == [2]
        assert groups[0].replicate_group == [0]


# --- Size -----------------------------------------------------------------------------------


@both_kinds
def test_thousand_parameters_on_4096_ranks_take_less_than_a_second(kind: str) -> None:
    layouts = [[R, R, S0], [S0, R, S1], [R, S0, S1], [S0, S1, R]]
    make: Any = duck if kind == "duck" else dtensor
    with fake_process_group(4096, rank=1234) if kind == "torch" else nullcontext():
        grid = torch.arange(4096).view(16, 16, 16)
        meshes: list[Any] = [
            duck_mesh(grid, 1234) if kind == "duck" else DeviceMesh("cpu", grid) for _ in range(4)
        ]
        params = [make([64, 64], layouts[i // 4 % 4], meshes[i % 4]) for i in range(1000)]
        start = time.process_time()
        no_comm, groups = group_parameters_by_sharding(params)
        elapsed = time.process_time() - start
        assert not no_comm
        assert [len(group.replicate_group) for group in groups] == [256, 16, 16, 16]
        assert sum(len(group.params) for group in groups) == 1000
        assert elapsed < 1


# --- The fake process group -----------------------------------------------------------------


def test_fake_process_group_is_one_rank_of_a_world_and_leaves_nothing_behind() -> None:
    with fake_process_group(512, rank=7):
        assert (dist.get_rank(), dist.get_world_size()) == (7, 512)
    assert not dist.is_initialized()


def test_fake_process_group_is_destroyed_when_the_block_raises() -> None:
    with pytest.raises(RuntimeError, match="inside"), fake_process_group(2):
        raise RuntimeError("inside")
    assert not dist.is_initialized()
