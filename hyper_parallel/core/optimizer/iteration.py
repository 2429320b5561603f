# SPDX-License-Identifier: Apache-2.0
"""The Newton-Schulz iteration on normalized matrices, in each form.

See [Note: two forms of one polynomial] in ``forms.py``.

``X`` is ``(n, m)`` or ``(batch, n, m)`` with ``n <= m``. Out of place: calls are independent of
each other, and what a step no longer needs is freed at once.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.core.optimizer.coefficients import Schedule
from hyper_parallel.core.optimizer.forms import Form, panel_bounds


def iterate(X: Tensor, schedule: Schedule, form: Form) -> Tensor:
    """Apply a schedule's polynomial to the singular values of each matrix.

    Args:
        X: ``(n, m)`` or ``(batch, n, m)`` with ``n <= m``, singular values at most 1. Not modified.
        schedule: Coefficients of each step, at least one.
        form: How.

    Returns:
        A new tensor like ``X``.
    """
    # The compiler refuses to write a product into a part of a matrix.
    num_panels = 1 if torch.compiler.is_compiling() else form.num_panels
    if form.kind == "standard":
        multiply_add = torch.addmm if X.ndim == 2 else torch.baddbmm
        for a, b, c in schedule:  # X <- a X + (b A + c A^2) X with A = X X^T
            A = _outer(X, num_panels)
            A = _symmetric(A, A, A, beta=b, alpha=c, num_panels=num_panels)
            X = multiply_add(X, A, X, beta=a)
            del A
        return X
    dtype = _chain_dtype(X, form)
    for start, stop in pairwise([0, *form.restarts, len(schedule)]):
        Q = _chain(_outer(X.to(dtype), num_panels), schedule[start:stop], num_panels)
        X = Q.to(X.dtype) @ X
        del Q
    return X


def _chain_dtype(X: Tensor, form: Form) -> torch.dtype:
    assert form.chain_dtype is not None
    if form.chain_dtype == "float32" and X.device.type == "cpu" and _rounds_to_bfloat16():
        return torch.float64
    dtype = getattr(torch, form.chain_dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


# torch.set_float32_matmul_precision("medium") has CPUs round the factors of float32 products to
# bfloat16, which no chain survives. A compiler takes the answer as it is when it compiles.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _rounds_to_bfloat16() -> bool:
    onednn: Any = torch.backends.mkldnn
    return bool(onednn.matmul.fp32_precision == "bf16")


# The product of all factors ``h(R)`` from one start to the next. ``Z = b R + c R^2`` lacks ``a I``:
# rounded into Z, it would cost digits that Z needs. It is added where Z is used, as in
# ``Q <- Q (Z + a I)`` and ``R <- (Z + a I) R (Z + a I)``. All of these commute and are symmetric.
def _chain(R: Tensor, schedule: Schedule, num_panels: int) -> Tensor:
    Q = None
    for step, (a, b, c) in enumerate(schedule, start=1):
        Z = _symmetric(R, R, R, beta=b, alpha=c, num_panels=num_panels)
        if Q is None:
            Q = Z.clone()
            Q.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            Q = _symmetric(Q, Q, Z, beta=a, alpha=1.0, num_panels=num_panels)
        if step < len(schedule):
            R = _symmetric(R, R, Z, beta=a, alpha=1.0, num_panels=num_panels)
            R = _symmetric(R, Z, R, beta=a, alpha=1.0, num_panels=num_panels)
    assert Q is not None
    return Q


# ``X X^T``.
def _outer(X: Tensor, num_panels: int) -> Tensor:
    if num_panels == 1:
        return X @ X.mT
    n = X.size(-2)
    out = X.new_empty((*X.shape[:-2], n, n))
    multiply = torch.mm if X.ndim == 2 else torch.bmm
    for start, stop in panel_bounds(n, num_panels):
        panel = out[..., start:, start:stop]
        multiply(X[..., start:, :], X[..., start:stop, :].mT, out=panel)
        _mirror(out, start, stop)
    return out


# ``beta C + alpha A B``, all ``n x n``, where the result is known to be symmetric.
def _symmetric(
    C: Tensor, A: Tensor, B: Tensor, *, beta: float, alpha: float, num_panels: int
) -> Tensor:
    multiply_add = torch.addmm if A.ndim == 2 else torch.baddbmm
    if num_panels == 1:
        return multiply_add(C, A, B, beta=beta, alpha=alpha)
    n = A.size(-1)
    out = torch.empty_like(A)
    for start, stop in panel_bounds(n, num_panels):
        multiply_add(
            C[..., start:, start:stop],
            A[..., start:, :],
            B[..., :, start:stop],
            beta=beta,
            alpha=alpha,
            out=out[..., start:, start:stop],
        )
        _mirror(out, start, stop)
    return out


# What is below a panel's diagonal block, to the right of it.
def _mirror(out: Tensor, start: int, stop: int) -> None:
    out[..., start:stop, stop:] = out[..., stop:, start:stop].mT
