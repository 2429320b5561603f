# SPDX-License-Identifier: Apache-2.0
"""Ranks that had nothing to do must not fall out of step with the others."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hyper_parallel import Muon
from tests.dist import run_ranks

pytestmark = pytest.mark.dist


def counters(missing: str) -> tuple[list[str], float]:
    """Three steps, the second without a gradient on rank 1; what was raised, and the counter."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    matrix, scale = (
        torch.nn.Parameter(DTensor.from_local(torch.ones(shape), mesh, [Shard(0)], run_check=False))
        for shape in ((2, 6), (2,))
    )
    groups: list[dict[str, Any]] = [
        {"params": [("matrix", matrix)]},
        {"params": [("scale", scale)], "algorithm": "adamw", "lr": 0.1},
    ]
    optimizer = Muon(groups, lr=0.1)
    raised = []
    for step in range(3):
        for name, p in (("matrix", matrix), ("scale", scale)):
            absent = step == 1 and dist.get_rank() == 1 and missing in (name, "both")
            p.grad = None if absent else torch.ones_like(p)
        try:
            optimizer.step()
        except RuntimeError as error:
            raised.append(str(error))
    return raised, float(optimizer.state[scale]["step"])


@pytest.mark.parametrize("missing", ["matrix", "scale", "both"])
def test_a_rank_without_gradients_leaves_no_counter_behind(missing: str) -> None:
    """B01: it returned early, hung the others, and its counters were different afterwards."""
    (told, count), (other_told, other_count) = run_ranks(2, counters, missing, timeout_s=30)
    assert told == other_told
    assert len(told) == 1
    assert f"rank 1 has no gradient for {'matrix' if missing == 'both' else missing}" in told[0]
    assert count == other_count == 2
