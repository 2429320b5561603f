# SPDX-License-Identifier: Apache-2.0
"""Products that are known to be symmetric, by the kernels of a package that need not be there.

``quack-kernels`` computes one triangle and mirrors it, on NVIDIA GPUs from Hopper on, in half
precision: https://github.com/Dao-AILab/quack.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from hyper_parallel.core.optimizer.forms import QUACK

_DTYPES: Final = ("bfloat16", "float16")
_CAPABILITIES: Final = (9, 10)


def check_kernels(method: str, *, dtype: str, device_type: str) -> None:
    """Refuse a method whose kernels cannot run here, since nothing takes their place silently.

    Args:
        method: Any method; those without kernels of a package pass.
        dtype: Name of the dtype of the iteration.
        device_type: Where the matrices are.

    Raises:
        ValueError: If the dtype, the device or the package is not what the method needs.
    """
    if method != QUACK:
        return
    lacks = None
    if dtype not in _DTYPES:
        lacks = f"an iteration in {' or '.join(_DTYPES)}, got {dtype}"
    elif device_type != "cuda" or not torch.cuda.is_available():
        lacks = f"matrices on a CUDA device, got {device_type}"
    elif (capability := torch.cuda.get_device_capability())[0] not in _CAPABILITIES:
        lacks = (
            f"a device of compute capability {' or '.join(map(str, _CAPABILITIES))} (Hopper, "
            f"Blackwell), got {'.'.join(map(str, capability))}"
        )
    elif find_spec("quack") is None:
        lacks = "the package quack-kernels: pip install 'hyper-parallel[kernels]'"
    if lacks is not None:
        raise ValueError(f'method {method!r} needs {lacks}; "auto" and "standard" run anywhere')


def symmetric_product(
    A: Tensor,
    B: Tensor,
    *,
    out: Tensor,
    C: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> None:
    """``out = alpha A B + beta C``, where that is known to be symmetric.

    Args:
        A: ``(n, k)`` or ``(batch, n, k)``.
        B: ``(k, n)`` or ``(batch, k, n)``.
        out: ``(n, n)`` or ``(batch, n, n)``; overwritten.
        C: Like ``out``; nothing is added if None.
        alpha: Factor of the product.
        beta: Factor of ``C``.
    """
    _kernel()(A, B, C=C, out=out, alpha=alpha, beta=beta)


@cache
def _kernel() -> Callable[..., Any]:
    kernel: Callable[..., Any] = import_module("quack.gemm_interface").gemm_symmetric
    return kernel
