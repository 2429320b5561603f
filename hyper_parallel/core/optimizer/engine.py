# SPDX-License-Identifier: Apache-2.0
"""From parameter groups to a plan and the executor that runs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.optimizer.bucket import PlannedParam
from hyper_parallel.core.optimizer.collectives import ProcessGroups, current_rank
from hyper_parallel.core.optimizer.cost_model import (
    ACCELERATOR,
    CPU,
    ITEMSIZE,
    sharing_pays,
)
from hyper_parallel.core.optimizer.dtensor_layout import LayoutReader, local_tensor, meshes_of
from hyper_parallel.core.optimizer.executor import Executor
from hyper_parallel.core.optimizer.hyperparameters import orthogonalization_of
from hyper_parallel.core.optimizer.layout import ParamLayout
from hyper_parallel.core.optimizer.local_step import MuonParam
from hyper_parallel.core.optimizer.matrix_view import matrices_of, normalize_view
from hyper_parallel.core.optimizer.plan import Plan
from hyper_parallel.core.optimizer.planner import build_plan


@dataclass(frozen=True, slots=True)
class Engine:
    """What is fixed between two changes of the parameters.

    Attributes:
        params: All parameters of the optimizer, those of AdamW included.
        entries: Those that Muon steps on, in the plan's order.
        plan: The plan.
        executor: Its runner.
    """

    params: tuple[Tensor, ...]
    entries: tuple[MuonParam, ...]
    plan: Plan
    executor: Executor


def build_engine(
    groups: Sequence[tuple[Mapping[str, Any], Sequence[str]]],
    *,
    bucket_bytes: int,
    replica_route: str,
    replicate_mesh: DeviceMesh | None,
) -> Engine:
    """Read the layouts, make the plan and get ready to run it. Called on every rank.

    Args:
        groups: Each parameter group with the names of its parameters.
        bucket_bytes: See :func:`~hyper_parallel.core.optimizer.planner.build_plan`.
        replica_route: Likewise.
        replicate_mesh: Mesh over which plain tensors are replicated.

    Returns:
        The engine.

    Raises:
        ValueError: If a parameter's layout cannot be stepped on; the message names it.
    """
    rank = current_rank()
    reader = LayoutReader(rank, replicate_mesh)
    planned: list[PlannedParam] = []
    entries: list[MuonParam] = []
    for group, names in groups:
        if group["algorithm"] != "muon":
            continue
        for name, param in zip(names, group["params"], strict=True):
            layout = reader.read(param, name)
            local_shape = _checked_local_shape(name, param, layout, rank)
            plan_of = _planned_param(name, param, layout, group=group, rank=rank)
            finer = None if plan_of.source is plan_of.layout else plan_of.source
            planned.append(plan_of)
            entries.append(MuonParam(name, param, group, local_shape, finer))
    plan = build_plan(planned, rank=rank, bucket_bytes=bucket_bytes, replica_route=replica_route)
    process_groups = ProcessGroups(meshes_of([entry.param for entry in entries]))
    executor = Executor(plan, process_groups, _device_of(entries))
    params = tuple(p for group, _ in groups for p in group["params"])
    return Engine(params, tuple(entries), plan, executor)


def _planned_param(
    name: str, param: Tensor, layout: ParamLayout, *, group: Mapping[str, Any], rank: int
) -> PlannedParam:
    work = orthogonalization_of(group, name)
    view = normalize_view(group["matrix_view"], name)
    share = group["share_replicas"]
    if share == "auto":
        matrices = matrices_of(layout.shape, view, name)
        flops = sum(work.flops(matrix) for matrix in matrices)
        nbytes = param.numel() * ITEMSIZE[work.wire_dtype]
        hardware = CPU if param.device.type == "cpu" else ACCELERATOR
        share = sharing_pays(flops, nbytes, layout.num_shards, hardware)
    if group["shard_momentum"] and layout.num_replicas > 1:
        source = layout.cut_over_replicas()
    else:
        source = layout = layout if share else layout.without_replicas(rank)
    return PlannedParam(name=name, layout=layout, source=source, view=view, work=work)


def _checked_local_shape(
    name: str, param: Tensor, layout: ParamLayout, rank: int
) -> tuple[int, ...]:
    local_shape = tuple(local_tensor(param).shape)
    expected = layout.local_shape(layout.mesh.coordinate(rank))
    if local_shape != expected:
        raise ValueError(
            f"{name}: its placements give this rank a local shape of {expected}, but its local "
            f"tensor has {local_shape}; give DTensor.from_local the shape and stride of an "
            "unevenly sharded tensor"
        )
    return local_shape


def _device_of(entries: Sequence[MuonParam]) -> torch.device:
    devices = {local_tensor(entry.param).device: entry.name for entry in entries}
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(
            f"Muon's parameters must lie on one device per rank, got {places}; use one optimizer "
            "per device"
        )
    return next(iter(devices), torch.device("cpu"))
