# SPDX-License-Identifier: Apache-2.0
"""Forms of the Newton-Schulz iteration: what there is, what it costs, what pays where. No torch.

[Note: two forms of one polynomial]
A step is ``X <- p(X)`` with ``p(x) = x h(x^2)``. The *standard* form multiplies the ``n x m``
matrix in every step. The *Gram* form works on ``R = X X^T``, which is ``n x n``: all factors
``h(R)`` commute, so their product ``Q`` is built first and ``X`` is multiplied once, ``Q X``. It
pays where ``m`` is a multiple of ``n``.

Rounding makes ``R`` slightly indefinite, and a negative eigenvalue grows by ``a^2`` in each step.
So after a few steps the Gram form *restarts*: ``X <- Q X``, ``R <- X X^T``, ``Q <- I``. With a
restart before every step it is the standard form. The chain of ``n x n`` products is never kept in
bfloat16, whose rounding is too coarse for any distance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Final

from typing_extensions import override

from hyper_parallel.core.optimizer.coefficients import Schedule

METHODS: Final = ("auto", "standard", "gram")
QUACK: Final = "standard+quack"
"""The standard form, with symmetric products by the kernels of the package quack-kernels."""
ALL_METHODS: Final = (*METHODS, QUACK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A way to run the iteration.

    Attributes:
        kind: ``"standard"`` or ``"gram"``.
        chain_dtype: Dtype of the ``n x n`` products of the Gram form; None for the standard form.
        restarts: Steps before which the Gram form restarts.
        num_panels: Into how many column panels a symmetric product is cut; only what lies on and
            below the diagonal is multiplied. One is a plain product.
        batched: Whether the matrices of a batch share a product, or run one after the other.
        transposes: Whether tall matrices are copied to lie as their transposes do. If not, they are
            multiplied from the right, as they lie.
        kernels: The package whose kernels multiply symmetric products; None for torch's own.
    """

    kind: str = "standard"
    chain_dtype: str | None = None
    restarts: tuple[int, ...] = ()
    num_panels: int = 1
    batched: bool = True
    transposes: bool = False
    kernels: str | None = None

    @override
    def __str__(self) -> str:
        """In few words: ``"gram[1,3] in float32"``, ``"standard, 4 panels"``."""
        text = self.kind
        if self.restarts:
            text += f"[{','.join(map(str, self.restarts))}]"
        if self.chain_dtype is not None:
            text += f" in {self.chain_dtype}"
        if self.kernels is not None:
            text += f", kernels of {self.kernels}"
        return text if self.num_panels == 1 else f"{text}, {self.num_panels} panels"


# How much an error of the chain may grow between two restarts, as a logarithm, by the dtype of X.
# "gram" bounds the result, to within about 3e-4 of it in float32. In half precision there are no
# digits to lose: Q is rounded to it, too, when it multiplies X, and may cancel. "auto" restarts
# more often, and so stays as near to the polynomial as the standard form, up to rounding: with 5
# steps that is [1, 3] in place of [2], and takes 1.15 of the time. See docs/accuracy.md.
_SAFE_GROWTH: Final = {"float64": 16.0, "float32": 7.5, "float16": 5.55, "bfloat16": 5.55}
_ACCURATE_GROWTH: Final = 5.55

# How much of the standard form's FLOPs the Gram form may take, and how few rows it may have, for
# "auto" to prefer it. Its n x n products are small, and it has four of them to a step, not three.
_WORTHWHILE: Final = 0.85
_SMALLEST_GRAM: Final = 128

# On CPUs. With fewer rows, cutting a symmetric product costs more than it saves; beyond, 4 panels
# save a tenth. bfloat16 products are so fast, where there is hardware for them, that no more than
# 2 panels pay, and those only for matrices so wide that X X^T is most of the work.
_SMALLEST_IN_PANELS: Final = {"float32": 512, "float64": 512, "bfloat16": 1024}
_SMALLEST_BFLOAT16_ASPECT: Final = 4
# On CPUs. X^T X of a bfloat16 matrix with so many columns is slow enough to be worth two copies.
_LARGEST_FROM_RIGHT: Final = {"bfloat16": 512}
# A tile of quack's kernels is 128 rows or more; their operands begin at multiples of 16 bytes.
_SMALLEST_FOR_KERNELS: Final = 256
_KERNEL_ALIGNMENT: Final = 8
# On CPUs. Beyond this many rows, a batched product is slower than one product after the other.
_LARGEST_BATCHED: Final = {"bfloat16": 128, "float16": 128, "float32": 64, "float64": 64}


@lru_cache(maxsize=4096)
def choose_form(
    num_rows: int,
    num_cols: int,
    schedule: Schedule,
    *,
    method: str,
    dtype: str,
    device_type: str,
) -> Form:
    """Choose how matrices of one shape are orthogonalized.

    A pure function of its arguments, so that all ranks, and a plan made beforehand, agree.

    Args:
        num_rows: Rows of a matrix.
        num_cols: Columns of a matrix.
        schedule: Coefficients of each step.
        method: ``"standard"``, ``"gram"``, or ``"auto"``: the Gram form where it is expected to be
            faster and can be as accurate as the standard form. ``"standard+quack"``: the standard
            form, with quack's kernels for matrices large and aligned enough for them.
        dtype: Name of the dtype that the iteration runs in.
        device_type: ``"cpu"``, ``"cuda"`` or another that torch knows.

    Returns:
        The form.

    Raises:
        ValueError: If ``method`` is none of ``ALL_METHODS``.

    Example:
        >>> jordan = ((3.4445, -4.7750, 2.0315),) * 5
        >>> for dtype in ("bfloat16", "float32"):
        ...     print(
        ...         choose_form(1024, 4096, jordan, method="auto", dtype=dtype, device_type="cpu")
        ...     )
        standard, 2 panels
        gram[2,4] in float32, 4 panels
    """
    if method not in ALL_METHODS:
        names = ", ".join(map(repr, ALL_METHODS))
        raise ValueError(f"method: expected one of {names}, got {method!r}")
    n, m = min(num_rows, num_cols), max(num_rows, num_cols)
    on_cpu = device_type == "cpu"
    standard = Form(
        num_panels=_num_panels(n, m, dtype) if on_cpu else 1,
        batched=not on_cpu or n <= _LARGEST_BATCHED[dtype],
        transposes=on_cpu and num_rows > num_cols and n > _LARGEST_FROM_RIGHT.get(dtype, n),
    )
    if method == QUACK and n >= _SMALLEST_FOR_KERNELS and not (n | m) % _KERNEL_ALIGNMENT:
        return replace(standard, kernels="quack", transposes=num_rows > num_cols)
    if method in ("standard", QUACK):
        return standard
    chain = _chain_dtype(dtype, on_cpu=on_cpu)
    gram = Form(
        kind="gram",
        chain_dtype=chain,
        restarts=restart_steps(
            schedule, _SAFE_GROWTH[dtype] if method == "gram" else _ACCURATE_GROWTH
        ),
        num_panels=_num_panels(n, m, chain) if on_cpu else 1,
        batched=standard.batched,
        transposes=standard.transposes,
    )
    if method == "gram":
        return gram
    # A chain in another dtype than the matrix runs at another rate: on CPUs bfloat16 multiplies 4
    # to 6 times as fast as float32, on GPUs more than 10 times, and no shape makes up for that.
    # Half precision would be fast enough for a bfloat16 matrix on a GPU, and in emulation the
    # result is as accurate; "auto" waits for a measurement on one.
    if chain != dtype or n < _SMALLEST_GRAM:
        return standard
    shape_and_steps = (num_rows, num_cols, len(schedule))
    saves = form_flops(gram, *shape_and_steps) <= _WORTHWHILE * form_flops(
        standard, *shape_and_steps
    )
    return gram if saves else standard


# Never bfloat16. float16 only where there is hardware for it.
def _chain_dtype(dtype: str, *, on_cpu: bool) -> str:
    if dtype == "bfloat16" or (dtype == "float16" and on_cpu):
        return "float32"
    return dtype


def _num_panels(n: int, m: int, dtype: str) -> int:
    if n < _SMALLEST_IN_PANELS.get(dtype, math.inf):
        return 1
    if dtype == "bfloat16":
        return 2 if m >= _SMALLEST_BFLOAT16_ASPECT * n else 1
    return 4


def restart_steps(schedule: Schedule, largest_growth: float) -> tuple[int, ...]:
    """Steps before which the Gram form restarts, as few and as even as the bound allows.

    A negative eigenvalue that rounding brings into ``X X^T`` grows by ``h(0)^2 = a^2`` in a step.

    Args:
        schedule: Coefficients of each step.
        largest_growth: Logarithm of how much an error may grow between two restarts, where one
            step alone does not exceed it.

    Returns:
        Ascending step numbers; none if one start is enough.

    Example:
        >>> jordan = ((3.4445, -4.7750, 2.0315),) * 5
        >>> restart_steps(jordan, 7.5), restart_steps(jordan, 5.55), restart_steps(jordan, 16.0)
        ((3,), (2, 4), ())
    """
    growth = [2 * math.log(max(abs(a), 1.0)) for a, _, _ in schedule]
    largest, cuts = _cut(growth, largest_growth)
    while True:  # as even as this many allow
        smaller, other = _cut(growth, largest * (1 - 1e-9))
        if len(other) > len(cuts) or smaller >= largest:
            return cuts
        largest, cuts = smaller, other


def _cut(growth: Sequence[float], bound: float) -> tuple[float, tuple[int, ...]]:
    """Cut a list into the fewest parts with sums up to a bound; the largest sum, and the cuts."""
    total = largest = 0.0
    cuts: list[int] = []
    for step, number in enumerate(growth):
        if step and total + number > bound:
            cuts.append(step)
            total = 0.0
        total += number
        largest = max(largest, total)
    return largest, tuple(cuts)


def form_flops(form: Form, num_rows: int, num_cols: int, num_steps: int) -> int:
    """FLOPs of a form on one matrix, as ``torch.utils.flop_counter`` counts them.

    A multiply and an add count as two.

    Args:
        form: The form.
        num_rows: Rows of the matrix.
        num_cols: Columns of the matrix.
        num_steps: Newton-Schulz steps.

    Returns:
        The number of operations.

    Example:
        >>> form_flops(Form(), 1024, 4096, 5) == 90 * 1024**3
        True
        >>> form_flops(Form(kind="gram", restarts=(2,)), 1024, 4096, 5) == 60 * 1024**3
        True
    """
    n, m = min(num_rows, num_cols), max(num_rows, num_cols)
    outer = _symmetric_flops(n, m, form.num_panels)
    square = _symmetric_flops(n, n, form.num_panels)
    apply = 2 * n * n * m
    if form.kind == "standard":
        return num_steps * (outer + square + apply)
    starts = 1 + len(form.restarts)
    # A step squares R, extends Q and updates R by two products. After a start Q is there for
    # nothing, and before the next start, or the end, R is not needed any more.
    return starts * (outer + apply) + (4 * num_steps - 3 * starts) * square


def _symmetric_flops(n: int, inner: int, num_panels: int) -> int:
    return sum(
        2 * (n - start) * (stop - start) * inner for start, stop in panel_bounds(n, num_panels)
    )


def panel_bounds(n: int, num_panels: int) -> list[tuple[int, int]]:
    """Column panels of an ``n x n`` product.

    Args:
        n: Rows and columns.
        num_panels: How many panels, if there are as many columns.

    Returns:
        First column and the column after the last, of each panel; widths differ by at most one.

    Example:
        >>> panel_bounds(10, 4)
        [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    edges = [i * n // num_panels for i in range(num_panels + 1)]
    return [(start, stop) for start, stop in pairwise(edges) if start < stop]
