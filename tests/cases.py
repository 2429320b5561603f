# SPDX-License-Identifier: Apache-2.0
"""A distributed step against one process: one case, and the invariants that are checked on it.

Weights and gradients are drawn from the same seed on every rank and cut with torch's own
``distribute_tensor``, so neither the input nor the oracle uses the package's idea of a layout.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from hyper_parallel import Muon
from hyper_parallel.core.optimizer import agreement, executor
from hyper_parallel.core.optimizer.collectives import Transfer, gather_objects, start_all_to_all
from hyper_parallel.core.optimizer.local_step import LocalStep
from hyper_parallel.core.optimizer.report import received_bytes
from hyper_parallel.core.optimizer.torch_private import StridedShard
from tests.reference import ReferenceMuon, matrices

ORACLE_TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-4, torch.bfloat16: 6e-2}
"""Error of a weight over the way that it travelled, against the float64 oracle, by NS dtype.

The rounding of the weights themselves is not counted. The iteration amplifies the rounding of its
own dtype on badly conditioned squares, in one process as in many.
"""

SAME_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""The same against this optimizer on one process with whole tensors and the same dtypes."""


@dataclass(frozen=True)
class Mesh:
    """A mesh of a case; None for ``ranks`` means all ranks, row-major.

    Attributes:
        shape: Size of each axis.
        ranks: Global ranks, row-major.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Param:
    """A parameter of a case.

    Attributes:
        shape: Global shape.
        placements: Word per mesh axis: ``"R"``, ``"S0"`` or ``"X0/2"`` (strided, split factor 2).
            None for a plain tensor.
        mesh: Which of the case's meshes.
        group: Which of the case's groups.
        skips: Steps in which no rank has a gradient.
    """

    shape: tuple[int, ...]
    placements: tuple[str, ...] | None
    mesh: int = 0
    group: int = 0
    skips: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """What is stepped on.

    Attributes:
        meshes: The meshes.
        params: The parameters.
        groups: Hyperparameters of each group.
        options: Arguments of the optimizer.
        replicate_over_mesh: Whether plain tensors are replicated over the first mesh.
        dtype: Name of the parameters' dtype.
        num_steps: Steps to take.
        seed: Seed of weights and gradients.
    """

    meshes: tuple[Mesh, ...]
    params: tuple[Param, ...]
    groups: tuple[dict[str, Any], ...] = ({},)
    options: dict[str, Any] = field(default_factory=dict)
    replicate_over_mesh: bool = False
    dtype: str = "float32"
    num_steps: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a rank saw.

    Attributes:
        weight_error: Largest error of a weight over its way, against the oracle.
        same_error: The same, against this optimizer on one process.
        momentum_error: Largest relative error of a momentum.
        shards: For each parameter, what this rank holds: a hash of which elements, and of bits.
        num_orthogonalized: Matrices that this rank orthogonalized in the last step.
        num_expected: Matrices that one process orthogonalizes in the last step.
        plan: Text of the plan.
    """

    weight_error: float
    same_error: float
    momentum_error: float
    shards: tuple[tuple[str, str], ...]
    num_orthogonalized: int
    num_expected: int
    plan: str


_MESHES: dict[Mesh, DeviceMesh] = {}


def run_case(case: Case) -> Outcome:
    """Run a case on this rank, checking what one rank can see alone."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    device_meshes = [_device_mesh(mesh) for mesh in case.meshes]
    whole = [0.1 * torch.randn(p.shape, generator=generator) for p in case.params]
    whole = [w.to(dtype) for w in whole]
    params = [
        torch.nn.Parameter(_cut(w, p, device_meshes))
        for w, p in zip(whole, case.params, strict=True)
    ]
    mesh = device_meshes[0] if case.replicate_over_mesh else None
    optimizer = _optimizer(case, params, replicate_mesh=mesh)
    alone = [torch.nn.Parameter(w.clone()) for w in whole]
    optimizer_alone = _optimizer(case, alone)
    references = [
        _reference(case, w, p, optimizer) for w, p in zip(whole, case.params, strict=True)
    ]
    counted = [0]
    # How far each weight travels: the net displacement of a 1 x 1 matrix may cancel to nothing.
    travelled = [0.0 for _ in case.params]
    for step in range(case.num_steps):
        grads = [torch.randn(p.shape, generator=generator).to(dtype) for p in case.params]
        for q, r, g, p in zip(params, alone, grads, case.params, strict=True):
            q.grad = None if step in p.skips else _cut(g, p, device_meshes)
            r.grad = None if step in p.skips else g.clone()
        optimizer_alone.step()
        counted = _counted_step(optimizer, params)
        for i, (reference, g, p) in enumerate(zip(references, grads, case.params, strict=True)):
            before = reference.params[0].clone()
            reference.step([None if step in p.skips else g.double()])
            travelled[i] += (reference.params[0] - before).norm().item()
    whole_runs = list(zip(whole, alone, references, travelled, strict=True))
    return _outcome(case, params, whole_runs, optimizer, counted[0])


def assert_invariants(outcomes: Sequence[Outcome], case: Case, copies: int | None = None) -> None:
    """Check what only all ranks together show.

    Args:
        outcomes: One per rank.
        case: The case.
        copies: How often each matrix is orthogonalized; not checked if None.
    """
    ns_dtype = case.options.get("ns_dtype", torch.float64)
    coarse = torch.bfloat16 if case.dtype == "bfloat16" else ns_dtype
    for rank, outcome in enumerate(outcomes):
        assert outcome.weight_error <= ORACLE_TOLERANCE[coarse], (rank, outcome)
        assert outcome.same_error <= SAME_TOLERANCE[coarse], (rank, outcome)
        limit = 2e-2 if case.dtype == "bfloat16" else 1e-6
        assert outcome.momentum_error <= limit, (rank, outcome.momentum_error)
    for number in range(len(case.params)):
        bits: dict[str, set[str]] = {}
        for outcome in outcomes:
            which, value = outcome.shards[number]
            bits.setdefault(which, set()).add(value)
        assert all(len(values) == 1 for values in bits.values()), f"replicas of {number} differ"
    if copies is not None:
        total = sum(outcome.num_orthogonalized for outcome in outcomes)
        assert total == copies * outcomes[0].num_expected, "a matrix was not done exactly once"


def _optimizer(
    case: Case, params: Sequence[Tensor], replicate_mesh: DeviceMesh | None = None
) -> Muon:
    groups = [
        {"params": [q for q, p in zip(params, case.params, strict=True) if p.group == i], **group}
        for i, group in enumerate(case.groups)
    ]
    options = {"lr": 0.05, "ns_dtype": torch.float64, **case.options}
    return Muon([g for g in groups if g["params"]], replicate_mesh=replicate_mesh, **options)


def _counted_step(optimizer: Muon, params: Sequence[Tensor]) -> list[int]:
    """One step, with collectives, bytes and gradients checked."""
    before = [None if p.grad is None else _local(p.grad).clone() for p in params]
    orthogonalized = [0]
    received = [0]
    compute = LocalStep.compute

    def counting_compute(self: LocalStep, batch: Tensor, work: Any) -> None:
        orthogonalized[0] += batch.shape[0]
        compute(self, batch, work)

    def counting_transfer(packet: Tensor, out: Any, into: Any, group: Any) -> Transfer:
        own = into[dist.get_rank(group)]
        received[0] += (sum(into) - own) * packet.element_size()
        return start_all_to_all(packet, out, into, group)

    plan = optimizer.plan
    with (
        mock.patch.object(LocalStep, "compute", counting_compute),
        mock.patch.object(executor, "start_all_to_all", counting_transfer),
        mock.patch.object(agreement, "gather_objects", _agreement_only),
        CommDebugMode() as comm,
    ):
        optimizer.step()
    assert comm.get_total_counts() == plan.num_collectives, "collectives differ from the plan"
    planned = sum(received_bytes(plan.params, bucket, plan.rank) for bucket in plan.buckets)
    assert received[0] == planned, f"received {received[0]} bytes, planned {planned}"
    for p, old in zip(params, before, strict=True):
        assert (p.grad is None) == (old is None)
        if p.grad is not None and old is not None:
            assert torch.equal(_local(p.grad), old), "step modified a gradient"
    return orthogonalized


def _agreement_only(value: Any, group: Any) -> Any:
    """Before the first step ranks compare digests, which is no part of a step: not counted."""
    with torch._C._DisableTorchDispatch():
        return gather_objects(value, group)


def _reference(case: Case, whole: Tensor, param: Param, optimizer: Muon) -> ReferenceMuon:
    group = {**optimizer.defaults, **case.groups[param.group]}
    return ReferenceMuon(
        [whole.double().clone()],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        nesterov=group["nesterov"],
        adjust_lr_fn=group["adjust_lr_fn"],
        views=[group["matrix_view"]],
    )


def _outcome(
    case: Case,
    params: Sequence[Tensor],
    one_process: Sequence[tuple[Tensor, Tensor, ReferenceMuon, float]],
    optimizer: Muon,
    num_orthogonalized: int,
) -> Outcome:
    meshes = [_device_mesh(mesh) for mesh in case.meshes]
    weight_error = same_error = momentum_error = 0.0
    shards: list[tuple[str, str]] = []
    for q, p, (w, r, reference, path) in zip(params, case.params, one_process, strict=True):
        # What this rank should hold, cut by torch; errors relative to its way.
        due = _local(_cut(reference.params[0], p, meshes))
        moved = max(path, 1e-12)
        # Weights are rounded twice a step, however short the step is.
        rounding = 2 * case.num_steps * torch.finfo(w.dtype).eps / 2 * w.norm().item()
        error = max(0.0, (_local(q).double() - due).norm().item() - rounding)
        weight_error = max(weight_error, error / moved)
        same_due = _local(_cut(r.detach(), p, meshes)).double()
        same_error = max(same_error, ((_local(q).double() - same_due).norm() / moved).item())
        momentum = optimizer.state[q]["momentum_buffer"]
        m_due = reference.momenta[0]
        if isinstance(momentum, DTensor):
            cut = distribute_tensor(
                m_due, momentum.device_mesh, momentum.placements, src_data_rank=None
            )
            m_due = cut.to_local()
        m_norm = reference.momenta[0].norm().clamp(min=1e-12)
        m_error = (_local(momentum).double() - m_due).norm() / m_norm
        momentum_error = max(momentum_error, m_error.item())
        index = torch.arange(w.numel(), dtype=torch.float64).view(w.shape)
        shards.append((_hash(_local(_cut(index, p, meshes))), _hash(_local(q))))
    last = case.num_steps - 1
    expected = sum(
        sum(bool(m.numel()) for m in matrices(w, case.groups[p.group].get("matrix_view")))
        for (w, *_), p in zip(one_process, case.params, strict=True)
        if last not in p.skips
    )
    return Outcome(
        weight_error,
        same_error,
        momentum_error,
        tuple(shards),
        num_orthogonalized,
        expected,
        str(optimizer.plan),
    )


def _device_mesh(mesh: Mesh) -> DeviceMesh:
    if mesh not in _MESHES:
        ranks = mesh.ranks if mesh.ranks is not None else range(dist.get_world_size())
        _MESHES[mesh] = DeviceMesh("cpu", torch.tensor(list(ranks)).view(mesh.shape))
    return _MESHES[mesh]


def _cut(tensor: Tensor, param: Param, meshes: Sequence[DeviceMesh]) -> Tensor:
    if param.placements is None:
        return tensor.clone()
    placements = [_placement(word) for word in param.placements]
    # A replica would share the storage of what it is cut from.
    return distribute_tensor(tensor.clone(), meshes[param.mesh], placements, src_data_rank=None)


def _placement(word: str) -> Placement:
    if word == "R":
        return Replicate()
    if word.startswith("S"):
        return Shard(int(word[1:]))
    dim, factor = word[1:].split("/")
    strided: Placement = StridedShard(int(dim), split_factor=int(factor))
    return strided


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _hash(tensor: Tensor) -> str:
    shape = str(tuple(tensor.shape)).encode()
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return hashlib.sha256(shape + data).hexdigest()
