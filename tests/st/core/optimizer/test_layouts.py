# SPDX-License-Identifier: Apache-2.0
"""Every layout against one process: weights, momentum, replicas, counts."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from hyper_parallel import Muon
from tests.cases import Case, Mesh, Param, assert_invariants, run_case
from tests.pool import Pools

pytestmark = pytest.mark.dist

SHAPES = ((16, 8), (5, 3), (1, 7), (9, 4), (3, 8, 6), (0, 4), (4, 1), (12, 12))


def everywhere(*placements: str, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> tuple[Param, ...]:
    return tuple(Param(shape, placements) for shape in shapes)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_fsdp_equals_one_process(ranks: Pools, world_size: int, dim: int) -> None:
    """A01, C01, C02, C03: a shard is never orthogonalized for itself; empty and uneven shards."""
    case = Case((Mesh((world_size,)),), everywhere(f"S{dim}"))
    assert_invariants(ranks.run(world_size, run_case, case), case, copies=1)


LAYOUTS_2X2 = {
    "HSDP": ("R", "S0"),
    "HSDP, shards first": ("S0", "R"),
    "FSDP over row-wise TP": ("S0", "S1"),
    "FSDP over column-wise TP": ("X0/2", "S0"),
    "both axes on dim 0": ("S0", "S0"),
    "both axes on dim 1": ("S1", "S1"),
    "FSDP on dim 1 over column-wise TP": ("S1", "S0"),
    "replicated": ("R", "R"),
    "strided over replicas": ("R", "X0/2"),
}


@pytest.mark.parametrize("placements", LAYOUTS_2X2.values(), ids=LAYOUTS_2X2.keys())
@pytest.mark.parametrize("route", ["direct", "staged"])
def test_two_axes_equal_one_process(ranks: Pools, placements: tuple[str, ...], route: str) -> None:
    """A02, A03, A04, A05, C14: tensor parallelism, strided rows and replicas in any mixture."""
    options = {"share_replicas": True, "replica_route": route}
    case = Case((Mesh((2, 2)),), everywhere(*placements), options=options)
    assert_invariants(ranks.run(4, run_case, case), case, copies=1)


@pytest.mark.parametrize("placements", [("R", "S0"), ("S1", "R"), ("R", "R")])
def test_replicas_that_do_not_share_compute_their_own_copy(
    ranks: Pools, placements: tuple[str, ...]
) -> None:
    case = Case((Mesh((2, 2)),), everywhere(*placements), options={"share_replicas": False})
    num_replicas = 2 ** placements.count("R")
    assert_invariants(ranks.run(4, run_case, case), case, copies=num_replicas)


@pytest.mark.parametrize(
    "placements",
    [
        ("R", "S0", "S1"),
        ("S0", "R", "S1"),
        ("R", "R", "S0"),
        ("S0", "S1", "S0"),
        ("R", "X0/2", "S0"),
        ("X0/4", "S0", "S0"),
        ("X0/2", "R", "S0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("shard_momentum", [False, True])
def test_three_axes_equal_one_process(
    ranks: Pools, placements: tuple[str, ...], shard_momentum: bool
) -> None:
    """A09: HSDP over tensor parallelism and other cubes; replicas hold the same bits."""
    options = {"share_replicas": True, "shard_momentum": shard_momentum}
    case = Case((Mesh((2, 2, 2)),), everywhere(*placements), options=options)
    assert_invariants(ranks.run(8, run_case, case), case, copies=1)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("shard_momentum", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_ddp_does_each_matrix_once(
    ranks: Pools, world_size: int, shard_momentum: bool, plain: bool
) -> None:
    """C16: plain tensors with a mesh to replicate over, and DTensors that are all replicas."""
    options = {"share_replicas": True, "shard_momentum": shard_momentum}
    case = Case(
        (Mesh((world_size,)),),
        tuple(Param(shape, None if plain else ("R",)) for shape in SHAPES),
        options=options,
        replicate_over_mesh=plain,
    )
    assert_invariants(ranks.run(world_size, run_case, case), case, copies=1)


@pytest.mark.parametrize(
    "placements", [("R", "S0"), ("S0", "R"), ("R", "R"), ("X0/2", "S0"), ("R", "S1")], ids=str
)
@pytest.mark.parametrize("route", ["direct", "staged"])
def test_momentum_is_kept_once_over_the_replicas(
    ranks: Pools, placements: tuple[str, ...], route: str
) -> None:
    options = {"share_replicas": True, "shard_momentum": True, "replica_route": route}
    case = Case((Mesh((2, 2)),), everywhere(*placements), options=options)
    assert_invariants(ranks.run(4, run_case, case), case, copies=1)


@pytest.mark.parametrize(
    "mesh",
    [Mesh((2,)), Mesh((1, 2)), Mesh((2, 1)), Mesh((1, 1, 2))],
    ids=lambda mesh: "x".join(map(str, mesh.shape)),
)
def test_an_axis_of_size_one_changes_nothing(ranks: Pools, mesh: Mesh) -> None:
    """C13: neither a shard nor a replica where there is only one rank."""
    for first in ("R", "S0", "S1"):
        placements = (first,) * len(mesh.shape)
        case = Case((mesh,), everywhere(*placements), options={"share_replicas": True})
        assert_invariants(ranks.run(2, run_case, case), case, copies=1)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_expert_stacks_equal_one_process(ranks: Pools, dim: int) -> None:
    """A11: experts sharded by expert stay local; sharded inside, they are gathered."""
    shapes = ((4, 6, 8), (5, 3, 4), (3, 8, 2), (2, 2, 3, 5))
    case = Case((Mesh((4,)),), everywhere(f"S{dim}", shapes=shapes))
    outcomes = ranks.run(4, run_case, case)
    assert_invariants(outcomes, case, copies=1)
    if dim == 0:
        case = Case((Mesh((4,)),), everywhere("S0", shapes=((4, 6, 8),)))
        assert " 0 collectives" in ranks.run(4, run_case, case)[0].plan


@pytest.mark.parametrize("placements", [("X0/2", "S0"), ("S1", "S0"), ("S0", "S1"), ("R", "S0")])
def test_experts_over_fsdp_equal_one_process(ranks: Pools, placements: tuple[str, ...]) -> None:
    """Expert parallelism over FSDP, in both ways in which FSDP2 stores it."""
    shapes = ((4, 6, 8), (8, 3, 4), (6, 4, 4))
    case = Case((Mesh((2, 2)),), everywhere(*placements, shapes=shapes))
    assert_invariants(ranks.run(4, run_case, case), case, copies=1)


def test_dense_and_expert_meshes_live_in_one_optimizer(ranks: Pools) -> None:
    """C10: parameters of different meshes, strided and permuted meshes and plain ones."""
    meshes = (
        Mesh((4,)),
        Mesh((2, 2)),
        Mesh((2, 2), ranks=(0, 2, 1, 3)),
        Mesh((4, 1)),
    )
    params = (
        Param((8, 6), ("S0",), mesh=0),
        Param((4, 6, 8), ("X0/2", "S0"), mesh=1),
        Param((6, 10), ("R", "S0"), mesh=2),
        Param((5, 7), ("S1", "R"), mesh=3),
        Param((7, 3), None),
    )
    case = Case(meshes, params, options={"share_replicas": True})
    assert_invariants(ranks.run(4, run_case, case), case)


def test_pipeline_stages_step_on_their_own_parameters(ranks: Pools) -> None:
    """B02: each half of the world has other parameters and other groups."""
    assert ranks.run(4, pipeline_stage) == ["ok"] * 4


def pipeline_stage() -> str:
    stage = dist.get_rank() // 2
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("pp", "dp"))["dp"]
    count = 2 + 3 * stage
    for _ in range(3):
        whole = [torch.randn(6 + i, 4) for i in range(count)]
        params = [torch.nn.Parameter(distribute_tensor(w, mesh, [Shard(0)])) for w in whole]
        optimizer = Muon(params, bucket_bytes=64, ns_dtype=torch.float32)
        for _ in range(3):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        assert set(optimizer.plan.domains) == {(2 * stage, 2 * stage + 1)}
    return "ok"


VIEWS = {
    "flatten": ("flatten", (8, 4, 3, 3)),
    "split": (("split", (6, 3, 3)), (12, 8)),
    "heads": (("heads", 3), (12, 8)),
    "split of a stack": (("split", (1, 4)), (4, 5, 6)),
}


@pytest.mark.parametrize(("view", "shape"), VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("world_size", [2, 4])
def test_shards_may_cut_through_blocks_and_heads(
    ranks: Pools, view: object, shape: tuple[int, ...], world_size: int
) -> None:
    """A14, A16, A17, C08: what a matrix is does not depend on where it is cut."""
    for dim in range(len(shape)):
        case = Case(
            (Mesh((world_size,)),),
            (Param(shape, (f"S{dim}",)), Param((5, 3), ("S0",), group=1)),
            groups=({"matrix_view": view}, {}),
        )
        assert_invariants(ranks.run(world_size, run_case, case), case, copies=1)


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1000, 10**9])
def test_any_bucket_size_gives_the_same_result(ranks: Pools, bucket_bytes: int) -> None:
    """E02: the bound on memory changes nothing else."""
    options = {"bucket_bytes": bucket_bytes, "share_replicas": True}
    case = Case((Mesh((2, 2)),), everywhere("R", "S0"), options=options)
    assert_invariants(ranks.run(4, run_case, case), case, copies=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ns_dtype", [torch.bfloat16, torch.float32])
def test_half_precision_equals_one_process(ranks: Pools, dtype: str, ns_dtype: torch.dtype) -> None:
    shapes = ((16, 8), (5, 3), (9, 4), (3, 8, 6), (12, 10))
    for placements in (("R", "S0"), ("S0", "S1"), ("X0/2", "S0")):
        case = Case(
            (Mesh((2, 2)),),
            everywhere(*placements, shapes=shapes),
            options={"ns_dtype": ns_dtype, "momentum_dtype": torch.float32},
            dtype=dtype,
        )
        assert_invariants(ranks.run(4, run_case, case), case, copies=1)


def test_matrices_without_a_gradient_are_left_alone(ranks: Pools) -> None:
    """B01, C22, D06: a gradient that is missing on all ranks costs nothing and hangs nobody."""
    params = (
        Param((8, 6), ("S0",), skips=(0, 2)),
        Param((5, 6), ("S0",)),
        Param((4, 6, 8), ("S1",), skips=(1,)),
        Param((4, 6), ("R",), skips=(0, 1, 2)),
    )
    for world_size in (2, 3):
        case = Case((Mesh((world_size,)),), params, options={"share_replicas": True})
        assert_invariants(ranks.run(world_size, run_case, case), case, copies=1)
