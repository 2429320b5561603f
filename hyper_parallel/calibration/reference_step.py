# SPDX-License-Identifier: Apache-2.0
"""A real step, to see how much longer it takes than its parts do one by one.

In a step ranks wait for each other and for cores, threads of the transport compute beside them, and
caches are cold. No probe of one thing shows that, so one small model is stepped on, and all rates
are scaled until its prediction holds.
"""

from dataclasses import replace
from typing import Final

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hyper_parallel.core.optimizer.hardware import Hardware, Link
from hyper_parallel.core.optimizer.muon import Muon

_WIDTH: Final = {"cpu": 256, "cuda": 2048}


def reference_optimizer(num_ranks: int, device: torch.device) -> Muon:
    """An optimizer with gradients for a layer of a Llama per rank, cut by rows over all ranks.

    Args:
        num_ranks: How many ranks there are.
        device: Where this one works.

    Returns:
        The optimizer.
    """
    width = _WIDTH["cpu" if device.type == "cpu" else "cuda"]
    hidden = width * 8 // 3
    layer = [(width, width)] * 4 + [(hidden, width)] * 2 + [(width, hidden)]
    mesh = init_device_mesh(device.type, (num_ranks,))
    params = []
    for i, (rows, cols) in enumerate(layer * num_ranks):
        local = torch.randn(-(-rows // num_ranks), cols, device=device)
        # Rows are rounded up, so that all ranks have as many.
        param = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
        param.grad = DTensor.from_local(torch.randn_like(local), mesh, [Shard(0)], run_check=False)
        params.append((f"layers.{i}.weight", param))
    return Muon(params, lr=1e-6)


def scaled(hardware: Hardware, factor: float) -> Hardware:
    """The same machine, on which everything takes longer.

    Args:
        hardware: Rates.
        factor: How much longer.

    Returns:
        Other rates.
    """

    def link(one: Link) -> Link:
        return Link(latency_s=one.latency_s * factor, bytes_per_s=one.bytes_per_s / factor)

    return replace(
        hardware,
        matrix_rates={d: rate.faster(1 / factor) for d, rate in hardware.matrix_rates.items()},
        memory_bytes_per_s=hardware.memory_bytes_per_s / factor,
        operation_s=hardware.operation_s * factor,
        within_node=link(hardware.within_node),
        between_nodes=link(hardware.between_nodes),
    )
