# SPDX-License-Identifier: Apache-2.0
"""What work costs: floating-point operations and bytes. No torch."""

from dataclasses import dataclass
from typing import Final

ITEMSIZE: Final[dict[str, int]] = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of one element, by dtype name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Rates that a choice between computing twice and sending once depends on.

    Attributes:
        matmul_flops_per_s: Achieved rate of matrix products on one rank.
        link_bytes_per_s: Rate at which one rank receives from the others.
    """

    matmul_flops_per_s: float
    link_bytes_per_s: float


CPU: Final = Hardware(matmul_flops_per_s=1e11, link_bytes_per_s=1e9)
"""Gloo over loopback, one thread a rank: the order of magnitude is what counts."""

ACCELERATOR: Final = Hardware(matmul_flops_per_s=3e14, link_bytes_per_s=4e10)
"""Half of an H100's dense bfloat16 rate, and one 400 Gbit/s port at 80 %."""


def sharing_pays(flops: int, nbytes: int, num_shards: int, hardware: Hardware) -> bool:
    """Whether replicas should split the orthogonalization of a parameter between them.

    Where the parameter is sharded, a rank receives its part of the update either way, so sharing
    is free. Where it lies whole on every replica, sharing saves ``flops`` on all replicas but one
    and costs ``nbytes`` of update in return.

    Args:
        flops: Operations on the parameter's matrices.
        nbytes: Bytes of the parameter on the wire.
        num_shards: Number of ranks over which one copy is spread.
        hardware: Rates.

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
    return flops / hardware.matmul_flops_per_s > nbytes / hardware.link_bytes_per_s
