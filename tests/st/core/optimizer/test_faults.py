# SPDX-License-Identifier: Apache-2.0
"""No hang, no half update: whatever one rank does, all ranks say the same thing in seconds."""

import os
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from hyper_parallel import Muon
from hyper_parallel.core.optimizer import local_step
from hyper_parallel.core.optimizer.polar import orthogonalize_with_schedule
from tests.dist import run_ranks, run_ranks_outcomes

pytestmark = pytest.mark.dist

PLACEMENTS: dict[str, tuple[Placement, ...]] = {
    "FSDP": (Shard(0),),
    "DDP": (Replicate(),),
}


def build(placements: tuple[Placement, ...], **options: object) -> tuple[Muon, list[DTensor]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = []
    for i in range(4):
        local = torch.ones(2, 6 + i)
        tensor = DTensor.from_local(local, mesh, placements, run_check=False)
        params.append(torch.nn.Parameter(tensor))
    for p in params:
        p.grad = torch.ones_like(p)
    settings = {"share_replicas": True, "ns_dtype": torch.float32, **options}
    optimizer = Muon([(f"layer.{i}", p) for i, p in enumerate(params)], **settings)  # type: ignore[arg-type]
    return optimizer, params  # type: ignore[return-value]


def snapshot(optimizer: Muon, params: list[DTensor]) -> list[Tensor]:
    buffers = [optimizer.state[p]["momentum_buffer"] for p in params]
    return [t.to_local().detach().clone() for t in [*params, *buffers]]


def step_fails(optimizer: Muon, params: list[DTensor]) -> str:
    """Step, expect a failure that changes nothing, and return what it says."""
    before = snapshot(optimizer, params)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert all(map(torch.equal, snapshot(optimizer, params), before)), "something was written"
    return str(caught.value)


def missing_gradient(placements: tuple[Placement, ...], bucket_bytes: int) -> str:
    optimizer, params = build(placements, bucket_bytes=bucket_bytes)
    optimizer.step()
    if dist.get_rank() == 1:
        params[2].grad = None
    message = step_fails(optimizer, params)
    params[2].grad = torch.ones_like(params[2])
    optimizer.step()  # and goes on once the cause is gone
    return message


@pytest.mark.parametrize("placements", PLACEMENTS.values(), ids=PLACEMENTS.keys())
@pytest.mark.parametrize("bucket_bytes", [40, 10**9])
def test_a_gradient_missing_on_one_rank_is_named_on_all(
    placements: tuple[Placement, ...], bucket_bytes: int
) -> None:
    """B01: before anything is written; and the next step works."""
    messages = run_ranks(3, missing_gradient, placements, bucket_bytes, timeout_s=30)
    assert len(set(messages)) == 1
    assert "layer.2" in messages[0]
    assert "rank 1 has no gradient" in messages[0]
    assert "ranks 0, 2 have a gradient" in messages[0]
    assert "No weight and no optimizer state was changed" in messages[0]


def no_gradient_at_all_on_one_rank(placements: tuple[Placement, ...]) -> str:
    optimizer, params = build(placements)
    if dist.get_rank() == 0:
        optimizer.zero_grad()
    return step_fails(optimizer, params)


@pytest.mark.parametrize("placements", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_a_rank_without_any_gradient_is_named_on_all(placements: tuple[Placement, ...]) -> None:
    messages = run_ranks(2, no_gradient_at_all_on_one_rank, placements, timeout_s=30)
    assert len(set(messages)) == 1
    assert "rank 0 has no gradient for layer.0" in messages[0]


def wrong_gradient(kind: str) -> str:
    optimizer, params = build((Shard(0),))
    if dist.get_rank() == 1:
        p = params[1]
        if kind == "partial":
            params[1].grad = DTensor.from_local(
                torch.ones(4, 7), p.device_mesh, [Partial()], run_check=False
            )
        elif kind == "layout":
            other = torch.ones(4, 7 // 2 + 1 - dist.get_rank())
            params[1].grad = DTensor.from_local(
                other,
                p.device_mesh,
                [Shard(1)],
                run_check=False,
                shape=torch.Size((4, 7)),
                stride=(7, 1),
            )
    return step_fails(optimizer, params)


@pytest.mark.parametrize("kind", ["partial", "layout"])
def test_a_gradient_in_another_layout_is_refused_on_all_ranks(kind: str) -> None:
    """A07: a gradient that is not reduced is never taken for one that is."""
    messages = run_ranks(2, wrong_gradient, kind, timeout_s=30)
    assert len(set(messages)) == 1
    assert "rank 1 cannot step: layer.1" in messages[0]
    assert "redistribute the gradient" in messages[0]


def raise_in_compute(bucket_bytes: int, fail_at: int) -> str:
    optimizer, params = build((Shard(0),), bucket_bytes=bucket_bytes)
    optimizer.step()
    calls = 0
    compute = orthogonalize_with_schedule

    def failing(*args: object, **kwargs: object) -> Tensor:
        nonlocal calls
        calls += 1
        if dist.get_rank() == 1 and calls == fail_at:
            raise MemoryError("out of memory, as it were")
        return compute(*args, **kwargs)  # type: ignore[arg-type]

    with mock.patch.object(local_step, "orthogonalize_with_schedule", failing):
        if fail_at == 1:
            return step_fails(optimizer, params)
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        return str(caught.value)


@pytest.mark.parametrize("bucket_bytes", [60, 10**9])
def test_a_rank_that_raises_in_its_first_computation_changes_nothing(bucket_bytes: int) -> None:
    """B03: its peers learn of it from the packet."""
    messages = run_ranks(2, raise_in_compute, bucket_bytes, 1, timeout_s=30)
    assert len(set(messages)) == 1
    assert "rank 1 cannot step: MemoryError: out of memory" in messages[0]


def raise_in_prepare() -> str:
    optimizer, params = build((Shard(0),))
    optimizer.step()
    if dist.get_rank() == 0:
        with mock.patch.object(local_step, "directions", side_effect=MemoryError("no room")):
            return step_fails(optimizer, params)
    return step_fails(optimizer, params)


def test_a_rank_that_raises_before_it_sends_changes_nothing() -> None:
    messages = run_ranks(2, raise_in_prepare, timeout_s=30)
    assert len(set(messages)) == 1
    assert "rank 0 cannot step: MemoryError: no room" in messages[0]


def test_a_rank_that_raises_later_says_that_a_part_is_written() -> None:
    messages = run_ranks(2, raise_in_compute, 60, 2, timeout_s=30)
    assert len(set(messages)) == 1
    assert "Part of the parameters has been updated" in messages[0]


def other_order() -> str:
    _, params = build((Replicate(),))
    named = [(f"layer.{i}", p) for i, p in enumerate(params)]
    if dist.get_rank() == 1:
        named.reverse()
    optimizer = Muon(named, share_replicas=True)
    return step_fails(optimizer, params)


def other_shape() -> str:
    mesh = init_device_mesh("cpu", (2,))
    columns = 4 + dist.get_rank()
    local = torch.ones(2, columns)
    p = torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
    p.grad = torch.ones_like(p)
    optimizer = Muon([("weight", p)])
    return step_fails(optimizer, [p])  # type: ignore[list-item]


def other_coefficients() -> str:
    optimizer, params = build((Shard(0),), ns_steps=5 + dist.get_rank())
    return step_fails(optimizer, params)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (other_order, ("layer.0", "layer.3")),
        (other_shape, ("weight", "(4, 4)", "(4, 5)")),
        (other_coefficients, ("layer.0", "coefficients")),
    ],
    ids=["order", "shape", "coefficients"],
)
def test_ranks_with_different_plans_say_where_they_differ(
    body: Callable[[], str], names: tuple[str, ...]
) -> None:
    """A34: compared once, before the first exchange."""
    messages = run_ranks(2, body, timeout_s=30)
    assert len(set(messages)) == 1
    assert "ranks disagree about the optimizer's plan" in messages[0]
    for name in names:
        assert name in messages[0]


def other_learning_rate() -> str:
    optimizer, params = build((Replicate(),))
    optimizer.step()
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["lr"] = 0.5
    return step_fails(optimizer, params)


def test_a_learning_rate_that_differs_between_ranks_is_found_at_once() -> None:
    """Replicas would drift apart without a word."""
    messages = run_ranks(2, other_learning_rate, timeout_s=30)
    assert len(set(messages)) == 1
    assert "lr=0.5" in messages[0]
    assert "lr=0.001" in messages[0]


def failure_in_one_of_two_domains() -> str:
    """Ranks 0 and 1 share one mesh, ranks 1 and 2 another; rank 0 fails."""
    rank = dist.get_rank()
    left, right = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
    params = []
    for name, mesh in (("left", left), ("right", right)):
        if mesh.get_coordinate() is not None:
            tensor = DTensor.from_local(torch.ones(2, 5), mesh, [Shard(0)], run_check=False)
            params.append((name, torch.nn.Parameter(tensor)))
    for _, p in params:
        p.grad = torch.ones_like(p)
    optimizer = Muon(params, bucket_bytes=8)
    optimizer.step()
    if rank == 0:
        params[0][1].grad = torch.ones(4, 5)
    return step_fails(optimizer, [p for _, p in params])  # type: ignore[misc]


def test_a_failure_reaches_ranks_that_share_no_parameter_with_it() -> None:
    messages = run_ranks(3, failure_in_one_of_two_domains, timeout_s=30)
    assert all("rank 0 cannot step: left" in message for message in messages)


def never_arrives() -> str:
    optimizer, _ = build((Shard(0),))
    optimizer.step()
    if dist.get_rank() == 1:
        time.sleep(8)
        return "late"
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_never_arrives_is_reported_with_the_bucket() -> None:
    """The process group's timeout surfaces, and says what was waited for."""
    waiting, _ = run_ranks_outcomes(2, never_arrives, timeout_s=30, group_timeout_s=3)
    assert "bucket 0 of 1 (gather among ranks [0, 1], starts with layer.0)" in waiting
    assert "did not complete" in waiting


def dies() -> str:
    optimizer, _ = build((Shard(0),))
    optimizer.step()
    if dist.get_rank() == 1:
        os._exit(1)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_dies_is_reported_with_the_bucket() -> None:
    waiting, _ = run_ranks_outcomes(2, dies, timeout_s=30)
    assert "bucket 0 of 1" in waiting
    assert "did not complete: a rank failed" in waiting


def no_domain_is_changed_if_one_cannot_open() -> str:
    """Two meshes over the same ranks but different sets: nothing of the first is written."""
    world, pair = init_device_mesh("cpu", (3,)), DeviceMesh("cpu", [0, 1])
    params = []
    for name, mesh in (("all", world), ("pair", pair)):
        if mesh.get_coordinate() is not None:
            tensor = DTensor.from_local(torch.ones(2, 5), mesh, [Shard(0)], run_check=False)
            params.append((name, torch.nn.Parameter(tensor)))
    for _, p in params:
        p.grad = torch.ones_like(p)
    optimizer = Muon(params)
    optimizer.step()
    if dist.get_rank() == 1:
        params[1][1].grad = None
    before = snapshot(optimizer, [p for _, p in params])  # type: ignore[misc]
    message = ""
    try:
        optimizer.step()
    except RuntimeError as error:
        message = str(error)
        after = snapshot(optimizer, [p for _, p in params])  # type: ignore[misc]
        assert all(map(torch.equal, after, before))
    return message


def test_nothing_is_written_if_a_later_domain_cannot_open() -> None:
    """Not even on rank 2, which has no part in the mesh that fails."""
    messages = run_ranks(3, no_domain_is_changed_if_one_cannot_open, timeout_s=30)
    for message in messages:
        assert "no gradient for pair" in message
        assert "No weight and no optimizer state was changed" in message
