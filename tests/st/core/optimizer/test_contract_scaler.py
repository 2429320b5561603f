# SPDX-License-Identifier: Apache-2.0
"""Loss scaling on ranks: one rank's overflow is a skip of all, and nobody waits."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hyper_parallel import GradScaler, Muon, clip_grad_norm_, muon_param_groups
from tests.pool import Pools

pytestmark = pytest.mark.dist

SCALE = 2.0**10


@cache
def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def local(tensor: Any) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def parts() -> tuple[list[nn.Parameter], Muon]:
    """A dense matrix over both ranks, a whole expert and a vector on each."""
    dense = nn.Parameter(distribute_tensor(torch.ones(4, 4), world_mesh(), [Shard(0)]))
    expert, vector = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    groups: list[dict[str, Any]] = [
        {"params": [dense, expert]},
        {"params": [vector], "algorithm": "adamw", "weight_decay": 0.0},
    ]
    return [dense, expert, vector], Muon(groups, lr=0.1)


def give_gradients(params: list[nn.Parameter], scale: float, overflow_on: int | None) -> None:
    whole = torch.arange(16.0).view(4, 4) + 1
    params[0].grad = distribute_tensor(scale * whole, world_mesh(), [Shard(0)])
    params[1].grad = scale * whole
    params[2].grad = scale * torch.ones(4)
    if dist.get_rank() == overflow_on:
        params[1].grad[0, 0] = torch.inf


def state_of(params: list[nn.Parameter], optimizer: Muon) -> list[Tensor]:
    states = [s for p in params for s in optimizer.state[p].values()]
    return [local(t).clone() for t in [*params, *states]]


def overflow(explicit: bool) -> tuple[float, float]:
    params, optimizer = parts()
    scaler = GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))  # torch makes the scale when it is first needed
    before = state_of(params, optimizer)
    give_gradients(params, SCALE, overflow_on=1)
    if explicit:
        scaler.unscale_(optimizer)
        clip_grad_norm_([params[0]], 1.0)
    scaler.step(optimizer)
    scaler.update()
    for now, then in zip(state_of(params, optimizer), before, strict=True):
        assert torch.equal(now, then), "a skipped step wrote something"
    skipped = scaler.get_scale()
    give_gradients(params, skipped, overflow_on=None)
    scaler.step(optimizer)
    scaler.update()
    due_params, due = parts()
    give_gradients(due_params, 1.0, overflow_on=None)
    due.step()
    pairs = zip(state_of(params, optimizer), state_of(due_params, due), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs), "a scale of two is no rounding"
    return skipped, scaler.get_scale()


@pytest.mark.parametrize("explicit", [False, True])
def test_an_overflow_on_one_rank_skips_on_all(ranks: Pools, explicit: bool) -> None:
    """B06: one rank skipped a step that communicates, and the other waited for it."""
    assert ranks.run(2, overflow, explicit) == [(SCALE / 2, SCALE / 2)] * 2


@cache
def own_mesh() -> DeviceMesh:
    """A mesh of this rank alone, an axis of the mesh of all."""
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("x", "y"))["y"]


def plain_scaler() -> tuple[float, str]:
    """torch reduces what it finds over the mesh of the first gradient only: here, of one rank."""
    expert = nn.Parameter(distribute_tensor(torch.ones(4, 4), own_mesh(), [Shard(0)]))
    dense = nn.Parameter(distribute_tensor(torch.ones(4, 4), world_mesh(), [Shard(0)]))
    params, whole = [expert, dense], torch.arange(16.0).view(4, 4) + 1
    optimizer = Muon(params, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))
    before = state_of(params, optimizer)
    expert.grad = distribute_tensor(SCALE * whole, own_mesh(), [Shard(0)], src_data_rank=None)
    dense.grad = distribute_tensor(SCALE * whole, world_mesh(), [Shard(0)])
    if dist.get_rank() == 1:
        local(expert.grad)[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    for now, then in zip(state_of(params, optimizer), before, strict=True):
        assert torch.equal(now, then)
    local(expert.grad).copy_(whole)
    with pytest.raises(RuntimeError) as caught:
        scaler.step(optimizer)
    return scaler.get_scale(), str(caught.value)


def test_torchs_own_scaler_makes_nobody_wait_and_scales_that_differ_are_told(ranks: Pools) -> None:
    """B06: its scale goes down on one rank alone, and gradients of two scales were averaged."""
    (first, message), (second, other) = ranks.run(2, plain_scaler)
    assert (first, second) == (SCALE, SCALE / 2)
    assert message == other
    assert "loss scale 1024.0" in message
    assert "loss scale 512.0" in message


def sharded_model(kind: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    alone = copy.deepcopy(net)
    fully_shard(net, mesh=world_mesh())
    optimizer, due = Muon(muon_param_groups(net)), Muon(muon_param_groups(alone))
    scaler: Any = {"ours": GradScaler, "torch": torch.amp.GradScaler, "sharded": ShardedGradScaler}[
        kind
    ]("cpu", init_scale=SCALE, growth_interval=2)
    for _ in range(4):
        x = torch.randn(2, 3, 4)
        optimizer.zero_grad()
        due.zero_grad()
        scaler.scale(net(x[dist.get_rank()]).square().mean()).backward()
        alone(x).square().mean().backward()
        if kind == "sharded":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        due.step()
    assert scaler.get_scale() == 4 * SCALE
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        assert isinstance(p, DTensor)
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("kind", ["ours", "torch", "sharded"])
def test_every_scaler_trains_a_sharded_model_as_one_process(ranks: Pools, kind: str) -> None:
    """What FSDP reduces is bad on all ranks or on none, so torch's scalers do, too."""
    ranks.run(2, sharded_model, kind)


def no_gradient_here() -> float:
    params, optimizer = parts()
    scaler = GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))
    give_gradients(params, SCALE, overflow_on=1)
    if dist.get_rank() == 0:
        for p in params:
            p.grad = None
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def test_a_rank_without_gradients_hears_of_the_overflow(ranks: Pools) -> None:
    """B06, B01: it had nothing to look at, and did not come to where verdicts are exchanged."""
    assert ranks.run(2, no_gradient_here) == [SCALE / 2] * 2


def other_optimizer() -> float:
    p = nn.Parameter(distribute_tensor(torch.ones(4), world_mesh(), [Replicate()]))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))
    p.grad = distribute_tensor(torch.ones(4), world_mesh(), [Replicate()])
    if dist.get_rank() == 1:
        local(p.grad)[0] = torch.nan
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def test_it_serves_any_optimizer(ranks: Pools) -> None:
    assert ranks.run(2, other_optimizer) == [SCALE / 2] * 2
