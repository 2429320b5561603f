# SPDX-License-Identifier: Apache-2.0
"""What work costs: floating-point operations, bytes and seconds. No torch."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from hyper_parallel.core.optimizer.forms import Form, panel_bounds
from hyper_parallel.core.optimizer.hardware import Hardware

ITEMSIZE: Final[dict[str, int]] = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of one element, by dtype name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates that a choice between computing twice and sending once depends on.

    Attributes:
        matmul_flops_per_s: Achieved rate of matrix products on one rank.
        link_bytes_per_s: Rate at which one rank receives from the others.
    """

    matmul_flops_per_s: float
    link_bytes_per_s: float


CPU: Final = Rates(matmul_flops_per_s=1e11, link_bytes_per_s=1e9)
"""Gloo over loopback, one thread a rank: the order of magnitude is what counts."""

ACCELERATOR: Final = Rates(matmul_flops_per_s=3e14, link_bytes_per_s=4e10)
"""Half of an H100's dense bfloat16 rate, and one 400 Gbit/s port at 80 %."""


def sharing_pays(flops: int, nbytes: int, num_shards: int, rates: Rates) -> bool:
    """Whether replicas should split the orthogonalization of a parameter between them.

    Where the parameter is sharded, a rank receives its part of the update either way, so sharing
    is free. Where it lies whole on every replica, sharing saves ``flops`` on all replicas but one
    and costs ``nbytes`` of update in return.

    Args:
        flops: Operations on the parameter's matrices.
        nbytes: Bytes of the parameter on the wire.
        num_shards: Number of ranks over which one copy is spread.
        rates: Rates.

    Returns:
        True if splitting is faster.

    Example:
        >>> sharing_pays(30 * 4096**3, 2 * 4096**2, 1, ACCELERATOR)
        True
        >>> sharing_pays(30 * 64**3, 2 * 64**2, 1, ACCELERATOR)
        False
    """
    if num_shards > 1:
        return True
    return flops / rates.matmul_flops_per_s > nbytes / rates.link_bytes_per_s


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product, ``(rows, inner) @ (inner, cols)``.

    Attributes:
        rows: Rows of the result.
        inner: The dim that is summed over.
        cols: Columns of the result.
        dtype: Name of the dtype.
        count: How often it occurs.
    """

    rows: int
    inner: int
    cols: int
    dtype: str
    count: int

    @property
    def flops(self) -> int:
        """Operations of all occurrences; a multiply and an add count as two."""
        return 2 * self.rows * self.inner * self.cols * self.count

    @property
    def size(self) -> float:
        """Geometric mean of the three dims."""
        return float((self.rows * self.inner * self.cols) ** (1 / 3))

    @property
    def nbytes(self) -> int:
        """Bytes that all occurrences read and write."""
        elements = self.rows * self.inner + self.inner * self.cols + self.rows * self.cols
        return elements * ITEMSIZE[self.dtype] * self.count


@lru_cache(maxsize=4096)
def products_of(
    form: Form, num_rows: int, num_cols: int, *, num_steps: int, dtype: str
) -> tuple[Product, ...]:
    """The matrix products that one matrix takes.

    Args:
        form: The form of the iteration.
        num_rows: Rows of the matrix.
        num_cols: Columns of the matrix.
        num_steps: Newton-Schulz steps.
        dtype: Name of the dtype that the iteration runs in.

    Returns:
        The products; their FLOPs are those of :func:`~.forms.form_flops`.

    Example:
        >>> products_of(Form(), 64, 256, num_steps=5, dtype="bfloat16")[0].flops == 10 * 64**2 * 256
        True
    """
    n, m = min(num_rows, num_cols), max(num_rows, num_cols)
    panels = panel_bounds(n, form.num_panels)

    def symmetric(inner: int, dtype: str, count: int) -> list[Product]:
        return [
            Product(n - start, inner, stop - start, dtype, count)
            for start, stop in panels
            if count and inner
        ]

    if form.kind == "standard":
        made = symmetric(m, dtype, num_steps) + symmetric(n, dtype, num_steps)
        return (*made, Product(n, n, m, dtype, num_steps))
    chain = form.chain_dtype or dtype
    starts = 1 + len(form.restarts)
    made = symmetric(m, chain, starts) + symmetric(n, chain, 4 * num_steps - 3 * starts)
    return (*made, Product(n, n, m, dtype, starts))


# Passes over the elements of a matrix when it is normalized. Half precision is widened, reduced
# twice, scaled, its squares are summed, and it is divided and rounded; wider ones need no copy.
_HALF_PASSES: Final = 2
_WIDENED_PASSES: Final = 9
_WIDE_PASSES: Final = 7
_NORMALIZE_OPERATIONS: Final = 14


def orthogonalize_seconds(
    form: Form,
    shape: tuple[int, int],
    hardware: Hardware,
    *,
    num_steps: int,
    dtype: str,
    count: int = 1,
) -> float:
    """Seconds that one rank takes to orthogonalize matrices of one shape.

    A product takes as long as its operations or its bytes do, whichever is longer. Those of a
    batch fill a device together.

    Args:
        form: The form of the iteration.
        shape: Rows and columns of a matrix.
        hardware: Rates.
        num_steps: Newton-Schulz steps.
        dtype: Name of the dtype that the iteration runs in.
        count: How many matrices, on their owner together.

    Returns:
        Seconds.
    """
    if not count or not shape[0] * shape[1]:
        return 0.0
    together = count if form.batched else 1
    fills = together ** (1 / 3) if hardware.device_type != "cpu" else 1.0
    seconds = 0.0
    for product in products_of(form, *shape, num_steps=num_steps, dtype=dtype):
        rate = hardware.matrix_rate(product.dtype)
        computing = rate.seconds(product.flops, product.size * fills)
        moving = product.nbytes / hardware.memory_bytes_per_s
        # What a core multiplies lies in its caches: only devices are held up by their memory.
        one = computing if hardware.device_type == "cpu" else max(computing, moving)
        seconds += one * count + hardware.operation_s * product.count * (count / together)
    return seconds + _normalize_seconds(
        shape, hardware, dtype=dtype, count=count, together=together
    )


def _normalize_seconds(
    shape: tuple[int, int], hardware: Hardware, *, dtype: str, count: int, together: int
) -> float:
    itemsize = ITEMSIZE[dtype]
    half_bytes = _HALF_PASSES * itemsize + _WIDENED_PASSES * ITEMSIZE["float32"]
    per_element = half_bytes if itemsize < ITEMSIZE["float32"] else _WIDE_PASSES * itemsize
    nbytes = shape[0] * shape[1] * count * per_element
    launches = _NORMALIZE_OPERATIONS * hardware.operation_s * (count / together)
    return nbytes / hardware.memory_bytes_per_s + launches
