# SPDX-License-Identifier: Apache-2.0
"""Gradients with inf or NaN on one rank: all ranks say the same, and do the same."""

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from hyper_parallel import Muon
from tests.dist import run_ranks

pytestmark = pytest.mark.dist

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "FSDP": ((4,), (Shard(0),)),
    "HSDP": ((2, 2), (Replicate(), Shard(0))),
    "FSDP x TP": ((2, 2), (Shard(0), Shard(1))),
    "DDP": ((4,), (Replicate(),)),
}
SPOILED = 2  # the rank whose gradient is spoiled


def build(
    mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], **options: object
) -> tuple[Muon, list[nn.Parameter]]:
    """Three matrices on the mesh, one bias for AdamW, and a matrix of each half of the ranks."""
    mesh = init_device_mesh("cpu", mesh_shape)
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "rank"))["rank"]
    torch.manual_seed(0)
    shapes = [(8, 8), (8, 12), (8, 8)]
    params = [nn.Parameter(distribute_tensor(torch.randn(s), mesh, placements)) for s in shapes]
    bias = nn.Parameter(distribute_tensor(torch.randn(8), mesh, [Replicate()] * mesh.ndim))
    torch.manual_seed(dist.get_rank() // 2)
    half = nn.Parameter(distribute_tensor(torch.randn(8, 8), halves, [Shard(0)]))
    for p in [*params, bias, half]:
        p.grad = torch.ones_like(p) + p.detach()
    names = [*((f"layer.{i}", p) for i, p in enumerate(params)), ("half", half)]
    groups: list[dict[str, Any]] = [
        {"params": names},
        {"params": [("bias", bias)], "algorithm": "adamw"},
    ]
    optimizer = Muon(
        groups,
        ns_dtype=torch.float32,
        share_replicas=True,
        **options,  # type: ignore[arg-type]
    )
    return optimizer, [*params, half, bias]


def contents(optimizer: Muon, params: list[nn.Parameter]) -> list[Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*params, *states]
    return [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in tensors]


def spoil(param: nn.Parameter, value: float) -> None:
    assert isinstance(param.grad, DTensor)
    if dist.get_rank() == SPOILED:
        param.grad.to_local().view(-1)[-1] = value


def spoiled_step(
    layout: str, position: int, policy: str, value: float, bucket_bytes: int
) -> tuple[str, bool, bool]:
    optimizer, params = build(*LAYOUTS[layout], nonfinite=policy, bucket_bytes=bucket_bytes)
    optimizer.step()
    before = contents(optimizer, params)
    good = [p.grad.clone() for p in params if p.grad is not None]
    spoil(params[position], value)
    if policy == "raise":
        with pytest.raises(RuntimeError) as error:
            optimizer.step()
        said = str(error.value)
    else:
        with pytest.warns(UserWarning, match="left out") as caught:
            optimizer.step()
        said = str(caught[0].message)
    untouched = all(map(torch.equal, contents(optimizer, params), before))
    for p, gradient in zip(params, good, strict=True):
        p.grad = gradient
    optimizer.step()  # the next one works again
    twin, twins = build(*LAYOUTS[layout])
    twin.step()
    twin.step()
    goes_on = all(map(torch.equal, contents(optimizer, params), contents(twin, twins)))
    return said, untouched, goes_on


NAMES = ("layer.0", "layer.1", "layer.2", "half", "bias")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("position", "bucket_bytes", "policy"),
    [(1, 10**9, "raise"), (2, 1, "skip"), (3, 10**9, "skip"), (4, 1, "raise")],
)
def test_a_bad_gradient_on_one_rank_is_named_on_all_and_nothing_is_written(
    layout: str, position: int, bucket_bytes: int, policy: str
) -> None:
    """Also on the ranks that have no part in the parameter, and for AdamW's."""
    value = math.nan if policy == "raise" else -math.inf
    outcomes = run_ranks(4, spoiled_step, layout, position, policy, value, bucket_bytes)
    said = {text for text, _, _ in outcomes}
    assert len(said) == 1
    assert f"rank 2 cannot step: its part of the gradient of {NAMES[position]} " in said.pop()
    assert all(untouched for _, untouched, _ in outcomes)
    assert all(goes_on for _, _, goes_on in outcomes)


def propagated(layout: str) -> tuple[bool, bool]:
    optimizer, params = build(*LAYOUTS[layout], nonfinite="propagate")
    twin, twins = build(*LAYOUTS[layout])
    spoil(params[1], math.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    twin.step()
    local = [p.to_local() for p in params if isinstance(p, DTensor)]
    expected = [p.to_local() for p in twins if isinstance(p, DTensor)]
    others = [i for i in range(len(params)) if i != 1]
    return bool(local[1].isnan().all()), all(torch.equal(local[i], expected[i]) for i in others)


@pytest.mark.parametrize("layout", ["FSDP", "FSDP x TP"])
def test_propagate_spoils_its_own_matrix_on_all_ranks_and_no_other(layout: str) -> None:
    for spoiled, others_are_right in run_ranks(4, propagated, layout):
        assert spoiled
        assert others_are_right


def different_policies() -> str:
    policy = "skip" if dist.get_rank() == 1 else "raise"
    optimizer, _ = build(*LAYOUTS["FSDP"], nonfinite=policy)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


def test_ranks_with_different_policies_are_told_so() -> None:
    messages = set(run_ranks(4, different_policies))
    assert len(messages) == 1
    message = messages.pop()
    assert "nonfinite=skip" in message
    assert "nonfinite=raise" in message
