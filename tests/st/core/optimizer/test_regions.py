# SPDX-License-Identifier: Apache-2.0
"""Regions against torch on real ranks: what a rank holds, element for element."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from hyper_parallel.core.optimizer.dtensor_layout import LayoutReader
from hyper_parallel.core.optimizer.regions import Region
from hyper_parallel.core.optimizer.torch_private import StridedShard
from tests.pool import Pools

pytestmark = pytest.mark.dist

MESHES: dict[str, tuple[int, list[int] | None, tuple[int, ...]]] = {
    "3": (3, None, (3,)),
    "4": (4, None, (4,)),
    "2x2": (4, None, (2, 2)),
    "2x2 transposed": (4, [0, 2, 1, 3], (2, 2)),
    "1x4": (4, None, (1, 4)),
    "2x3": (6, None, (2, 3)),
    "2x2x2": (8, None, (2, 2, 2)),
    "2x1x2x2": (8, None, (2, 1, 2, 2)),
}


def all_placements(mesh_shape: tuple[int, ...]) -> Iterator[tuple[Placement, ...]]:
    """Every mixture of replicas and shards, and strided shards over what cuts the dim later."""
    for words in product((None, 0, 1), repeat=len(mesh_shape)):
        plain = [Replicate() if dim is None else Shard(dim) for dim in words]
        yield tuple(plain)
        for i, dim in enumerate(words):
            later = 1
            for size, other in zip(mesh_shape[i + 1 :], words[i + 1 :], strict=True):
                later *= size if dim is not None and other == dim else 1
            if later > 1 and dim is not None:
                strided: list[Placement] = list(plain)
                strided[i] = StridedShard(dim, split_factor=later)
                yield tuple(strided)


def values_at(region: Region, whole: torch.Tensor) -> torch.Tensor:
    for dim, spans in enumerate(region):
        index = [i for start, stop in spans for i in range(start, stop)]
        whole = whole.index_select(dim, torch.tensor(index, dtype=torch.long))
    return whole


def compare(mesh_ranks: list[int] | None, mesh_shape: tuple[int, ...], rows: range) -> int:
    order = mesh_ranks or list(range(dist.get_world_size()))
    mesh = DeviceMesh("cpu", torch.tensor(order).view(mesh_shape))
    reader = LayoutReader(dist.get_rank())
    count = 0
    for num_rows, num_cols in product(rows, (1, 3)):
        whole = torch.arange(num_rows * num_cols, dtype=torch.float32).view(num_rows, num_cols)
        for placements in all_placements(mesh_shape):
            tensor = distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)
            layout = reader.read(tensor, "w")
            coordinate = layout.mesh.coordinate(dist.get_rank())
            due = values_at(layout.region(coordinate), whole)
            assert torch.equal(tensor.to_local(), due), (placements, whole.shape)
            assert tuple(tensor.to_local().shape) == layout.local_shape(coordinate)
            count += 1
    return count


@pytest.mark.parametrize("name", MESHES)
def test_a_region_is_what_torch_places_there(ranks: Pools, name: str) -> None:
    """A04, A05, C01, C02: uneven, empty, strided and transposed, on meshes of one to four axes."""
    world_size, mesh_ranks, mesh_shape = MESHES[name]
    rows = range(6) if len(mesh_shape) < 4 else range(3, 6)
    counts = ranks.run(world_size, compare, mesh_ranks, mesh_shape, rows)
    assert counts[0] >= 12


def scattered_and_gathered(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
    """The same through torch's own scatter and its own gather, which do communicate."""
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()).view(mesh_shape))
    reader = LayoutReader(dist.get_rank())
    for num_rows in (1, 3, 5, 8, 9):
        whole = torch.arange(num_rows * 4, dtype=torch.float32).view(num_rows, 4)
        tensor = distribute_tensor(whole, mesh, placements)
        layout = reader.read(tensor, "w")
        coordinate = layout.mesh.coordinate(dist.get_rank())
        assert torch.equal(tensor.to_local(), values_at(layout.region(coordinate), whole))
        assert torch.equal(tensor.full_tensor(), whole)


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((4,), (Shard(0),)),
        ((4,), (Shard(1),)),
        ((2, 2), (Shard(0), Shard(0))),
        ((2, 2), (Shard(1), Shard(0))),
        ((2, 2), (Replicate(), Shard(0))),
    ],
    ids=str,
)
def test_a_region_is_what_torch_scatters_and_gathers(
    ranks: Pools, mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    ranks.run(4, scattered_and_gathered, mesh_shape, placements)
