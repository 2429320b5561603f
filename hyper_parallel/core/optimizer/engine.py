# SPDX-License-Identifier: Apache-2.0
"""From parameter groups to a plan and the executor that runs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.optimizer.bucket import Orthogonalization, PlannedParam
from hyper_parallel.core.optimizer.collectives import ProcessGroups, current_rank, world_size
from hyper_parallel.core.optimizer.dtensor_layout import LayoutReader, local_tensor, meshes_of
from hyper_parallel.core.optimizer.executor import Executor
from hyper_parallel.core.optimizer.hyperparameters import orthogonalization_of
from hyper_parallel.core.optimizer.layout import ParamLayout
from hyper_parallel.core.optimizer.matrix_view import normalize_view
from hyper_parallel.core.optimizer.plan import Plan
from hyper_parallel.core.optimizer.planner import build_plan
from hyper_parallel.core.optimizer.sharing import ReplicaPolicy, decide_sharing, shared_param
from hyper_parallel.core.optimizer.stepped_param import SteppedParam, param_names
from hyper_parallel.core.optimizer.symmetric_kernels import check_kernels

_PLANNED_KEYS: Final = (
    "algorithm",
    "ns_coefficients",
    "ns_steps",
    "eps",
    "ns_method",
    "ns_dtype",
    "momentum_dtype",
    "share_replicas",
    "shard_momentum",
    "matrix_view",
)
"""Settings that the plan depends on; the others are read at every step."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What is fixed between two changes of the parameters.

    Attributes:
        basis: What it was built from; see :func:`basis_of`.
        entries: The parameters that Muon steps on, in the plan's order.
        others: Those that AdamW steps on.
        plan: The plan.
        executor: Its runner.
    """

    basis: tuple[object, ...]
    entries: tuple[SteppedParam, ...]
    others: tuple[SteppedParam, ...]
    plan: Plan
    executor: Executor


def basis_of(groups: Sequence[Mapping[str, Any]]) -> tuple[object, ...]:
    """What an engine depends on: if it changes, so does the plan.

    Args:
        groups: The parameter groups.

    Returns:
        Identities and settings, to be compared with ``==``.
    """
    basis: list[object] = []
    for group in groups:
        basis.append(id(group))
        basis += map(id, group["params"])
        basis.append(str(group["params"][0].device))  # models are moved as a whole
        basis += [str(group.get(key)) for key in _PLANNED_KEYS]
    return tuple(basis)


@torch.no_grad()  # local tensors are read as they lie, without a record for autograd
def build_engine(
    groups: Sequence[Mapping[str, Any]],
    *,
    bucket_bytes: int,
    replica_route: str,
    replicate_mesh: DeviceMesh | None,
) -> Engine:
    """Read the layouts, make the plan and get ready to run it. Called on every rank.

    Args:
        groups: The parameter groups.
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
    entries: list[SteppedParam] = []
    others: list[SteppedParam] = []
    policies: list[ReplicaPolicy] = []
    for number, group in enumerate(groups):
        settings = None if group["algorithm"] == "adamw" else _Settings(group, f"group {number}")
        for name, param in zip(param_names(group, number), group["params"], strict=True):
            local_shape = tuple(local_tensor(param).shape)
            if settings is None:
                ranks = reader.ranks_of(param, name)
                others.append(SteppedParam(name, param, group, local_shape, param.dtype, ranks))
                continue
            layout = reader.read(param, name)
            ranks = layout.mesh.members
            _check_local_shape(name, local_shape, layout, rank)
            work = settings.work_on(param.device.type)
            plan_of = shared_param(name, layout, settings.view, work=work, policy=settings.policy)
            finer = None if plan_of.source is plan_of.layout else plan_of.source
            planned.append(plan_of)
            policies.append(settings.policy)
            entries.append(SteppedParam(name, param, group, local_shape, param.dtype, ranks, finer))
    for entry in [*entries, *others]:
        _check_world(entry)
    planned = decide_sharing(planned, policies, rank)
    plan = build_plan(planned, rank=rank, bucket_bytes=bucket_bytes, replica_route=replica_route)
    process_groups = ProcessGroups(meshes_of([entry.param for entry in entries]))
    # Replicas that share no work exchange nothing for it, but must step alike all the same.
    shared: dict[tuple[int, ...], list[int]] = {}
    for i, entry in enumerate([*entries, *others]):
        shared.setdefault(entry.ranks, []).append(i)
        if i < len(planned) and planned[i].layout.mesh.members != entry.ranks:
            shared.setdefault(planned[i].layout.mesh.members, []).append(i)
    executor = Executor(plan, process_groups, _device_of(entries), shared)
    return Engine(basis_of(groups), tuple(entries), tuple(others), plan, executor)


class _Settings:
    """What the parameters of a Muon group have in common."""

    def __init__(self, group: Mapping[str, Any], label: str) -> None:
        self.view = normalize_view(group["matrix_view"], label)
        self.policy = ReplicaPolicy(
            share=group["share_replicas"], shard_momentum=group["shard_momentum"]
        )
        self._group = group
        self._label = label
        self._work: dict[str, Orthogonalization] = {}

    def work_on(self, device_type: str) -> Orthogonalization:
        """How their matrices are orthogonalized on a device."""
        if device_type not in self._work:
            work = orthogonalization_of(self._group, self._label, device_type=device_type)
            if device_type != "meta":  # what is not there yet will be read again
                check_kernels(work.method, dtype=work.dtype, device_type=device_type)
            self._work[device_type] = work
        return self._work[device_type]


def _check_local_shape(
    name: str, local_shape: tuple[int, ...], layout: ParamLayout, rank: int
) -> None:
    expected = layout.local_shape(layout.mesh.coordinate(rank))
    if local_shape != expected:
        raise ValueError(
            f"{name}: its placements give this rank a local shape of {expected}, but its local "
            f"tensor has {local_shape}; give DTensor.from_local the shape and stride of an "
            "unevenly sharded tensor"
        )


def _check_world(entry: SteppedParam) -> None:
    if entry.ranks[-1] >= world_size():
        raise ValueError(
            f"{entry.name}: its mesh is over ranks {list(entry.ranks)}, but there are only "
            f"{world_size()} processes; build the mesh with init_device_mesh from ranks that run"
        )


def _device_of(entries: Sequence[SteppedParam]) -> torch.device:
    devices = {entry.param.device: entry.name for entry in entries}
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(
            f"Muon's parameters must lie on one device per rank, got {places}; use one optimizer "
            "per device"
        )
    return next(iter(devices), torch.device("cpu"))
