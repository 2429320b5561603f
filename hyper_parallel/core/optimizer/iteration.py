# SPDX-License-Identifier: Apache-2.0
"""The Newton-Schulz iteration on normalized matrices, in each form.

See [Note: two forms of one polynomial] in ``forms.py``.

``X`` is ``(n, m)`` or ``(batch, n, m)`` with ``n <= m``, or tall and then multiplied from the
right: ``X (X^T X) = (X X^T) X``.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.core.optimizer.coefficients import Schedule
from hyper_parallel.core.optimizer.forms import Form, panel_bounds
from hyper_parallel.core.optimizer.symmetric_kernels import symmetric_product


def iterate(X: Tensor, spare: Tensor, schedule: Schedule, form: Form) -> Tensor:
    """Apply a schedule's polynomial to the singular values of each matrix.

    Args:
        X: ``(m, n)`` or ``(batch, m, n)``, contiguous, singular values at most 1. Overwritten.
        spare: Like ``X``; overwritten.
        schedule: Coefficients of each step, at least one.
        form: How.

    Returns:
        ``spare`` if :func:`num_turns` is odd, else ``X``.
    """
    is_tall = X.size(-2) > X.size(-1)
    # Two pairs of tensors for all steps: a new one costs a CPU as much as a pass through it.
    if form.kind == "standard":
        n = min(X.shape[-2:])
        A, square = (X.new_empty((*X.shape[:-2], n, n)) for _ in range(2))
        multiply_add = torch.addmm if X.ndim == 2 else torch.baddbmm
        for a, b, c in schedule:  # X <- a X + (b A + c A^2) X with A = X X^T
            rows = X.mT if is_tall else X
            _symmetric(rows, rows.mT, form=form, out=A)
            _symmetric(A, A, C=A, beta=b, alpha=c, form=form, out=square)
            left, right = (X, square) if is_tall else (square, X)
            X, spare = multiply_add(X, left, right, beta=a, out=spare), X
        return X
    multiply = torch.mm if X.ndim == 2 else torch.bmm
    for start, stop in pairwise([0, *form.restarts, len(schedule)]):
        Q = _factors(X, schedule[start:stop], form)
        left, right = (X, Q) if is_tall else (Q, X)
        X, spare = multiply(left, right, out=spare), X
        del Q, left, right
    return X


def num_turns(schedule: Schedule, form: Form) -> int:
    """How often a matrix is replaced by another in ``iterate``.

    Args:
        schedule: Coefficients of each step.
        form: How.

    Returns:
        The number.
    """
    return len(schedule) if form.kind == "standard" else 1 + len(form.restarts)


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


# The product of all factors ``h(R)`` from one start to the next, ``R = X X^T``, in X's dtype.
#
# ``Z = b R + c R^2`` lacks ``a I``: rounded into Z, it would cost digits that Z needs. It is added
# where Z is used, as in ``Q <- Q (Z + a I)`` and ``R <- (Z + a I) R (Z + a I)``. All of these
# commute and are symmetric.
def _factors(X: Tensor, schedule: Schedule, form: Form) -> Tensor:
    rows = X.mT if X.size(-2) > X.size(-1) else X
    n = rows.size(-2)
    shape, dtype = (*X.shape[:-2], n, n), _chain_dtype(X, form)
    R = X.new_empty(shape, dtype=dtype)
    wide = rows.to(dtype)
    _symmetric(wide, wide.mT, form=form, out=R)
    del wide
    Z, Q, other = (torch.empty_like(R) for _ in range(3))

    symmetric = partial(_symmetric, form=form)
    for step, (a, b, c) in enumerate(schedule, start=1):
        symmetric(R, R, C=R, beta=b, alpha=c, out=Z)
        if step == 1:
            Q.copy_(Z).diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            symmetric(Q, Z, C=Q, beta=a, out=other)
            Q, other = other, Q
        if step < len(schedule):
            symmetric(R, Z, C=R, beta=a, out=other)
            symmetric(Z, other, C=other, beta=a, out=R)
    return Q.to(X.dtype)


# ``beta C + alpha A B`` with ``n`` rows and columns, where that is known to be symmetric.
def _symmetric(
    A: Tensor,
    B: Tensor,
    *,
    form: Form,
    out: Tensor,
    C: Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> None:
    if form.kernels is not None:
        symmetric_product(A, B, C=C, alpha=alpha, beta=beta, out=out)
    elif _is_whole(form):
        _product(A, B, C=C, beta=beta, alpha=alpha, out=out)
    else:
        for start, stop in panel_bounds(A.size(-2), form.num_panels):
            _product(
                A[..., start:, :],
                B[..., :, start:stop],
                C=None if C is None else C[..., start:, start:stop],
                beta=beta,
                alpha=alpha,
                out=out[..., start:, start:stop],
            )
            _mirror(out, start, stop)


def _product(
    A: Tensor, B: Tensor, *, C: Tensor | None, beta: float, alpha: float, out: Tensor
) -> None:
    if C is None:
        multiply = torch.mm if A.ndim == 2 else torch.bmm
        multiply(A, B, out=out)
    else:
        multiply_add = torch.addmm if A.ndim == 2 else torch.baddbmm
        multiply_add(C, A, B, beta=beta, alpha=alpha, out=out)


# The compiler refuses to write a product into a part of a matrix.
def _is_whole(form: Form) -> bool:
    return form.num_panels == 1 or torch.compiler.is_compiling()


# What is below a panel's diagonal block, to the right of it.
def _mirror(out: Tensor, start: int, stop: int) -> None:
    out[..., start:stop, stop:] = out[..., stop:, start:stop].mT
