# SPDX-License-Identifier: Apache-2.0
"""Failures that others met with sharded matrices, each as a test with the value that is right.

A docstring starts with the id of the failure and says what went wrong elsewhere; the name says what
holds here. ``tests/ut/test_failure_ids.py`` lists all ids. Layouts go through ``tests/cases.py``,
models through PyTorch's own parallelism; both are compared with one process that has it all.
"""

import copy
import hashlib
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from hyper_parallel import Muon, muon_param_groups
from hyper_parallel.core.optimizer.local_step import LocalStep
from hyper_parallel.core.optimizer.torch_private import StridedShard
from tests.cases import Case, Mesh, Param, assert_invariants, run_case
from tests.pool import Pools
from tests.reference import ReferenceMuon

pytestmark = pytest.mark.dist

EXACT: dict[str, Any] = {"ns_dtype": torch.float64}
R, S0, S1 = Replicate(), Shard(0), Shard(1)
ALL_TO_ALL = dist.all_to_all_single


def check(ranks: Pools, world_size: int, case: Case, copies: int | None = 1) -> None:
    """Run a case and check all that always holds: oracle, once, replicas, counts, gradients."""
    assert_invariants(ranks.run(world_size, run_case, case), case, copies=copies)


def sharded(
    shapes: Sequence[tuple[int, ...]], *placements: str, mesh: tuple[int, ...], **settings: Any
) -> Case:
    """A case of parameters that are all laid out alike."""
    settings.setdefault("options", {"share_replicas": True})
    return Case((Mesh(mesh),), tuple(Param(s, placements) for s in shapes), **settings)


@cache
def mesh_of(*shape: int) -> DeviceMesh:
    """The mesh of all ranks; its axes have names, so that it can be sliced."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("x", "y", "z")[: len(shape)])


def cut(whole: Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)


def param(whole: Tensor, mesh: DeviceMesh, *placements: Placement) -> nn.Parameter:
    return nn.Parameter(cut(whole, mesh, *placements))


def like(p: Tensor, whole: Tensor) -> Tensor:
    """A whole tensor, laid out like a parameter."""
    return cut(whole, p.device_mesh, *p.placements) if isinstance(p, DTensor) else whole.clone()


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def momentum_of(optimizer: Muon, p: Tensor) -> Any:
    return optimizer.state[p]["momentum_buffer"]


def bits(tensors: Sequence[Tensor]) -> str:
    """A hash of this rank's part of some tensors."""
    digest = hashlib.sha256()
    for tensor in map(local, tensors):
        digest.update(str(tuple(tensor.shape)).encode())
        if tensor.numel():
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def error(found: Tensor, due: Tensor, start: Tensor) -> float:
    """How far a weight is from where it should be, relative to the way that it should have gone."""
    moved = (due.double() - start.double()).norm().clamp(min=1e-12)
    return float((full(found).double() - due.double()).norm() / moved)


def refused(optimizer: Muon, params: Sequence[Tensor]) -> str:
    """Step, expect an error that changes nothing, and return what it says."""
    buffers = [momentum_of(optimizer, p) for p in params]
    before = bits([*params, *buffers])
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert bits([*params, *buffers]) == before, "something was written"
    return str(caught.value)


# --- Layouts: the smallest input of each failure, against one process -----------------------------


@pytest.mark.parametrize("dim", [0, 1])
def test_a_lone_shard_is_never_orthogonalized(ranks: Pools, dim: int) -> None:
    """A01: Newton-Schulz saw the rows of one rank, which is another update, off by half."""
    options = {"ns_dtype": torch.float32}
    shapes = [(16, 16), (16, 24), (24, 16)]
    check(ranks, 2, sharded(shapes, f"S{dim}", mesh=(2,), num_steps=1, options=options))


def test_the_degree_of_tensor_parallelism_does_not_change_the_update(ranks: Pools) -> None:
    """A02: the gather left the tensor-parallel axis out, so two and one rank disagreed by 39%."""
    check(ranks, 1, sharded([(8, 12)], "S0", mesh=(1,)))
    for word in ("R", "S0", "S1"):
        check(ranks, 2, sharded([(8, 12)], word, mesh=(2,)))
    for words in itertools.product(("R", "S0", "S1"), repeat=2):
        check(ranks, 4, sharded([(8, 12)], *words, mesh=(2, 2)))


def test_a_strided_shard_is_gathered_over_both_axes(ranks: Pools) -> None:
    """A03: ``is_shard()`` of a strided shard is false, so its axis was taken for replicas."""
    check(ranks, 4, sharded([(8, 4)], "X0/2", "S0", mesh=(2, 2)))
    check(ranks, 4, sharded([(4, 8, 6)], "X1/2", "S1", mesh=(2, 2)))


def strided_rows(num_rows: int) -> None:
    """FSDP over column-wise TP, as torch makes it; rows are told apart by what they hold."""
    mesh = mesh_of(2, 2)
    linear = nn.Linear(4, num_rows, bias=False)
    index = torch.arange(num_rows, dtype=torch.float32)[:, None].expand(num_rows, 4)
    linear.weight = nn.Parameter(index.clone())
    parallelize_module(linear, mesh["y"], ColwiseParallel())
    fully_shard(linear, mesh=mesh["x"])
    p = linear.weight
    assert isinstance(p, DTensor)
    assert isinstance(p.placements[0], StridedShard)
    # Tensor parallelism cuts first, FSDP cuts what is left: with two chunks each.
    x, y = mesh.get_local_rank("x"), mesh.get_local_rank("y")
    mine = torch.arange(num_rows).chunk(2)[y]
    parts = mine.chunk(2)
    rows = parts[x] if x < len(parts) else mine[:0]
    assert torch.equal(local(p), index[rows])
    reference = ReferenceMuon([index.double().clone()])
    optimizer = Muon([p], lr=reference.lr, **EXACT)
    for _ in range(3):
        grad = torch.randn(num_rows, 4)
        p.grad = like(p, grad)
        assert torch.equal(local(p.grad), grad[rows])
        optimizer.step()
        reference.step([grad.double()])
    due = reference.params[0]
    assert (local(p).double() - due[rows]).norm() <= 1e-5 * (due - index).norm()
    assert local(momentum_of(optimizer, p)).sub(reference.momenta[0][rows]).abs().max() < 1e-6


@pytest.mark.parametrize("num_rows", [8, 6, 5])
def test_strided_rows_come_back_to_where_they_were(ranks: Pools, num_rows: int) -> None:
    """A04: shards joined in the order of ranks gave permuted rows, uneven ones more so."""
    ranks.run(4, strided_rows, num_rows)


def sizes_of_buffers(rows: int, columns: int) -> None:
    p = param(torch.randn(rows, columns), mesh_of(2, 2), S0, S1)
    optimizer = Muon([p])
    momentum = momentum_of(optimizer, p)
    assert momentum.shape == p.shape == (rows, columns)
    assert local(momentum).shape == local(p).shape
    x, y = mesh_of(2, 2).get_local_rank("x"), mesh_of(2, 2).get_local_rank("y")
    assert local(p).shape == (
        len(torch.arange(rows).chunk(2)[x]),
        len(torch.arange(columns).chunk(2)[y]),
    )
    (matrix,) = (m.matrix for bucket in optimizer.plan.buckets for m in bucket.matrices)
    assert (matrix.num_rows, matrix.num_cols) == (rows, columns)


@pytest.mark.parametrize("shape", [(6, 10), (5, 3)])
def test_scale_follows_the_global_shape_and_buffers_the_local_one(
    ranks: Pools, shape: tuple[int, int]
) -> None:
    """A05: local shapes gave a wrong scale, global ones a buffer that did not fit."""
    ranks.run(4, sizes_of_buffers, *shape)
    for name in ("original", "match_rms_adamw", "spectral"):
        groups = ({"adjust_lr_fn": name},)
        check(ranks, 4, sharded([shape], "S0", "S1", mesh=(2, 2), groups=groups))


def state_of(shape: tuple[int, int], mesh: tuple[int, ...], *placements: Placement) -> None:
    p = param(torch.randn(shape), mesh_of(*mesh), *placements)
    for shard_momentum in (False, True):
        optimizer = Muon([p], shard_momentum=shard_momentum, share_replicas=True)
        grad = torch.randn(shape)
        p.grad = like(p, grad)
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        momentum = momentum_of(optimizer, p)
        assert momentum.shape == p.shape
        assert momentum.stride() == p.stride()
        assert momentum.device_mesh == mesh_of(*mesh)
        if not (shard_momentum and R in placements):
            assert momentum.placements == placements
            assert local(momentum).shape == local(p).shape
        torch.testing.assert_close(full(momentum), 0.05 * grad)


def test_state_of_uneven_shards_has_the_shape_of_its_parameter(ranks: Pools) -> None:
    """A06: wrapping a local tensor without a shape made each rank believe in another one."""
    ranks.run(2, state_of, (5, 3), (2,), S0)
    for rows in (9, 6):  # 3, 3, 3, 0 and 2, 2, 2, 0
        ranks.run(4, state_of, (rows, 3), (4,), S0)
        ranks.run(4, state_of, (rows, 3), (2, 2), R, S0)


def shape_that_was_guessed() -> str:
    rows = torch.ones(3 - dist.get_rank(), 3)
    p = nn.Parameter(DTensor.from_local(rows, mesh_of(2), [S0], run_check=False))
    p.grad = torch.ones_like(p)
    return refused(Muon([("uneven", p)]), [p])


def test_a_global_shape_that_ranks_see_differently_is_an_error_on_all(ranks: Pools) -> None:
    """A06: 5 rows on 2 ranks, wrapped without a shape, were 6 rows here and 4 there."""
    messages = ranks.run(2, shape_that_was_guessed)
    assert messages[0] == messages[1]
    for words in ("uneven", "(6, 3)", "(4, 3)", "ranks disagree"):
        assert words in messages[0]


def eps_counts_once(eps: float) -> None:
    whole = torch.arange(10.0).view(2, 5)
    start = torch.zeros(2, 5)
    alone = nn.Parameter(start.clone())
    alone.grad = whole.clone()
    options: dict[str, Any] = {"lr": 1.0, "eps": eps, **EXACT}
    Muon([alone], **options).step()
    for placement in (S0, S1, R):
        p = param(start, mesh_of(dist.get_world_size()), placement)
        p.grad = like(p, whole)
        Muon([p], share_replicas=True, **options).step()
        assert error(p, alone.detach(), start) < 1e-6


@pytest.mark.parametrize("world_size", [2, 3])
def test_norm_and_eps_count_once_however_many_ranks_there_are(
    ranks: Pools, world_size: int
) -> None:
    """A08: arithmetic on partial sums added eps once per rank, and norms instead of squares."""
    for eps in (1e-7, 0.5, 3.0):
        ranks.run(world_size, eps_counts_once, eps)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_experts_are_whole_matrices_only_where_placements_say_so(ranks: Pools, dim: int) -> None:
    """A11: a stack was taken for whole matrices by its ndim while ranks held slices of each."""
    check(ranks, 2, sharded([(4, 6, 8)], f"S{dim}", mesh=(2,)))


def test_vectors_of_fewer_elements_than_ranks_step(ranks: Pools) -> None:
    """C01: a first dim smaller than the world failed to be written back in place."""
    check(ranks, 2, sharded([(1, 8), (8, 1)], "S0", mesh=(2,)))
    check(ranks, 4, sharded([(3, 6), (1, 8)], "S0", mesh=(4,)))


def test_empty_shards_take_part(ranks: Pools) -> None:
    """C02: ranks without a row had no metadata, or left an exchange early."""
    check(ranks, 4, sharded([(r, 5) for r in (1, 2, 3, 5, 6, 9)], "S0", mesh=(4,)))
    check(ranks, 4, sharded([(3, 4), (5, 4), (1, 7)], "S0", "S0", mesh=(2, 2)))
    check(ranks, 4, sharded([(1, 7)], "S0", "S1", mesh=(2, 2)))


def keys_of_empty_shards() -> list[str]:
    params = [param(torch.randn(r, 5), mesh_of(4), S0) for r in (1, 2, 3, 5, 6, 9)]
    optimizer = Muon(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p in params:
        assert local(momentum_of(optimizer, p)).shape == local(p).shape
        assert local(p).shape[1] == 5
    return [
        f"{number} {key} {value.dtype} {tuple(value.shape)} {value.placements}"
        for number, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    ]


def test_ranks_without_rows_have_the_same_state(ranks: Pools) -> None:
    """C02: state was kept for what had elements here, so that ranks differed in their keys."""
    seen = ranks.run(4, keys_of_empty_shards)
    assert seen == [seen[0]] * 4
    assert len(seen[0]) == 6


def test_rows_need_not_divide_by_the_number_of_ranks(ranks: Pools) -> None:
    """C03: an assertion held on 8 ranks and not on 16, and AdamW took over without a word."""
    check(ranks, 4, sharded([(6, 8), (8, 8), (18, 4), (16, 4), (4, 4)], "S0", mesh=(4,)))


def vectors_move(shape: tuple[int, int], dim: int) -> None:
    start, grad = torch.randn(shape), torch.randn(shape)
    p = param(start, mesh_of(dist.get_world_size()), Shard(dim))
    optimizer = Muon([p], lr=1.0, weight_decay=0.0, ns_dtype=torch.float32)
    p.grad = like(p, grad)
    optimizer.step()
    moved = (start - full(p)) / math.sqrt(max(1, shape[0] / shape[1]))
    assert float(moved.norm()) == pytest.approx(0.70, abs=0.02)
    cosine = nn.functional.cosine_similarity(moved.flatten(), grad.flatten(), dim=0)
    assert float(cosine) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("world_size", [2, 4])
def test_sharded_vectors_move_along_their_momentum(ranks: Pools, world_size: int) -> None:
    """C06: matrices of one row or one column met rules that were made for others."""
    for shape, dim in itertools.product([(1, 8), (8, 1), (1, 1)], (0, 1)):
        ranks.run(world_size, vectors_move, shape, dim)


def test_zero_size_parameters_disturb_nobody(ranks: Pools) -> None:
    """C07: parameters without elements are legal, and were none of the cases thought of."""
    shapes = [(0, 4), (4, 0), (8, 1, 1), (1, 8, 1), (5, 3)]
    for dim in (0, 1):
        check(ranks, 3, sharded(shapes, f"S{dim}", mesh=(3,)))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_convolution_may_be_cut_inside_what_is_flattened(ranks: Pools, dim: int) -> None:
    """C08: a view of a DTensor raised for uneven inner dims, or changed its placements."""
    groups = ({"matrix_view": "flatten"},)
    check(ranks, 2, sharded([(8, 4, 3, 3)], f"S{dim}", mesh=(2,), groups=groups))


def sliced_meshes() -> None:
    mesh = mesh_of(2, 2)
    layouts = [(mesh["x"], (S0,)), (mesh, (S0, S1)), (mesh["y"], (S0,)), (mesh, (R, S1))]
    wholes = [torch.randn(4, 4) for _ in layouts]
    params = [param(w, m, *placements) for w, (m, placements) in zip(wholes, layouts, strict=True)]
    reference = ReferenceMuon([w.double().clone() for w in wholes])
    optimizer = Muon(params, lr=reference.lr, share_replicas=True, **EXACT)
    for _ in range(3):
        grads = [torch.randn(4, 4) for _ in layouts]
        for p, grad in zip(params, grads, strict=True):
            p.grad = like(p, grad)
        optimizer.step()
        reference.step([grad.double() for grad in grads])
    for p, due, start in zip(params, reference.params, wholes, strict=True):
        assert error(p, due, start) < 1e-5


def test_parameters_of_slices_of_a_mesh_live_in_one_group(ranks: Pools) -> None:
    """C10: FSDP beside FSDP over TP beside TP raised errors about operands of other meshes."""
    ranks.run(4, sliced_meshes)


def one_rank() -> None:
    for mesh, placements in (((1,), (S0,)), ((1, 1), (R, S0)), ((1, 1), (S1, S0))):
        p = param(torch.randn(4, 6), mesh_of(*mesh), *placements)
        assert Muon([p], share_replicas=True).plan.num_collectives == 0


def axes_of_one() -> list[int]:
    counts = []
    for mesh, placements in (((1, 2), (S0, R)), ((2, 1), (R, S1)), ((2, 1), (R, R))):
        p = param(torch.randn(4, 6), mesh_of(*mesh), *placements)
        for share in (False, True):
            plan = Muon([p], share_replicas=share).plan
            assert not any(bucket.gathers for bucket in plan.buckets)
            counts.append(plan.num_collectives)
    return counts


def test_an_axis_of_one_rank_is_neither_cut_nor_copied(ranks: Pools) -> None:
    """C13: a mesh needed two axes to work, and a shard of size one took a path of its own."""
    for mesh, words in (((1,), ("S0",)), ((1, 1), ("R", "S0")), ((1, 1), ("S1", "S0"))):
        check(ranks, 1, sharded([(4, 6), (3, 4, 5)], *words, mesh=mesh))
    ranks.run(1, one_rank)
    for mesh, words in (((1, 2), ("S0", "R")), ((2, 1), ("R", "S1"))):
        check(ranks, 2, sharded([(4, 6), (3, 4, 5)], *words, mesh=mesh))
    assert ranks.run(2, axes_of_one) == [[0, 1, 0, 1, 0, 1]] * 2


def test_lora_factors_leave_most_ranks_without_rows(ranks: Pools) -> None:
    """A25: an A factor of 4 x 512 has rows for half of 8 ranks; its scale is that of the whole."""
    groups = ({"adjust_lr_fn": "match_rms_adamw"},)
    case = sharded([(4, 512), (512, 4)], "S0", mesh=(8,), groups=groups, num_steps=1)
    check(ranks, 8, case)


def test_uneven_and_empty_splits_travel_over_gloo_in_half_precision(ranks: Pools) -> None:
    """E09: lists of uneven sizes are refused by gloo, which CPU users have."""
    options = {"ns_dtype": torch.bfloat16}
    shapes = [(5, 3), (1, 8), (9, 4), (16, 12)]
    check(ranks, 4, sharded(shapes, "S0", mesh=(4,), options=options))


# --- Values that do not depend on ranks -----------------------------------------------------------


def decays_by_half(*placements: Placement) -> None:
    mesh = mesh_of(2)
    params = [param(torch.ones(4, 8), mesh, *placements) for _ in range(2)]
    groups: list[dict[str, Any]] = [
        {"params": params[:1], "weight_decay": 0.0},
        {"params": params[1:]},
    ]
    optimizer = Muon(groups, lr=0.1, weight_decay=5.0, adjust_lr_fn="match_rms_adamw")
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(full(params[0]), torch.ones(4, 8))
    assert torch.equal(full(params[1]), torch.full((4, 8), 0.5))


@pytest.mark.parametrize("placement", [S0, S1, R])
def test_sharded_weights_decay_by_the_plain_learning_rate(
    ranks: Pools, placement: Placement
) -> None:
    """A19: decay was lost in a refactoring, and in a loop that returned after its first group."""
    ranks.run(2, decays_by_half, placement)


def singular_values(*placements: Placement) -> None:
    start, grad = torch.randn(8, 12), torch.randn(8, 12)
    p = param(start, mesh_of(2), *placements)
    optimizer = Muon([p], lr=1.0, weight_decay=0.0, share_replicas=True)
    p.grad = like(p, grad)
    optimizer.step()
    values = torch.linalg.svdvals(start - full(p))
    assert 0.65 < float(values.min()) <= float(values.max()) < 1.25


@pytest.mark.parametrize("placement", [S0, S1, R])
def test_what_runs_on_ranks_is_muon(ranks: Pools, placement: Placement) -> None:
    """A20: Muon was chosen, a wrapper never reached it, and plain SGD lowered the loss."""
    ranks.run(2, singular_values, placement)


def zero_gradients(dim: int) -> None:
    mesh = mesh_of(2)
    wholes = [torch.randn(4, 8), torch.randn(3, 4, 8), torch.randn(4, 8)]
    grads = [torch.zeros(4, 8), torch.randn(3, 4, 8), torch.randn(4, 8)]
    grads[1][1] = 0
    params = [param(w, mesh, Shard(dim)) for w in wholes]
    reference = ReferenceMuon([w.double().clone() for w in wholes], weight_decay=0.0)
    optimizer = Muon(params, lr=reference.lr, weight_decay=0.0, **EXACT)
    for p, grad in zip(params, grads, strict=True):
        p.grad = like(p, grad)
    optimizer.step()
    reference.step([grad.double() for grad in grads])
    assert torch.equal(full(params[0]), wholes[0])
    assert torch.equal(full(params[1])[1], wholes[1][1])
    for p, due, start in list(zip(params, reference.params, wholes, strict=True))[1:]:
        assert error(p, due, start) < 1e-5
        assert full(momentum_of(optimizer, p)).isfinite().all()


@pytest.mark.parametrize("dim", [0, 1])
def test_a_matrix_of_zeros_stays_and_its_neighbours_move(ranks: Pools, dim: int) -> None:
    """A27: zero divided by zero made the loss NaN, of an expert and of its whole batch."""
    ranks.run(2, zero_gradients, dim)


def clipped() -> None:
    mesh = mesh_of(2)
    whole, grad = torch.randn(8, 16), torch.randn(8, 16)
    params = [param(whole, mesh, S0) for _ in range(2)]
    optimizers = [Muon([p], lr=0.1, **EXACT) for p in params]
    for p in params:
        p.grad = like(p, grad)
    nn.utils.clip_grad_norm_(params[1:], 1e-3)
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(full(params[0]), full(params[1]), rtol=0, atol=1e-6)
    norms = [full(momentum_of(o, p)).norm() for o, p in zip(optimizers, params, strict=True)]
    assert float(norms[1] / norms[0] * grad.norm()) == pytest.approx(1e-3, rel=1e-3)


def test_clipping_sharded_gradients_changes_momentum_and_not_the_step(ranks: Pools) -> None:
    """A29: clipping hit the orthogonalized update, whose norm grows with the matrix."""
    ranks.run(2, clipped)


# --- Gradients ------------------------------------------------------------------------------------


def partial_gradient() -> str:
    mesh, rank = mesh_of(2), dist.get_rank()
    start, summed = torch.randn(2, 2), torch.full((2, 2), 3.0)
    p = param(start, mesh, R)
    optimizer = Muon([("weight", p)], lr=0.02, share_replicas=True, **EXACT)
    mine = torch.full((2, 2), rank + 1.0)
    partial = DTensor.from_local(mine, mesh, [Partial()], run_check=False)
    p.grad = partial
    message = refused(optimizer, [p])
    p.grad = partial.redistribute(placements=[R])
    optimizer.step()
    torch.testing.assert_close(full(momentum_of(optimizer, p)), 0.05 * summed)
    reference = ReferenceMuon([start.double().clone()], lr=0.02)
    reference.step([summed.double()])
    assert error(p, reference.params[0], start) < 1e-5
    return message


def test_a_gradient_that_is_not_reduced_is_refused_and_its_sum_is_taken(ranks: Pools) -> None:
    """A07: ranks orthogonalized 1 and 2 where the gradient was 3, and drifted apart."""
    messages = ranks.run(2, partial_gradient)
    assert messages[0] == messages[1]
    assert "weight" in messages[0]
    assert "reduce" in messages[0]


def gradient_on_its_way() -> None:
    mesh, rank = mesh_of(2), dist.get_rank()
    start = torch.randn(6, 4)
    summed = torch.arange(24.0).view(6, 4)
    reference = ReferenceMuon([start.double().clone()])
    reference.step([summed.double()])
    partial = DTensor.from_local(summed * (rank + 1) / 3, mesh, [Partial()], run_check=False)
    for placement in (R, S0):
        p = param(start, mesh, placement)
        optimizer = Muon([p], lr=reference.lr, share_replicas=True, **EXACT)
        p.grad = partial.redistribute(placements=[placement], async_op=True)
        optimizer.step()
        assert error(p, reference.params[0], start) < 1e-5
        torch.testing.assert_close(full(momentum_of(optimizer, p)), 0.05 * summed)


def test_a_gradient_that_is_still_travelling_is_waited_for(ranks: Pools) -> None:
    """B08: a lazy tensor was read by its private local part before the collective had ended."""
    ranks.run(2, gradient_on_its_way)


def no_gradients_anywhere() -> None:
    params = [param(torch.randn(4, 8), mesh_of(2), S0) for _ in range(2)]
    optimizer = Muon(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    before = bits([*params, *(momentum_of(optimizer, p) for p in params)])
    with (
        pytest.warns(UserWarning, match="no gradient on any parameter"),
        CommDebugMode() as comm,
    ):
        optimizer.step()
    # The schedule is static: what the plan says runs, whatever gradients there are.
    assert comm.get_total_counts() == optimizer.plan.num_collectives
    assert bits([*params, *(momentum_of(optimizer, p) for p in params)]) == before


def test_a_step_without_any_gradient_changes_nothing_and_ends(ranks: Pools) -> None:
    """B01: ranks that had nothing to do returned, and the others waited for them."""
    ranks.run(2, no_gradients_anywhere)


def bad_value_on_one_rank() -> None:
    mesh, rank = mesh_of(2), dist.get_rank()
    wholes = [torch.randn(4, 4, 8), torch.randn(6, 4)]
    grads = [torch.randn(4, 4, 8), torch.randn(6, 4)]
    experts, dense = (param(w, mesh, S0) for w in wholes)
    reference = ReferenceMuon([w.double().clone() for w in wholes])
    named = [("experts", experts), ("dense", dense)]
    optimizer = Muon(named, lr=reference.lr, nonfinite="propagate", **EXACT)
    experts.grad, dense.grad = like(experts, grads[0]), like(dense, grads[1])
    if rank == 1:
        local(experts.grad)[0, 0, 0] = math.inf
    optimizer.step()
    reference.step([grad.double() for grad in grads])
    assert error(dense, reference.params[1], wholes[1]) < 1e-5
    due = reference.params[0].chunk(2)[rank]
    found = local(experts).double()
    if rank == 1:
        assert found[0].isnan().all()
        due, found = due[1:], found[1:]
    assert (found - due).abs().max() < 1e-5


def test_a_bad_value_on_one_rank_does_not_make_that_rank_skip(ranks: Pools) -> None:
    """B06: one rank found an infinity in its own experts and skipped a step that communicates."""
    ranks.run(2, bad_value_on_one_rank)


DTYPES = (torch.bfloat16, torch.float32)


def dtypes(mesh: tuple[int, ...], *placements: Placement) -> None:
    for p_dtype, g_dtype, m_dtype in itertools.product(DTYPES, DTYPES, (*DTYPES, None)):
        start = 0.01 * torch.randn(8, 6).to(p_dtype)
        p, alone = param(start, mesh_of(*mesh), *placements), nn.Parameter(start.clone())
        options: dict[str, Any] = {"lr": 0.1, "momentum_dtype": m_dtype}
        optimizer = Muon([p], ns_dtype=torch.float32, share_replicas=True, **options)
        optimizer_alone = Muon([alone], ns_dtype=torch.float32, **options)
        reference = ReferenceMuon([start.double().clone()], lr=0.1)
        p.grad_dtype = alone.grad_dtype = None
        for _ in range(3):
            grad = torch.randn(8, 6).to(g_dtype)
            p.grad, alone.grad = like(p, grad), grad.clone()
            optimizer.step()
            optimizer_alone.step()
            reference.step([grad.double()])
        momentum = momentum_of(optimizer, p)
        assert p.dtype == p_dtype
        assert p.grad is not None
        assert p.grad.dtype == g_dtype
        assert momentum.dtype == (m_dtype or p_dtype)
        torch.testing.assert_close(full(momentum), momentum_of(optimizer_alone, alone))
        same = 1e-5 if p_dtype == torch.float32 else 1e-2
        assert error(p, alone.detach(), start) < same
        half = torch.bfloat16 in (p_dtype, momentum.dtype)
        assert error(p, reference.params[0], start) < (2e-2 if half else 1e-4)


@pytest.mark.parametrize(
    ("mesh", "placements"), [((2,), (S0,)), ((2,), (R,)), ((2, 2), (R, S0)), ((2, 2), (S0, S1))]
)
def test_sharded_parameters_take_every_combination_of_dtypes(
    ranks: Pools, mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    """C18: ``lerp_`` refused bf16 momentum with fp32 gradients, and the other way round."""
    ranks.run(math.prod(mesh), dtypes, mesh, *placements)


# --- Models under PyTorch's own parallelism ------------------------------------------------------


class Net(nn.Module):
    """Two matrices for Muon and a norm for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10, bias=False)
        self.down = nn.Linear(10, 5, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(self.norm(x)).tanh())
        return result


def tensor_parallel(net: Net, mesh: DeviceMesh) -> None:
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def parallel(kind: str) -> tuple[nn.Module, DeviceMesh, Net]:
    """A model, the mesh over which its data is split, and the same model on one process."""
    net = Net().double()
    alone = copy.deepcopy(net)
    world = dist.get_world_size()
    if kind == "DDP":
        return DistributedDataParallel(net), mesh_of(world), alone
    if kind == "FSDP":
        data = mesh_of(world)
    elif kind == "HSDP":
        data = mesh_of(2, world // 2)
    elif kind == "FSDP x TP":
        data = mesh_of(2, world // 2)["x"]
        tensor_parallel(net, mesh_of(2, world // 2)["y"])
    else:
        assert kind == "HSDP x TP"
        data = mesh_of(2, 2, 2)["x", "y"]
        tensor_parallel(net, mesh_of(2, 2, 2)["z"])
    for module in (net.up, net.down, net):
        fully_shard(module, mesh=data)
    return net, data, alone


def groups_of(model: nn.Module) -> tuple[list[dict[str, Any]], list[nn.Parameter]]:
    params = list(model.parameters())
    vectors = [p for p in params if p.ndim == 1]
    matrices = [p for p in params if p.ndim == 2]
    return [{"params": matrices}, {"params": vectors, "algorithm": "adamw"}], matrices + vectors


class OneProcess:
    """The oracle for a model: whole weights, the whole batch, one step at a time."""

    def __init__(self, net: Net) -> None:
        self.net = net
        _, self.params = groups_of(net)
        self.start = [p.detach().clone() for p in self.params]
        self.muon = ReferenceMuon([p.detach() for p in self.params[:2]])
        self.adamw = torch.optim.AdamW(self.params[2:], lr=self.muon.lr, weight_decay=0.1)

    def step(self, *losses: Callable[[nn.Module], Tensor]) -> None:
        self.net.zero_grad()
        for loss in losses:
            loss(self.net).backward()
        self.muon.step([p.grad for p in self.params[:2]])
        self.adamw.step()

    def error(self, params: Sequence[Tensor]) -> float:
        rows = zip(params, self.params, self.start, strict=True)
        return max(error(p, due.detach(), start) for p, due, start in rows)


def coordinate(data: DeviceMesh) -> int:
    """Which part of the batch this rank has."""
    here = data.get_coordinate()
    assert here is not None
    return sum(position * math.prod(data.shape[axis + 1 :]) for axis, position in enumerate(here))


def loss_on(x: Tensor) -> Callable[[nn.Module], Tensor]:
    def loss(model: nn.Module) -> Tensor:
        result: Tensor = model(x).square().mean()
        return result

    return loss


def train(kind: str, num_steps: int, options: dict[str, Any]) -> list[str]:
    """Train on data that differs between ranks; what this rank holds after every step."""
    model, data, alone = parallel(kind)
    groups, params = groups_of(model)
    oracle = OneProcess(alone)
    mesh = data if kind == "DDP" else None
    optimizer = Muon(groups, lr=oracle.muon.lr, replicate_mesh=mesh, **EXACT, **options)
    history = []
    for _ in range(num_steps):
        batch = torch.randn(data.size(), 3, 6, dtype=torch.float64)
        optimizer.zero_grad()
        loss_on(batch[coordinate(data)])(model).backward()
        optimizer.step()
        oracle.step(loss_on(batch))
        history.append(bits(params))
    assert oracle.error(params) < 1e-7
    return history


KINDS = {"DDP": 2, "FSDP": 4, "HSDP": 4, "FSDP x TP": 4, "HSDP x TP": 8}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard_momentum", [False, True])
def test_a_model_trains_as_on_one_process_however_it_is_parallel(
    ranks: Pools, kind: str, shard_momentum: bool
) -> None:
    """A09, A02, A07, C16: replicas of a model with data of their own drifted apart.

    Five steps; gradients reduced by FSDP or DDP; the same bits along every axis of replicas.
    """
    options = {"share_replicas": True, "shard_momentum": shard_momentum}
    histories = ranks.run(KINDS[kind], train, kind, 5, options)
    copies = {"DDP": 2, "HSDP": 2, "HSDP x TP": 2}.get(kind, 1)
    shards = KINDS[kind] // copies
    for rank, history in enumerate(histories):
        assert history == histories[rank % shards]
    assert len({history[-1] for history in histories}) == shards


def accumulate() -> None:
    model, data, alone = parallel("HSDP")
    assert isinstance(model, FSDPModule)
    groups, params = groups_of(model)
    oracle = OneProcess(alone)
    optimizer = Muon(groups, lr=oracle.muon.lr, share_replicas=True, **EXACT)
    before = bits(params)
    micro = [torch.randn(data.size(), 3, 6, dtype=torch.float64) for _ in range(2)]
    model.set_requires_all_reduce(False)
    loss_on(micro[0][coordinate(data)])(model).backward()
    assert all(p.grad is None for p in params)
    with pytest.warns(UserWarning, match="no gradient on any parameter"):
        optimizer.step()
    assert bits(params) == before
    model.set_requires_all_reduce(True)
    loss_on(micro[1][coordinate(data)])(model).backward()
    optimizer.step()
    oracle.step(*map(loss_on, micro))
    assert oracle.error(params) < 1e-7


def test_accumulated_gradients_are_those_of_one_large_batch(ranks: Pools) -> None:
    """E10: with the all-reduce put off there is no gradient, and a step in between is none."""
    ranks.run(4, accumulate)


def freeze_and_unfreeze(kind: str) -> int:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(3)]).double()
    alone = copy.deepcopy(net)
    data = mesh_of(2, 2) if kind == "HSDP" else mesh_of(dist.get_world_size())
    for layer in net:
        fully_shard(layer, mesh=data)
    fully_shard(net, mesh=data)
    params, others = list(net.parameters()), list(alone.parameters())
    start = [p.detach().clone() for p in others]
    reference = ReferenceMuon([p.detach() for p in others])
    optimizer = Muon(
        [{"params": [p]} for p in params], lr=reference.lr, share_replicas=True, **EXACT
    )
    computed = 0
    compute = LocalStep.compute

    def counting(self: LocalStep, batch: Tensor, work: Any) -> None:
        nonlocal computed
        computed += batch.shape[0]
        compute(self, batch, work)

    for step in range(5):
        for number, pair in enumerate(zip(params, others, strict=True)):
            active = number == 1 or (number == 2 and step >= 2)
            for p in pair:
                p.requires_grad_(active)
        x = torch.randn(data.size(), 3, 6, dtype=torch.float64)
        optimizer.zero_grad()
        alone.zero_grad()
        loss_on(x[coordinate(data)])(net).backward()
        loss_on(x)(alone).backward()
        with mock.patch.object(LocalStep, "compute", counting):
            optimizer.step()
        reference.step([p.grad for p in others])
        assert len(optimizer.state_dict()["state"]) == 3
    assert torch.equal(full(params[0]), start[0])
    for p, due, first in list(zip(params, others, start, strict=True))[1:]:
        assert error(p, due.detach(), first) < 1e-7
    return computed


@pytest.mark.parametrize("kind", ["FSDP", "HSDP"])
def test_frozen_layers_rest_on_all_ranks_and_may_be_unfrozen(ranks: Pools, kind: str) -> None:
    """C22: a group of frozen parameters crashed; they cost no decay and no orthogonalization."""
    assert sum(ranks.run(4, freeze_and_unfreeze, kind)) == 2 * 1 + 3 * 2


# --- Optimizers that are built at the wrong time, or of mixed parts -------------------------------


def built_too_early() -> None:
    net = Net().double()
    alone = copy.deepcopy(net)
    groups, dead = groups_of(net)
    optimizer = Muon(groups, lr=0.02, **EXACT)
    before = [p.detach().clone() for p in dead]
    data = mesh_of(2)
    fully_shard(net, mesh=data)
    batch = torch.randn(2, 3, 6, dtype=torch.float64)

    def backward() -> None:
        net.zero_grad()
        loss_on(batch[coordinate(data)])(net).backward()

    backward()
    with pytest.warns(UserWarning, match="no gradient on any parameter.*after fully_shard"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    _, params = groups_of(net)
    for p, start in zip(params, before, strict=True):
        assert torch.equal(full(p), start)
    # Exchanged in the groups, as trainers do it, the new parameters are those that are stepped on.
    for group, (fresh, _) in zip(optimizer.param_groups, [groups_of(net)] * 2, strict=True):
        algorithm = group["algorithm"]
        (group["params"],) = (g["params"] for g in fresh if g.get("algorithm", "muon") == algorithm)
    oracle = OneProcess(alone)
    optimizer.step()
    oracle.step(loss_on(batch))
    assert oracle.error(params) < 1e-7
    for p in params[:2]:
        assert isinstance(p, DTensor)
        momentum = momentum_of(optimizer, p)
        assert momentum.placements == p.placements
        assert momentum.shape == p.shape


def test_an_optimizer_built_before_sharding_says_so_and_can_be_mended(ranks: Pools) -> None:
    """C23: it kept the old tensors, gradients went to the new ones, and nothing was said."""
    ranks.run(2, built_too_early)


def built_after_a_forward() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for module in (net[0], net):
        fully_shard(module, mesh=mesh_of(2))
    net(torch.zeros(2, 4))
    assert not any(isinstance(p, DTensor) for p in net[1].parameters())
    with pytest.warns(UserWarning, match=r"1 of 2 .* '1.weight', on 2 ranks"):
        groups = muon_param_groups(net)
    assert [r.is_distributed for r in groups.report] == [True, False]
    assert "muon: 2 parameters, 32 elements, 1 of them plain tensors" in str(groups)


def test_parameters_that_a_forward_left_unsharded_are_counted_and_warned_of(ranks: Pools) -> None:
    """C24: after a forward the root shows plain tensors that the model no longer uses."""
    ranks.run(2, built_after_a_forward)


def plain_beside_sharded() -> None:
    mesh, rank = mesh_of(2), dist.get_rank()
    linear = nn.Linear(4, 4)
    bias = linear.bias
    fully_shard(linear, mesh=mesh, ignored_params={bias})
    start = torch.randn(4, 4)
    mine = nn.Parameter(start + rank)
    weight, norm = linear.weight, param(torch.ones(4), mesh, S0)
    kept = [full(weight).clone(), start + rank]
    grads = [torch.randn(4, 4), torch.randn(4, 4) * (rank + 1)]
    optimizer = Muon(
        [
            {"params": [mine, weight]},
            {"params": [bias, norm], "algorithm": "adamw", "lr": 0.5, "weight_decay": 0.0},
        ],
        lr=0.02,
        **EXACT,
    )
    weight.grad, mine.grad = like(weight, grads[0]), grads[1].clone()
    bias_start = bias.detach().clone()
    bias.grad, norm.grad = torch.ones(4), torch.ones_like(norm)
    optimizer.step()
    reference = ReferenceMuon([k.double().clone() for k in kept])
    reference.step([grad.double() for grad in grads])
    for p, due, first in zip((weight, mine), reference.params, kept, strict=True):
        assert error(p, due, first) < 1e-5
    torch.testing.assert_close(bias.detach(), bias_start - 0.5)
    torch.testing.assert_close(full(norm), torch.full((4,), 0.5))


def test_plain_tensors_and_dtensors_share_a_group(ranks: Pools) -> None:
    """C09: foreach kernels refuse lists that mix both, as ``ignored_params`` makes them."""
    ranks.run(2, plain_beside_sharded)


# --- Order and time -------------------------------------------------------------------------------


def reversed_on_one_rank(*placements: Placement) -> str:
    mesh, rank = mesh_of(2), dist.get_rank()
    params = [param(torch.full((4, 4), float(i)), mesh, *placements) for i in range(2)]
    named = list(zip(("first", "second"), params, strict=True))
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = Muon(named[::-1] if rank else named, share_replicas=True)
    return refused(optimizer, params)


@pytest.mark.parametrize("placement", [S0, R])
def test_equal_shapes_in_another_order_are_told_apart_by_name(
    ranks: Pools, placement: Placement
) -> None:
    """A34: with the list reversed on one rank, a collective paired the wrong matrices."""
    messages = ranks.run(2, reversed_on_one_rank, placement)
    assert messages[0] == messages[1]
    assert "first" in messages[0]
    assert "second" in messages[0]


def batches_of(size: int, share: bool, route: str) -> list[str]:
    """Ten steps on HSDP whose owners compute ``size`` equal matrices at a time."""
    shapes, mesh = [(8, 8)] * 20, mesh_of(2, 2)
    params = [param(torch.randn(shape), mesh, R, S0) for shape in shapes]
    # On the wire a matrix has 128 bytes and each of two shards receives half of it.
    nbytes = 128 * size * (4 if share else 2) // 2
    optimizer = Muon(
        params, lr=0.05, share_replicas=share, bucket_bytes=nbytes, replica_route=route
    )
    sizes = set()
    for bucket in optimizer.plan.buckets:
        owners = [m.owner for m in bucket.matrices]
        sizes |= {owners.count(owner) for owner in owners}
    assert max(sizes) == size
    history = []
    for _ in range(10):
        for p in params:
            p.grad = like(p, torch.randn(8, 8))
        optimizer.step()
        history.append(bits(params))
    return history


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(("share", "route"), [(True, "direct"), (True, "staged"), (False, "auto")])
def test_replicas_keep_the_same_bits_whatever_is_computed_together(
    ranks: Pools, size: int, share: bool, route: str
) -> None:
    """A35: replicas computed a matrix in other batches, and its last bits were amplified."""
    histories = ranks.run(4, batches_of, size, share, route)
    assert histories[0] == histories[2]
    assert histories[1] == histories[3]
    assert histories[0][-1] != histories[1][-1]


def stages(num_repeats: int, mesh: DeviceMesh, stage: int, *placements: Placement) -> None:
    """Build and step again and again, with other parameters on each stage."""
    forbidden = mock.Mock(side_effect=AssertionError("a process group made in a step"))
    for _ in range(num_repeats):
        count = 1 + 2 * stage
        params = [param(torch.ones(4 + i, 4), mesh, *placements) for i in range(count)]
        optimizer = Muon(params, share_replicas=True, bucket_bytes=32)
        with mock.patch.object(dist, "new_group", forbidden):
            for _ in range(3):
                for p in params:
                    p.grad = torch.ones_like(p)
                optimizer.step()


def two_stages() -> None:
    stage = dist.get_rank() // 2
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    stages(20, meshes[stage], stage, S0)


def two_stages_of_replicas() -> None:
    stage = dist.get_rank() // 4
    stages(20, mesh_of(2, 2, 2)["y", "z"], stage, R, S0)


@pytest.mark.parametrize(("world_size", "body"), [(4, two_stages), (8, two_stages_of_replicas)])
def test_pipeline_stages_can_be_built_again_and_again(
    ranks: Pools, world_size: int, body: Callable[[], None]
) -> None:
    """B02: groups that only their members made, in their own order, hung one run in four."""
    ranks.run(world_size, body)


def outside_of_the_mesh() -> str:
    mesh = DeviceMesh("cpu", [0, 2])
    p = nn.Parameter(cut(torch.ones(4, 4), mesh, S0))
    if dist.get_rank() % 2:
        with pytest.raises(ValueError, match="does not contain this rank") as caught:
            Muon([("layer.weight", p)])
        return str(caught.value)
    p.grad = torch.ones_like(p)
    optimizer = Muon([("layer.weight", p)])
    optimizer.step()
    return f"moved {not torch.equal(full(p), torch.ones(4, 4))}"


def test_a_rank_outside_of_a_parameters_mesh_is_told_at_construction(ranks: Pools) -> None:
    """B05: such a rank has no coordinate, no group and a local tensor of shape (0,)."""
    for rank, message in enumerate(ranks.run(4, outside_of_the_mesh)):
        if rank % 2 == 0:
            assert message == "moved True"
            continue
        for words in ("layer.weight", f"this rank ({rank})", "over ranks [0, 2]", "Give each rank"):
            assert words in message


def test_a_mesh_of_two_axes_needs_no_group_without_an_axis(ranks: Pools) -> None:
    """B05: ``get_group()`` without an axis raises on any mesh of two, also of (2, 1)."""
    for mesh, words in (((2, 1), ("S0", "R")), ((2, 1), ("R", "S0")), ((1, 2), ("R", "S0"))):
        check(ranks, 2, sharded([(4, 4)], *words, mesh=mesh))


class Watched:
    """A collective that keeps nobody's buffers, and delivers when it is waited for, not before.

    It works on copies: gloo's own handle would keep the buffers alive, which hides the mistake.
    """

    def __init__(self, received: Tensor, packet: Tensor, *args: Any, **kwargs: Any) -> None:
        self._received, self._packet = weakref.ref(received), weakref.ref(packet)
        self._arrived, self._sent = torch.empty_like(received), packet.clone()
        received.fill_(math.nan)
        self._work = ALL_TO_ALL(self._arrived, self._sent, *args, **kwargs)
        self.waited = False

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
        received, packet = self._received(), self._packet()
        assert received is not None, "the buffer to fill was dropped in flight"
        assert packet is not None, "the buffer to send was dropped in flight"
        assert torch.equal(packet.view(torch.uint8), self._sent.view(torch.uint8))
        received.copy_(self._arrived)
        self.waited = True


def watched_steps(num_steps: int, route: str) -> list[str]:
    params = [param(torch.randn(6, 4), mesh_of(2, 2), R, S0) for _ in range(8)]
    options: dict[str, Any] = {"replica_route": route, "bucket_bytes": 100}
    optimizer = Muon(params, lr=0.05, share_replicas=True, **options)
    assert len(optimizer.plan.buckets) > 1
    started: list[Watched] = []

    def watching(*args: Any, **kwargs: Any) -> Watched:
        assert kwargs["async_op"]
        started.append(Watched(*args, **kwargs))
        return started[-1]

    history = []
    with mock.patch.object(dist, "all_to_all_single", watching):
        for step in range(num_steps):
            for number, p in enumerate(params):
                p.grad = like(p, torch.randn(6, 4))
                if step == num_steps // 2 and number == 3 and dist.get_rank() == 1:
                    p.grad = None
            if step == num_steps // 2:
                with pytest.raises(RuntimeError, match="rank 1 has no gradient"):
                    optimizer.step()
            else:
                optimizer.step()
            assert started
            assert all(work.waited for work in started), "step() returned with work in flight"
            started.clear()
            history.append(bits(params))
    return history


@pytest.mark.parametrize("route", ["direct", "staged"])
def test_every_exchange_is_waited_for_with_its_buffers_alive(ranks: Pools, route: str) -> None:
    """B07, B08: buffers were used while they travelled, and ranks diverged slowly."""
    histories = ranks.run(4, watched_steps, 200, route)
    assert histories[0] == histories[2]
    assert histories[1] == histories[3]


class DTensorOps(TorchDispatchMode):
    """Records operators that are given a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def arithmetic_on_dtensors() -> None:
    mesh = mesh_of(2, 2)
    matrices = [
        param(torch.randn(6, 4), mesh, R, S0),
        param(torch.randn(5, 3), mesh, S0, S1),
        param(torch.randn(8, 4), mesh, StridedShard(0, split_factor=2), S0),
        param(torch.randn(4, 3, 5), mesh, S0, R),
    ]
    vector = param(torch.randn(6), mesh, R, S0)
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": [vector], "algorithm": "adamw"},
    ]
    optimizer = Muon(groups, share_replicas=True)
    for p in (*matrices, vector):
        p.grad = torch.ones_like(p)
    with DTensorOps() as first:
        optimizer.step()
    optimizer.param_groups[0]["shard_momentum"] = True
    assert optimizer.plan
    with DTensorOps() as second:
        optimizer.step()
    for mode in (first, second):
        assert mode.names <= {"aten.detach.default"}
    with DTensorOps() as control:
        _ = vector + vector
    assert control.names == {"aten.add.Tensor"}


def test_a_step_does_no_arithmetic_on_dtensors(ranks: Pools) -> None:
    """C19: views, foreach and raw kernels have no rule for DTensors, or read a wrong pointer."""
    ranks.run(4, arithmetic_on_dtensors)
