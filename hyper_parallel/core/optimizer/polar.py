# SPDX-License-Identifier: Apache-2.0
"""Polar factors: the orthogonalization at the heart of Muon.

Everything here works on local tensors and knows nothing of ranks. Matrices are ``(..., m, n)``;
leading dims are a batch.
"""

import math

import torch
from torch import Tensor

from hyper_parallel.core.optimizer.coefficients import (
    Coefficients,
    Schedule,
    resolve_coefficients,
)
from hyper_parallel.core.optimizer.forms import METHODS, Form, choose_form
from hyper_parallel.core.optimizer.iteration import iterate, num_turns
from hyper_parallel.core.optimizer.symmetric_kernels import check_kernels

__all__ = ["METHODS", "orthogonalize", "orthogonalize_with_schedule"]

_FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# Elements squared at once for a norm: bounds the temporary, and is enough to keep a GPU busy.
_NORM_CHUNK_NUMEL = 2**22
_LONGEST_SERIAL_SUM = 4096


def orthogonalize(
    X: Tensor,
    *,
    coefficients: Coefficients = "jordan",
    steps: int | None = None,
    method: str = "auto",
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Approximate the polar factor ``U V^T`` of each matrix ``X = U S V^T``.

    Newton-Schulz: ``X`` is divided by its Frobenius norm, then each step applies an odd
    polynomial to all singular values at once by matrix products alone. How near to 1 they end
    depends on the coefficients: 0.68 to 1.13 with the default, for those above 0.01 of the norm.

    The scale of ``X`` is irrelevant. Each matrix is divided by its largest absolute entry, and
    then by its norm, in float32 (float64 if ``X`` or ``dtype`` is) before anything is rounded to
    ``dtype``, so that a gradient of 1e-41 or of 1e38 gives the update that a gradient of 1 gives.
    ``torch.optim.Muon`` differs: its ``eps`` is a floor of the norm of ``X`` itself, so that
    small gradients give small updates, and a norm that overflows gives none.

    Args:
        X: ``(..., m, n)``, local, floating-point, any strides. Never modified.
        coefficients: One triple ``(a, b, c)`` for every step, a sequence of triples, or the name
            of a preset. See ``resolve_coefficients``.
        steps: Number of steps. None means all that ``coefficients`` has, and 5 for one triple.
        method: ``"standard"`` multiplies the ``m x n`` matrix in every step. ``"gram"`` multiplies
            square matrices of the shorter side, and the ``m x n`` matrix every second or third
            step: two thirds of the work if one side is four times the other, more if they are
            equal. In float32 its rounding errors are larger, up to 3e-4 of the result; in half
            precision they are not. ``"auto"`` is the faster of the two, as accurate as
            ``"standard"`` up to rounding. The plan of an optimizer says what it takes.
            ``"standard+quack"`` is ``"standard"`` with the kernels of the package quack-kernels,
            which multiply one triangle of a symmetric product; for NVIDIA GPUs from Hopper on, in
            half precision. They are never taken unless asked for.
        eps: Floor of the Frobenius norm *after* the largest entry has been scaled to 1. That norm
            is at least 1 unless the matrix is zero: ``eps`` keeps zero matrices zero, and has no
            effect on others unless it exceeds 1.
        dtype: Of the products: bfloat16, float16, float32 or float64. float16 is slow on CPUs.

    Returns:
        Shape, dtype and device of ``X``; a new tensor that needs no gradient. Strides are not
        promised. A zero matrix gives exactly zero. A matrix with an inf or NaN gives all NaN and
        leaves the others of its batch as they would be without it.

    Raises:
        TypeError: If ``X`` is not a dense real floating-point tensor, or from
            ``resolve_coefficients``.
        ValueError: If ``X`` has fewer than two dims, ``method``, ``eps`` or ``dtype`` is not one
            of the above, or from ``resolve_coefficients``.

    Example:
        >>> orthogonalize(torch.tensor([[3.0, 0.0], [0.0, -4.0]]), coefficients="deepseek_v4")
        tensor([[ 1.,  0.],
                [ 0., -1.]])

    References:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
        https://kellerjordan.github.io/posts/muon/

        Amsel et al., "The Polar Express: Optimal Matrix Sign Methods and Their Application to the
        Muon Algorithm", 2025. https://arxiv.org/abs/2505.16932
    """
    schedule = resolve_coefficients(coefficients, steps)
    return orthogonalize_with_schedule(X, schedule, method=method, eps=eps, dtype=dtype)


@torch.no_grad()
def orthogonalize_with_schedule(
    X: Tensor,
    schedule: Schedule,
    *,
    method: str | Form = "auto",
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Do what ``orthogonalize`` does, for coefficients resolved beforehand.

    For callers that step often: the schedule is used as it is, without a check.

    Args:
        X: ``(..., m, n)``, local. Not modified unless it is ``out``.
        schedule: What ``resolve_coefficients`` returned.
        method: As in ``orthogonalize``, or the form that was chosen.
        eps: As in ``orthogonalize``.
        dtype: As in ``orthogonalize``.
        out: Contiguous, like ``X``, which it may be: each matrix is then replaced by its result.

    Returns:
        As ``orthogonalize``; ``out`` if it was given.

    Raises:
        TypeError: If ``X`` is not a dense real floating-point tensor.
        ValueError: If ``X`` has fewer than two dims, or ``method``, ``eps`` or ``dtype`` is not
            one of those allowed.
    """
    _check_matrices(X)
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps: expected a finite number, at least 0 (1e-7 is usual), got {eps!r}")
    if dtype not in _FLOAT_DTYPES:
        raise ValueError(
            f"dtype: expected one of {', '.join(map(str, _FLOAT_DTYPES))}, got {dtype!r}"
        )
    form = method if isinstance(method, Form) else _choose(X, schedule, method, dtype)
    if X.numel() == 0:
        return torch.empty_like(X) if out is None else out
    if out is None:
        out = torch.empty_like(X, memory_format=torch.contiguous_format)
    batch = X.reshape(-1, *X.shape[-2:])
    targets = out.view(batch.shape)
    # A batch of one takes the 2-D products, which are no slower and tuned best.
    pairs = (
        [(targets, batch)] if form.batched and len(batch) > 1 else zip(targets, batch, strict=True)
    )
    for target, matrices in pairs:
        _orthogonalize_into(target, matrices, schedule, form, eps=eps, dtype=dtype)
    return out


def _check_matrices(X: Tensor) -> None:
    if not isinstance(X, Tensor):
        raise TypeError(f"orthogonalize: expected a Tensor, got {type(X).__name__}")
    if X.layout is not torch.strided:
        raise TypeError(
            f"orthogonalize: expected a dense tensor, got layout {X.layout} with shape "
            f"{tuple(X.shape)}; pass X.to_dense()"
        )
    if X.dtype not in _FLOAT_DTYPES:
        raise TypeError(
            f"orthogonalize: expected dtype {', '.join(map(str, _FLOAT_DTYPES))}, got {X.dtype} "
            f"with shape {tuple(X.shape)}; complex, integer and 8-bit matrices are not supported"
        )
    if X.ndim < 2:
        raise ValueError(
            f"orthogonalize: expected matrices of shape (..., m, n), got shape {tuple(X.shape)}; "
            "give vectors and scalars to another optimizer, or reshape them to matrices"
        )


def _choose(X: Tensor, schedule: Schedule, method: str, dtype: torch.dtype) -> Form:
    num_rows, num_cols = X.shape[-2:]
    check_kernels(method, dtype=str(dtype).removeprefix("torch."), device_type=X.device.type)
    # The compiler looks through a cache, and warns of it.
    choose = choose_form.__wrapped__ if torch.compiler.is_compiling() else choose_form
    return choose(
        num_rows,
        num_cols,
        schedule,
        method=method,
        dtype=str(dtype).removeprefix("torch."),
        device_type=X.device.type,
    )


# ``(m, n)`` or ``(batch, m, n)``. ``out`` is contiguous and may be ``X``.
def _orthogonalize_into(
    out: Tensor, X: Tensor, schedule: Schedule, form: Form, *, eps: float, dtype: torch.dtype
) -> None:
    transposes = form.transposes and X.size(-2) > X.size(-1)
    shape = X.mT.shape if transposes else X.shape
    # The result is to end in ``out``, or beside it if it must be moved or rounded to get there.
    direct = out.dtype == dtype and not transposes
    here = out.view(shape) if out.dtype == dtype else _empty(shape, dtype, X.device)
    there = _empty(shape, dtype, X.device)
    first, second = (there, here) if num_turns(schedule, form) % 2 == direct else (here, there)
    _normalize_into(first, X, eps, transposed=transposes)
    result = iterate(first, second, schedule, form)
    if not direct:
        out.copy_(result.mT if transposes else result)


def _empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


# Divides each matrix by its Frobenius norm, then rounds. ``out`` is contiguous, may share the
# memory of ``X``, and is ``X`` transposed if it is to be.
def _normalize_into(out: Tensor, X: Tensor, eps: float, *, transposed: bool) -> None:
    work_dtype = torch.float64 if torch.float64 in (X.dtype, out.dtype) else torch.float32
    wide = X.to(work_dtype)  # reductions of half precision are slow on CPUs
    # Two reductions make no copy, as abs() would, and keep NaN.
    amax = torch.maximum(wide.amax((-2, -1)), -wide.amin((-2, -1)))
    # A division: the reciprocal of a subnormal overflows. A NaN in amax divides by 1, and reaches
    # every entry through the norm.
    divisor = _per_matrix(torch.where(amax > 0, amax, 1))
    if wide is not X:
        scaled = wide.div_(divisor)
    elif out.dtype == work_dtype and not transposed:
        scaled = torch.div(wide, divisor, out=out)
    else:
        scaled = wide / divisor
    norm = _frobenius_norm(scaled).clamp_(min=max(eps, torch.finfo(work_dtype).tiny))
    scaled.mul_(_per_matrix(norm.reciprocal_()))
    if transposed:  # rounded first and then moved: a copy that does both is slow
        out.copy_(scaled.to(out.dtype).mT)
    elif scaled is not out:
        out.copy_(scaled)


# A tensor without dims divides as fast as a number does; one with dims takes twice the time.
def _per_matrix(values: Tensor) -> Tensor:
    return values if values.ndim == 0 else values[..., None, None]


# ``(..., m, n)`` to ``(...)``. Rows first, so that the order in which a matrix is summed hardly
# depends on its batch. On CPUs vector_norm makes one pass, but adds float32 one after the other:
# over 1e6 elements it is wrong by up to 4e-4. sum() adds pairwise.
def _frobenius_norm(X: Tensor) -> Tensor:
    if X.stride(-1) > X.stride(-2):
        X = X.mT  # in the order of the memory: five times as fast, and the bits of its transpose
    if X.size(-1) <= _LONGEST_SERIAL_SUM:
        rows: Tensor = torch.linalg.vector_norm(X, dim=-1)
        return (rows * rows).sum(-1).sqrt()
    rows_per_chunk = max(1, _NORM_CHUNK_NUMEL * X.size(-2) // X.numel())
    sums = [(rows * rows).sum(-1) for rows in torch.split(X, rows_per_chunk, dim=-2)]
    return torch.cat(sums, dim=-1).sum(-1).sqrt()
