# SPDX-License-Identifier: Apache-2.0
"""What a step costs, counted on real ranks: FLOPs, bytes, collectives, and no hidden gather."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.flop_counter import FlopCounterMode

from hyper_parallel import Muon, orthogonalize
from hyper_parallel.core.optimizer import executor
from hyper_parallel.core.optimizer.collectives import Transfer, start_all_to_all
from tests.dist import run_ranks

pytestmark = pytest.mark.dist

D = 128
SHAPES = [(3 * D, D), (D, D), (4 * D, D), (D, 4 * D)] * 4
WHOLE_MB = sum(rows * cols for rows, cols in SHAPES) * 2 / 1e6

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "FSDP": ((4,), (Shard(0),)),
    "HSDP": ((2, 2), (Replicate(), Shard(0))),
    "FSDP x TP": ((2, 2), (Shard(0), Shard(1))),
    "DDP": ((4,), (Replicate(),)),
}
# In units of the bytes of all matrices: what a rank receives in a step, both ways.
RECEIVED = {"FSDP": 0.375, "HSDP": 0.5, "FSDP x TP": 0.375, "DDP": 0.75}
COLLECTIVES = {"FSDP": 2, "HSDP": 2, "FSDP x TP": 2, "DDP": 1}


def count(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> dict[str, float]:
    mesh = init_device_mesh("cpu", mesh_shape)
    params = [
        torch.nn.Parameter(distribute_tensor(torch.randn(s), mesh, placements, src_data_rank=None))
        for s in SHAPES
    ]
    optimizer = Muon(params, ns_method="standard", share_replicas=True)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    received = 0

    def counting(packet: torch.Tensor, out: Any, into: Any, group: Any) -> Transfer:
        nonlocal received
        received += (sum(into) - into[dist.get_rank(group)]) * packet.element_size()
        return start_all_to_all(packet, out, into, group)

    forbidden = mock.Mock(side_effect=AssertionError("a hidden gather"))
    with (
        mock.patch.object(executor, "start_all_to_all", counting),
        mock.patch.object(DTensor, "full_tensor", forbidden),
        mock.patch.object(DTensor, "redistribute", forbidden),
        CommDebugMode() as comm,
        FlopCounterMode(display=False) as flops,
    ):
        optimizer.step()
    return {
        "flops": flops.get_total_flops(),
        "received_mb": received / 1e6,
        "collectives": comm.get_total_counts(),
    }


def one_process_flops() -> int:
    with FlopCounterMode(display=False) as flops:
        for shape in SHAPES:
            orthogonalize(torch.randn(shape), method="standard")
    return int(flops.get_total_flops())


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_costs_its_ideal_share(name: str) -> None:
    """E01, E03, E07, C14: nothing twice, no padding, two collectives a bucket."""
    seen = run_ranks(4, count, *LAYOUTS[name])
    busiest = max(s["flops"] for s in seen) / one_process_flops()
    received = max(s["received_mb"] for s in seen) / WHOLE_MB
    assert busiest <= 0.26
    assert received <= RECEIVED[name] * 1.04
    assert {s["collectives"] for s in seen} == {COLLECTIVES[name]}
