# SPDX-License-Identifier: Apache-2.0
"""What is stepped on: parameters, gradients and meshes of each scenario, and the right answer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from hyper_parallel.core.optimizer.torch_private import StridedShard

LR = 0.02
MOMENTUM = 0.95
NS_STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)

SCENARIOS = {
    "fsdp": "FSDP",
    "hsdp": "HSDP",
    "fsdp-tp": "FSDP x TP",
    "fsdp-tp-columns": "FSDP x TP, column-wise",
    "ddp": "DDP",
    "experts": "experts",
    "many-small": "many small",
    "few-large": "few large",
    "model": "42 matrices",
}
"""Title of each scenario, in the order of the table."""

NEED_PAIRS = ("hsdp", "fsdp-tp", "fsdp-tp-columns")
"""Scenarios whose mesh has an axis of two."""


@dataclass(frozen=True)
class Job:
    """One scenario at one size; plain values, so that it travels to the ranks.

    Attributes:
        scenario: One of :data:`SCENARIOS`.
        ranks: Number of processes.
        size: The width ``d`` that all shapes derive from.
        blocks: Transformer blocks, where the scenario consists of blocks.
        eager: Whether peers that call ``torch.compile`` do without it.
    """

    scenario: str
    ranks: int
    size: int
    blocks: int = 4
    eager: bool = False


@dataclass(frozen=True)
class ParamSpec:
    """A parameter.

    Attributes:
        shape: Global shape.
        placements: One per mesh axis; None for a plain tensor that every rank holds.
    """

    shape: tuple[int, ...]
    placements: tuple[Placement, ...] | None


@dataclass(frozen=True)
class Work:
    """The parameters of a job.

    Attributes:
        mesh_shape: Size of each mesh axis.
        params: The parameters.
        what: The same in words.
    """

    mesh_shape: tuple[int, ...]
    params: tuple[ParamSpec, ...]
    what: str

    def matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of each matrix."""
        return [
            (spec.shape[-2], spec.shape[-1])
            for spec in self.params
            for _ in range(math.prod(spec.shape[:-2]))
        ]

    def flops(self) -> int:
        """Operations of one process that orthogonalizes each matrix once, standard form."""
        total = 0
        for rows, cols in self.matrices():
            short, long = sorted((rows, cols))
            total += NS_STEPS * (4 * short * short * long + 2 * short**3)
        return total


def work_of(job: Job) -> Work:
    """Spell a job out.

    Args:
        job: The job.

    Returns:
        Its parameters and its mesh.
    """
    ranks, d, half = job.ranks, job.size, job.ranks // 2
    block = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)]
    blocks = f"{job.blocks} blocks of (3d x d, d x d, 4d x d, d x 4d), d = {d}"
    fsdp: tuple[Placement, ...] = (Shard(0),)
    row_wise: tuple[Placement, ...] = (Shard(0), Shard(1))
    column_wise: tuple[Placement, ...] = (StridedShard(0, split_factor=2), Shard(0))
    if job.scenario == "fsdp":
        return Work((ranks,), _alike(block * job.blocks, fsdp), blocks)
    if job.scenario == "hsdp":
        return Work((2, half), _alike(block * job.blocks, (Replicate(), Shard(0))), blocks)
    if job.scenario == "fsdp-tp":
        return Work((half, 2), _alike(block * job.blocks, row_wise), f"{blocks}, all row-wise")
    if job.scenario == "fsdp-tp-columns":
        # What fully_shard makes of a block that tensor parallelism has cut in Megatron's way.
        kinds = [column_wise, row_wise, column_wise, row_wise]
        specs = [ParamSpec(s, p) for s, p in zip(block, kinds, strict=True)]
        text = f"{blocks}, 1st and 3rd column-wise (_StridedShard), 2nd and 4th row-wise"
        return Work((half, 2), tuple(specs * job.blocks), text)
    if job.scenario == "ddp":
        return Work((ranks,), _alike(block * job.blocks, None), f"{blocks}, plain tensors")
    if job.scenario == "experts":
        stacks = [(2 * ranks, 2 * d, d), (2 * ranks, d, 2 * d)]
        text = f"2 stacks of {2 * ranks} experts, 2d x d and d x 2d, d = {d}, 2 on each rank"
        return Work((ranks,), _alike(stacks, fsdp), text)
    if job.scenario == "many-small":
        s = max(ranks, d // 4)
        shapes = [(s, s), (2 * s, s), (s, 2 * s)] * 20
        return Work((ranks,), _alike(shapes, fsdp), f"60 matrices, s x s to 2s x s, s = {s}")
    if job.scenario == "model":
        w = max(ranks, d * 7 // 8)
        shapes = [(w, w)] * 4 + [(4 * w, w), (w, 4 * w)]
        return Work((ranks,), _alike(shapes * 7, fsdp), f"7 blocks of attention and MLP, d = {w}")
    assert job.scenario == "few-large", job.scenario
    shapes = [(4 * d, 4 * d)] * 3
    return Work((ranks,), _alike(shapes, fsdp), f"3 matrices of {4 * d} x {4 * d}")


def _alike(
    shapes: Sequence[tuple[int, ...]], placements: tuple[Placement, ...] | None
) -> tuple[ParamSpec, ...]:
    return tuple(ParamSpec(shape, placements) for shape in shapes)


def whole_tensors(work: Work, seed: int) -> list[Tensor]:
    """Whole normal tensors, the same on every rank.

    Args:
        work: Gives the shapes.
        seed: Of the generator.

    Returns:
        One per parameter.
    """
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(spec.shape, generator=generator) for spec in work.params]


def cut(whole: Tensor, spec: ParamSpec, mesh: DeviceMesh) -> Tensor:
    """This rank's part of a whole tensor, cut by torch itself, in memory of its own.

    Args:
        whole: The tensor, the same on every rank.
        spec: How it is placed.
        mesh: On what.

    Returns:
        A DTensor, or a copy if the parameter is a plain tensor.
    """
    if spec.placements is None:
        return whole.clone()
    return distribute_tensor(whole.clone(), mesh, spec.placements, src_data_rank=None)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def make_mesh(work: Work) -> DeviceMesh:
    """The mesh of all ranks."""
    return DeviceMesh("cpu", torch.arange(dist.get_world_size()).view(work.mesh_shape))


def newton_schulz(X: Tensor, dtype: torch.dtype) -> Tensor:
    """The standard form of the iteration, for one matrix or a stack.

    Args:
        X: ``(..., m, n)``. Not modified.
        dtype: Of the iteration.

    Returns:
        A new tensor of ``dtype``.
    """
    a, b, c = COEFFICIENTS
    is_tall = X.size(-2) > X.size(-1)
    Y = X.mT if is_tall else X
    Y = (Y / Y.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)).to(dtype)
    for _ in range(NS_STEPS):
        A = Y @ Y.mT
        Y = a * Y + (b * A + c * A @ A) @ Y
    return Y.mT if is_tall else Y


def lr_of(shape: Sequence[int]) -> float:
    """Learning rate, adjusted to a matrix as Keller Jordan does."""
    return float(LR * math.sqrt(max(1.0, shape[-2] / shape[-1])))


def whole_displacements(work: Work, grad_seed: int, dtype: torch.dtype) -> list[Tensor]:
    """What one process with whole tensors adds to the weights in its first step.

    Args:
        work: The parameters.
        grad_seed: Seed of the gradients.
        dtype: Of the iteration; everything else is float32.

    Returns:
        One float32 tensor per parameter.
    """
    # From zero momentum the direction is the gradient, up to a factor that the norm removes.
    grads = whole_tensors(work, grad_seed)
    return [-lr_of(g.shape) * newton_schulz(g, dtype).float() for g in grads]
