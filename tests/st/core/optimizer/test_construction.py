# SPDX-License-Identifier: Apache-2.0
"""An optimizer of many parameters is built in seconds, on every rank."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hyper_parallel import Muon
from tests.dist import run_ranks

pytestmark = pytest.mark.dist

SHAPES = ((64, 32), (32, 64), (96, 32), (32, 32))


def build(number: int) -> float:
    """CPU seconds of building an optimizer."""
    num_ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (num_ranks,))
    params = []
    for i in range(number):
        rows, columns = SHAPES[i % len(SHAPES)]
        local = torch.zeros(rows // num_ranks, columns)
        cut = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        params.append((f"layers.{i}.weight", nn.Parameter(cut)))
    start = time.process_time()
    Muon(params)
    return time.process_time() - start


def test_ten_thousand_parameters_on_eight_ranks() -> None:
    """About 1.5 s a rank; the bound leaves room for a machine that does other things."""
    assert max(run_ranks(8, build, 10_000, timeout_s=110)) <= 5
