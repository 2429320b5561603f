# SPDX-License-Identifier: Apache-2.0
"""Rates of one rank: matrix products by size and dtype, passes over memory, launches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Final

import torch

from hyper_parallel.calibration.timing import Probe
from hyper_parallel.core.optimizer.coefficients import Schedule, resolve_coefficients
from hyper_parallel.core.optimizer.cost_model import products_of
from hyper_parallel.core.optimizer.forms import Form, choose_form, form_flops
from hyper_parallel.core.optimizer.hardware import MatrixRate
from hyper_parallel.core.optimizer.iteration import iterate

SIZES: Final = {"cpu": (32, 64, 128, 256, 512, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
ASPECTS: Final = (1, 4)
_LARGEST_FLOPS: Final = {"cpu": 4e10, "cuda": 2e14}
_BATCH: Final = 8  # matrices, where a CPU multiplies them together
_PAIRS: Final = {"cpu": 4, "cuda": 1}
_STREAM_TENSORS: Final = 16
# On a CPU together as much as a rank of a small model holds, which its caches partly keep.
_STREAM_NUMEL: Final = {"cpu": 1 << 16, "cuda": 1 << 24}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Measured Newton-Schulz steps of one shape.

    Attributes:
        flops: Operations.
        sizes: Geometric mean of the dims of each product, with its share of the operations.
        seconds: How long they took, launches taken off.
    """

    flops: float
    sizes: tuple[tuple[float, float], ...]
    seconds: float

    @property
    def size(self) -> float:
        """The one size at which all of its operations would take as long, by the formula."""
        return 1 / sum(share / size for size, share in self.sizes)


class MatrixProbes:
    """Newton-Schulz steps of many shapes, single matrices and batches.

    Args:
        dtype: Name of the dtype.
        device: Where.
        waits_for_all: Whether the slowest rank counts.

    Attributes:
        probes: By name.
    """

    def __init__(self, dtype: str, device: torch.device, *, waits_for_all: bool) -> None:
        kind = "cpu" if device.type == "cpu" else "cuda"
        schedule = resolve_coefficients("jordan", 5)
        self.probes: dict[str, Probe] = {}
        self._launches = 3 * len(schedule)
        self._sizes: dict[str, tuple[float, tuple[tuple[float, float], ...]]] = {}
        for rows, cols in [(n, n * aspect) for n in SIZES[kind] for aspect in ASPECTS]:
            flops = form_flops(Form(), rows, cols, len(schedule))
            if flops > _LARGEST_FLOPS[kind] / (1 if dtype in ("bfloat16", "float16") else 3):
                continue
            form = choose_form(
                rows, cols, schedule, method="standard", dtype=dtype, device_type=device.type
            )
            together = _BATCH if form.batched and device.type == "cpu" else 1
            shape = (together, rows, cols) if together > 1 else (rows, cols)
            # Several pairs, since a step multiplies none twice.
            made = torch.randn((_PAIRS[kind], *shape), device=device) / cols
            made = made.to(getattr(torch, dtype))
            pairs = cycle(zip(made, torch.empty_like(made), strict=True))
            name = f"{dtype} {rows} x {cols}"
            self.probes[name] = Probe(
                call=partial(_iterate_next, pairs, schedule), waits_for_all=waits_for_all
            )
            products = products_of(Form(), rows, cols, num_steps=len(schedule), dtype=dtype)
            shares = tuple((product.size, product.flops / flops) for product in products)
            self._sizes[name] = flops * together, shares

    def rate(self, times: Mapping[str, float], *, operation_s: float) -> MatrixRate:
        """The formula that fits best, and what was measured at each size.

        Args:
            times: Seconds of each probe.
            operation_s: Seconds of a launch, taken off.

        Returns:
            The rate.
        """
        samples = [
            Sample(
                flops=flops,
                sizes=shares,
                seconds=max(times[name] - self._launches * operation_s, times[name] / 10),
            )
            for name, (flops, shares) in self._sizes.items()
        ]
        points = sorted((sample.size, sample.flops / sample.seconds) for sample in samples)
        return replace(fit_matrix_rate(samples), measured=tuple(points))


def _iterate_next(pairs: Iterator[tuple[torch.Tensor, torch.Tensor]], schedule: Schedule) -> None:
    X, spare = next(pairs)
    iterate(X, spare, schedule, Form())


def fit_matrix_rate(samples: Sequence[Sample]) -> MatrixRate:
    """The rate whose relative errors on some samples are least in squares.

    Seconds are ``a flops + b flops / size``, so this is a linear fit of ``a`` and ``b``; where one
    of them would be negative, it is left out.

    Args:
        samples: At least one.

    Returns:
        The rate.

    Example:
        >>> true = MatrixRate(peak_flops_per_s=1e12, half_size=100.0)
        >>> sizes = (64.0, 512.0)
        >>> samples = [
        ...     Sample(flops=1e9, sizes=((s, 1.0),), seconds=true.seconds(1e9, s)) for s in sizes
        ... ]
        >>> round(fit_matrix_rate(samples).half_size, 6)
        100.0
    """
    # Both columns over the measured seconds, so that errors are relative.
    first = [sample.flops / sample.seconds for sample in samples]
    second = [
        sample.flops * sum(share / size for size, share in sample.sizes) / sample.seconds
        for sample in samples
    ]
    aa = sum(x * x for x in first)
    ab = sum(x * y for x, y in zip(first, second, strict=True))
    bb = sum(y * y for y in second)
    determinant = aa * bb - ab * ab
    a = b = 0.0
    if determinant > 1e-12 * aa * bb:
        a = (sum(first) * bb - sum(second) * ab) / determinant
        b = (sum(second) * aa - sum(first) * ab) / determinant
    if a <= 0 or b < 0:  # one number alone
        return MatrixRate(peak_flops_per_s=aa / sum(first), half_size=0.0)
    return MatrixRate(peak_flops_per_s=1 / a, half_size=b / a)


def memory_probe(device: torch.device, *, waits_for_all: bool) -> tuple[Probe, int]:
    """The passes of a step: interpolate, round, decay and add.

    Args:
        device: Where.
        waits_for_all: Whether the slowest rank counts.

    Returns:
        The probe, and the bytes that it reads and writes, together.
    """
    numel = _STREAM_NUMEL["cpu" if device.type == "cpu" else "cuda"]
    wide = [torch.randn(numel, device=device) for _ in range(3 * _STREAM_TENSORS)]
    grads, momenta, weights = (wide[i::3] for i in range(3))
    narrow = [torch.empty(numel, dtype=torch.bfloat16, device=device) for _ in grads]

    def passes() -> None:
        directions = list(torch._foreach_lerp(grads, momenta, 0.9))
        torch._foreach_copy_(narrow, directions)
        torch._foreach_lerp_(momenta, grads, 0.05)
        torch._foreach_mul_(weights, 1 - 1e-9)
        torch._foreach_add_(weights, narrow, alpha=-1e-9)

    bytes_per_element = 12 + 6 + 12 + 8 + 10
    nbytes = bytes_per_element * numel * _STREAM_TENSORS
    return Probe(call=passes, waits_for_all=waits_for_all), nbytes


def operation_probe(device: torch.device, *, waits_for_all: bool) -> tuple[Probe, int]:
    """Operations that have next to nothing to do, views and kernels.

    Args:
        device: Where.
        waits_for_all: Whether the slowest rank counts.

    Returns:
        The probe, and how many it launches.
    """
    x = torch.zeros(64, device=device)

    def launches() -> None:
        for _ in range(50):
            x.narrow(0, 0, 16).view(4, 4).add_(1)

    return Probe(call=launches, waits_for_all=waits_for_all), 150
