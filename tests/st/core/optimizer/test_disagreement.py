# SPDX-License-Identifier: Apache-2.0
"""Ranks that do not mean the same thing: found before anything is written, also where nothing
travels for the parameter in question."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from hyper_parallel import Muon
from tests.dist import run_ranks, run_ranks_outcomes

pytestmark = pytest.mark.dist


def message_of(optimizer: Muon) -> str:
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return f"stepped with {optimizer.plan.num_collectives} collectives"


def rows_guessed(rows: tuple[int, ...]) -> str:
    mesh = init_device_mesh("cpu", (4,))
    local = torch.ones(rows[dist.get_rank()], 3)
    p = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
    p.grad = torch.ones_like(p)
    return message_of(Muon([("uneven", p)]))


@pytest.mark.parametrize("rows", [(3, 3, 3, 0), (2, 2, 2, 0)])
def test_a_rank_that_believes_in_no_rows_is_told_too(rows: tuple[int, ...]) -> None:
    """A06: a guessed shape makes the last rank believe that there is nothing to do."""
    messages = run_ranks(4, rows_guessed, rows, timeout_s=30)
    assert len(set(messages)) == 1
    assert "uneven" in messages[0]
    assert "(0, 3)" in messages[0]


def exchanged_parameters() -> None:
    p = nn.Parameter(torch.ones(4, 4))
    optimizer = Muon([("w", p)])
    p.grad = torch.ones(4, 4)
    optimizer.step()
    mesh = init_device_mesh("cpu", (2,))
    q = nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
    optimizer.param_groups[0]["params"] = [q]
    q.grad = torch.ones_like(q)
    optimizer.step()
    assert set(optimizer.state) == {q}
    assert list(optimizer.state_dict()["state"]) == [0]
    assert optimizer.state[q]["momentum_buffer"].placements == (Shard(0),)


def test_state_of_parameters_that_were_exchanged_is_dropped() -> None:
    """C25: frameworks put DTensors in the place of what the optimizer was built with."""
    run_ranks(2, exchanged_parameters)


def adamw_differs(kind: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    w: Any = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    b: Any = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    lr = 0.5 + (rank if kind == "lr" else 0)
    optimizer = Muon(
        [{"params": [("w", w)]}, {"params": [("b", b)], "algorithm": "adamw", "lr": lr}]
    )
    w.grad = torch.ones_like(w)
    if kind == "lr" or rank == 0:
        b.grad = torch.ones_like(b)
    message = message_of(optimizer)
    assert torch.equal(w.to_local(), torch.ones(2, 4))
    assert torch.equal(b.to_local(), torch.ones(4))
    return message


@pytest.mark.parametrize(("kind", "word"), [("missing", "no gradient for b"), ("lr", "lr=1.5")])
def test_replicas_that_adamw_steps_on_are_held_together_too(kind: str, word: str) -> None:
    """B01, A30: they ride on the headers of the exchanges that Muon has anyway."""
    messages = run_ranks(2, adamw_differs, kind, timeout_s=30)
    assert len(set(messages)) == 1
    assert word in messages[0]


def gradient_on_one_replica(share: Any) -> str:
    mesh = init_device_mesh("cpu", (2,))
    w = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
    if dist.get_rank() == 0:
        w.grad = torch.ones_like(w)
    return message_of(Muon([("w", w)], share_replicas=share))


@pytest.mark.filterwarnings("ignore:step")
@pytest.mark.parametrize("share", ["auto", True])
def test_small_replicas_notice_a_missing_gradient_by_default(share: Any) -> None:
    """B01: sharing does not pay for 4 x 4, but drifting apart costs more."""
    messages = run_ranks(2, gradient_on_one_replica, share, timeout_s=30)
    assert len(set(messages)) == 1
    assert "rank 1 has no gradient for w" in messages[0]


def parameter_on_one_rank_only() -> str:
    mesh = init_device_mesh("cpu", (2,))
    w = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    v = nn.Parameter(torch.ones(4, 4))
    w.grad, v.grad = torch.ones_like(w), torch.ones_like(v)
    return message_of(Muon([("w", w)] if dist.get_rank() == 0 else [("v", v)]))


def test_a_rank_without_the_parameter_is_waited_for_by_name() -> None:
    """A34: who waits says what was being compared, and where it starts."""
    waiting, _ = run_ranks_outcomes(2, parameter_on_one_rank_only, timeout_s=30, group_timeout_s=3)
    assert "ranks [0, 1] could not compare their plans" in waiting
    assert "parameter w" in waiting


def mesh_without_this_rank() -> str:
    mesh = DeviceMesh("cpu", [0, 2])
    p = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None))
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="w: its mesh of shape") as caught:
            Muon([("w", p)])
        return str(caught.value)
    return ""


def test_a_mesh_without_this_rank_is_named_by_its_ranks() -> None:
    """B05"""
    message = run_ranks(3, mesh_without_this_rank)[1]
    assert "over ranks [0, 2] does not contain this rank (1)" in message


def whole_gradient(algorithm: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model: Any = parallelize_module(
        nn.Sequential(nn.Embedding(8, 4)), mesh, {"0": RowwiseParallel(input_layouts=Replicate())}
    )
    weight = model[0].weight
    whole = weight.full_tensor().detach()
    model(torch.arange(8) % 3).square().sum().backward()
    assert weight.grad.placements == (Replicate(),)
    alone = nn.Parameter(whole.clone())
    alone.grad = weight.grad.to_local().clone()
    options: dict[str, Any] = {"lr": 0.1, "ns_dtype": torch.float64}
    Muon([{"params": [weight], "algorithm": algorithm}], **options).step()
    Muon([{"params": [alone], "algorithm": algorithm}], **options).step()
    torch.testing.assert_close(weight.full_tensor().detach(), alone.detach())


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_whole_gradient_of_a_sharded_parameter_is_cut(algorithm: str) -> None:
    """Torch's row-wise embedding leaves one; to cut it needs no message."""
    run_ranks(2, whole_gradient, algorithm)
