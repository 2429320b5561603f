# SPDX-License-Identifier: Apache-2.0
"""Whether the replicas of a parameter split its work between them. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hyper_parallel.core.optimizer.bucket import Orthogonalization, PlannedParam
from hyper_parallel.core.optimizer.cost_model import (
    ACCELERATOR,
    CPU,
    ITEMSIZE,
    sharing_pays,
)
from hyper_parallel.core.optimizer.layout import ParamLayout
from hyper_parallel.core.optimizer.matrix_view import MatrixView, matrices_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPolicy:
    """What a parameter group says about replicas.

    Attributes:
        share: Whether they split the work: True, False, or ``"auto"`` by cost.
        shard_momentum: Whether they keep momentum once between them.
    """

    share: bool | str
    shard_momentum: bool


def shared_param(
    name: str,
    layout: ParamLayout,
    view: MatrixView,
    *,
    work: Orthogonalization,
    policy: ReplicaPolicy,
) -> PlannedParam:
    """A parameter whose replicas share its work; :func:`decide_sharing` has the last word.

    Args:
        name: Its name.
        layout: Where it lives.
        view: What its matrices are.
        work: How they are orthogonalized.
        policy: What its group says.

    Returns:
        The record, momentum cut over the replicas if the group asks for that.
    """
    split = policy.shard_momentum and layout.num_replicas > 1
    source = layout.cut_over_replicas() if split else layout
    return PlannedParam(name=name, layout=layout, source=source, view=view, work=work)


def decide_sharing(
    planned: Sequence[PlannedParam], policies: Sequence[ReplicaPolicy], rank: int
) -> list[PlannedParam]:
    """Leave the replicas to themselves where the group says so, or where sharing does not pay.

    With ``"auto"`` one small parameter on a mesh alone is shared all the same: what replicas
    exchange also tells them that they step alike.

    Args:
        planned: Parameters as if all were shared.
        policies: What their groups say.
        rank: Global rank whose plan it is.

    Returns:
        The parameters, the unshared ones with the layout of this rank's own copy.
    """
    pays = [_pays(param, policy) for param, policy in zip(planned, policies, strict=True)]
    busy = {
        p.layout.mesh
        for p, is_shared in zip(planned, pays, strict=True)
        if is_shared and len(p.layout.mesh.ranks) > 1
    }
    exchanging = {mesh.members for mesh in busy}
    alone_on = {mesh: mesh.members not in exchanging for mesh in {p.layout.mesh for p in planned}}
    decided: list[PlannedParam] = []
    for param, policy, is_shared in zip(planned, policies, pays, strict=True):
        if is_shared or (policy.share == "auto" and alone_on[param.layout.mesh]):
            decided.append(param)
        else:
            own = param.layout.without_replicas(rank)
            decided.append(replace(param, layout=own, source=own))
    return decided


def _pays(param: PlannedParam, policy: ReplicaPolicy) -> bool:
    if policy.share != "auto":
        return bool(policy.share)
    if policy.shard_momentum or param.layout.num_shards > 1:
        return True
    matrices = matrices_of(param.layout.shape, param.view, param.name)
    flops = sum(param.work.flops(matrix) for matrix in matrices)
    nbytes = sum(matrix.numel for matrix in matrices) * ITEMSIZE[param.work.wire_dtype]
    hardware = CPU if param.work.device_type == "cpu" else ACCELERATOR
    return sharing_pays(flops, nbytes, param.layout.num_shards, hardware)
