# SPDX-License-Identifier: Apache-2.0
"""Clipping by the norm of all gradients, on any mixture of meshes: that of one process."""

import math
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode

from hyper_parallel import Muon, clip_grad_norm_, muon_param_groups
from hyper_parallel.core.optimizer.torch_private import StridedShard
from tests.pool import Pools

pytestmark = pytest.mark.dist

R, S0, S1 = Replicate(), Shard(0), Shard(1)
STRIDED: Placement = StridedShard(0, split_factor=2)
SHAPES = [(7, 5), (3, 4), (1, 6), (4, 2, 3)]


@cache
def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


@cache
def mesh_2d() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("x", "y"))


def layouts(name: str) -> list[tuple[DeviceMesh, list[Placement]] | None]:
    """Where each parameter lies; None is a plain tensor."""
    if name == "FSDP":
        return [(world_mesh(), [S0])] * 4
    if name == "HSDP":
        return [(mesh_2d(), [R, S0])] * 4
    if name == "FSDP x TP":
        dense: list[Placement] = [STRIDED, S0]
        return [(mesh_2d(), dense), (mesh_2d(), [S0, S1]), (mesh_2d()["x"], [S0]), None]
    if name == "EP x FSDP":
        return [(world_mesh(), [S0]), (world_mesh(), [S1]), None, (mesh_2d(), [S1, S0])]
    assert name == "everything"
    return [(world_mesh(), [S0]), (mesh_2d()["y"], [S1]), (mesh_2d(), [R, R]), (mesh_2d(), [S0, R])]


ALL = ["FSDP", "HSDP", "FSDP x TP", "EP x FSDP", "everything"]
COLLECTIVES = {"FSDP": 1, "HSDP": 1, "FSDP x TP": 2, "EP x FSDP": 3, "everything": 3}


def laid_out(whole: Tensor, layout: Any) -> Tensor:
    if layout is None:
        return whole.clone()
    return distribute_tensor(whole.clone(), layout[0], layout[1], src_data_rank=None)


def made(name: str, grads: list[Tensor | None]) -> list[nn.Parameter]:
    params = []
    for shape, grad, layout in zip(SHAPES, grads, layouts(name), strict=True):
        p = nn.Parameter(laid_out(torch.zeros(shape), layout))
        p.grad = None if grad is None else laid_out(grad, layout)
        params.append(p)
    return params


def local(tensor: Any) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def clip(name: str, order: float, missing: int | None) -> float:
    whole: list[Tensor | None] = [3 * torch.randn(shape) for shape in SHAPES]
    if missing is not None:
        whole[missing] = None
    alone = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for p, grad in zip(alone, whole, strict=True):
        p.grad = None if grad is None else grad.clone()
    due = torch.nn.utils.clip_grad_norm_(alone, 0.5, order)
    params = made(name, whole)
    with CommDebugMode() as comm:
        total = clip_grad_norm_(params, 0.5, order)
    assert comm.get_total_counts() == COLLECTIVES[name], "not one all-reduce per axis"
    assert not isinstance(total, DTensor)
    torch.testing.assert_close(total, due)
    for p, q, layout in zip(params, alone, layouts(name), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and q.grad is not None:
            torch.testing.assert_close(local(p.grad), local(laid_out(q.grad, layout)))
    return total.item()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("order", "missing"), [(2.0, None), (1.0, 0), (3.0, 1), (math.inf, None)])
def test_the_norm_is_that_of_one_process(
    ranks: Pools, name: str, order: float, missing: int | None
) -> None:
    """C11: torch raises for several meshes, and a local norm was taken for the whole."""
    norms = ranks.run(4, clip, name, order, missing)
    assert len(set(norms)) == 1, "ranks would scale by different factors"


def bad_value(name: str, order: float, value: float) -> tuple[float, str]:
    whole: list[Tensor | None] = [torch.ones(shape) for shape in SHAPES]
    params = made(name, whole)
    if dist.get_rank() == 1:
        assert params[0].grad is not None
        local(params[0].grad).view(-1)[0] = value
    before = [local(p.grad).clone() for p in params]
    with pytest.raises(RuntimeError) as caught:
        clip_grad_norm_(params, 1.0, order, error_if_nonfinite=True)
    for p, b in zip(params, before, strict=True):
        torch.testing.assert_close(local(p.grad), b, rtol=0, atol=0, equal_nan=True)
    return clip_grad_norm_(params, math.inf, order).item(), str(caught.value)


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_bad_value_on_one_rank_is_known_to_all(ranks: Pools, order: float, value: float) -> None:
    """B06: what one rank alone sees must not make it go another way."""
    for total, message in ranks.run(4, bad_value, "EP x FSDP", order, value):
        assert (math.isnan(total) and math.isnan(value)) or total == value
        assert "cannot be clipped" in message


def unreduced() -> str:
    mesh = world_mesh()
    p = nn.Parameter(laid_out(torch.zeros(4, 4), (mesh, [R])))
    p.grad = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    with pytest.raises(ValueError, match="parameter 0") as caught:
        clip_grad_norm_([p], 1.0)
    return str(caught.value)


def test_a_gradient_that_is_not_reduced_is_refused(ranks: Pools) -> None:
    """A07: the norm of a part that is still to be summed is no norm."""
    for message in ranks.run(2, unreduced):
        assert "Partial" in message
        assert "reduce and redistribute" in message


def model_with_torch() -> None:
    """Where torch's own works, on one mesh, it may be used."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    fully_shard(net, mesh=world_mesh())
    optimizer = Muon(muon_param_groups(net))
    net(torch.randn(4, 8)).square().sum().backward()
    before = [local(p.grad).clone() for p in net.parameters()]
    theirs: Any = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-2)
    for p, grad in zip(net.parameters(), before, strict=True):
        local(p.grad).copy_(grad)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    ours = clip_grad_norm_(params, 1e-2)
    torch.testing.assert_close(ours, theirs.full_tensor())
    assert clip_grad_norm_(net.parameters(), math.inf).item() == pytest.approx(1e-2, rel=1e-3)


def test_torchs_own_gives_the_same_where_it_works(ranks: Pools) -> None:
    ranks.run(2, model_with_torch)


def stages(order: float) -> float:
    """Two stages of two ranks, each with matrices of its own."""
    mesh = mesh_2d()
    here = mesh.get_local_rank("x")
    whole = [torch.randn(4 + stage, 3) for stage in range(2)]
    p = nn.Parameter(laid_out(torch.zeros_like(whole[here]), (mesh["y"], [S0])))
    p.grad = laid_out(whole[here], (mesh["y"], [S0])) if here == 0 or order != 1.0 else None
    total = clip_grad_norm_([p], 1.0, order, pipeline_group=mesh.get_group("x"))
    due = torch.cat([w.flatten() for w in whole[: 1 if order == 1.0 else 2]]).norm(order)
    torch.testing.assert_close(total, due)
    return total.item()


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_the_norm_of_a_pipeline_is_that_of_all_its_stages(ranks: Pools, order: float) -> None:
    """C11: stages that clip by their own norm scale by factors of their own."""
    assert len(set(ranks.run(4, stages, order))) == 1


def missing_on_one_rank() -> float:
    params = made("EP x FSDP", [torch.ones(shape) for shape in SHAPES])
    if dist.get_rank() == 0:
        for p in params:
            p.grad = None
    return clip_grad_norm_(params, 1.0).item()


def test_a_rank_without_gradients_takes_part(ranks: Pools) -> None:
    """B01: ranks without gradients stayed away, and the others waited."""
    assert len(ranks.run(4, missing_on_one_rank)) == 4
