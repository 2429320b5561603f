# SPDX-License-Identifier: Apache-2.0
"""The norm of gradients that lie on several meshes, and clipping by it."""

import math
from collections.abc import Iterable, Sequence
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from hyper_parallel.core.optimizer.collectives import (
    RankGroup,
    all_reduce_,
    axis_group,
    rank_group,
)
from hyper_parallel.core.optimizer.dtensor_layout import local_gradient, local_tensor
from hyper_parallel.core.optimizer.torch_private import StridedShard


@torch.no_grad()
def clip_grad_norm_(  # noqa: PLR0917 -- the signature of torch.nn.utils.clip_grad_norm_
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 -- positional in torch
    foreach: bool | None = None,  # noqa: FBT001 -- positional in torch
    *,
    pipeline_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Clip the norm of all gradients together, whatever meshes they lie on.

    :func:`torch.nn.utils.clip_grad_norm_` raises for parameters of several meshes (experts beside
    dense layers, tensor parallelism beside replicated norms). This one takes any mixture of plain
    tensors and DTensors. Every element counts once: shards are summed over the mesh axes that
    shard them, replicas are not. Gradients stay where they are; one all-reduce of a few numbers is
    made per process group of such an axis, however many parameters there are.

    Called on every rank with the same parameters in the same order (on every rank of a pipeline
    stage), whatever gradients they have.

    Args:
        parameters: Parameters, or one of them; those without a gradient count as zero. A plain
            tensor counts as it is on this rank, as in torch: all ranks must hold the same.
        max_norm: Most that the norm may be; ``math.inf`` to ask for the norm alone.
        norm_type: Order ``p`` of the norm, positive; ``math.inf`` for the largest magnitude.
        error_if_nonfinite: Whether to raise if the norm is inf or NaN.
        foreach: Taken for torch's signature. Kernels are always batched.
        pipeline_group: Ranks that hold the other stages of this rank's pipeline, over which the
            norm is taken, too. None: the norm is that of this rank's stage.

    Returns:
        The norm before clipping: a plain scalar, the same on all ranks.

    Raises:
        ValueError: If ``max_norm`` or ``norm_type`` makes no sense, or a gradient is not laid out
            like its parameter (not reduced yet) or not dense.
        TypeError: If ``max_norm`` or ``norm_type`` is no number.
        RuntimeError: If the norm is not finite and ``error_if_nonfinite``; nothing is scaled.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> weight.grad = torch.full((2, 2), 3.0)
        >>> clip_grad_norm_([weight], max_norm=1.0).item()
        6.0
    """
    del foreach
    for name, number in (("max_norm", max_norm), ("norm_type", norm_type)):
        if isinstance(number, bool) or not isinstance(number, Real):
            raise TypeError(f"{name} must be a number, got {number!r}")
    if not max_norm >= 0:
        raise ValueError(
            f"max_norm must be at least 0, got {max_norm!r}; math.inf asks for the norm alone"
        )
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, got {norm_type!r}; use 2.0, 1.0 or math.inf")
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    total = _total_norm(params, float(norm_type), pipeline_group)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be "
            "clipped; find the parameter whose gradient is not finite, or pass "
            "error_if_nonfinite=False to scale by it all the same"
        )
    grads = [local_tensor(param.grad) for param in params if param.grad is not None]
    if grads and max_norm != math.inf:
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for (device, _), alike in _by_kind(grads).items():
            torch._foreach_mul_(alike, factor.to(device))
    return total


def _total_norm(
    params: Sequence[Tensor], order: float, pipeline_group: dist.ProcessGroup | None
) -> Tensor:
    """Norm over all elements of all gradients, in float32."""
    # Parameters that are cut over the same axes share one number, so that what is reduced does not
    # depend on which gradients there are.
    parts: dict[tuple[RankGroup, ...], list[Tensor]] = {}
    for number, param in enumerate(params):
        grads = parts.setdefault(_shard_groups(param), [])
        name = f"parameter {number} (shape {tuple(param.shape)})"
        if param.grad is not None and param.grad.layout != torch.strided:
            raise ValueError(
                f"{name}: expected a dense gradient, got layout {param.grad.layout}; make it dense"
            )
        try:
            gradient = local_gradient(param)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if gradient is not None and gradient.numel():
            grads.append(gradient)
    device = local_tensor(params[0]).device if params else torch.device("cpu")
    sums = [_power_sum(grads, order, device) for grads in parts.values()]
    values = torch.stack(sums) if sums else torch.zeros(1, dtype=torch.float64, device=device)
    is_nan = values.isnan().to(values.dtype)
    # A maximum of NaN and a number may be either, so NaN travels by itself.
    columns = torch.stack([values.nan_to_num(0.0, math.inf), is_nan], dim=1)
    for group in dict.fromkeys(group for groups in parts for group in groups):
        rows = [i for i, groups in enumerate(parts) if group in groups]
        columns[rows] = all_reduce_(columns[rows], group, largest=order == math.inf)
    total = columns.amax(0) if order == math.inf else columns.sum(0)
    if pipeline_group is not None:
        all_reduce_(total, rank_group(pipeline_group), largest=order == math.inf)
    power = 1.0 if order == math.inf else 1 / order
    return (total[0] ** power).masked_fill(total[1] > 0, math.nan).float()


def _shard_groups(param: Tensor) -> tuple[RankGroup, ...]:
    """The groups of the mesh axes that cut a parameter; none for one that is whole here."""
    if not isinstance(param, DTensor):
        return ()
    return tuple(
        axis_group(param.device_mesh, axis)
        for axis, placement in enumerate(param.placements)
        if isinstance(placement, Shard | StridedShard) and param.device_mesh.size(axis) > 1
    )


def _power_sum(grads: Sequence[Tensor], order: float, device: torch.device) -> Tensor:
    """Sum of ``|g| ** order`` (the largest ``|g|`` for infinity), float64."""
    norms = [
        norm.to(device=device, dtype=torch.float64)
        for alike in _by_kind(grads).values()
        for norm in torch._foreach_norm(
            alike, order, dtype=torch.promote_types(alike[0].dtype, torch.float32)
        )
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack(norms)
    return stacked.max() if order == math.inf else (stacked**order).sum()


def _by_kind(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return alike
