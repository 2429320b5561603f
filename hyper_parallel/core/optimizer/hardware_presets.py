# SPDX-License-Identifier: Apache-2.0
"""Machines one can rent, from public datasheets. No torch.

Datasheets give peaks. What a step reaches of them is assumed here, in a few constants; a file made
by ``hyper-parallel calibrate`` on the machine itself replaces all of it.
"""

from difflib import get_close_matches
from typing import Final

from hyper_parallel.core.optimizer.hardware import Hardware, Link, MatrixRate

# Of a datasheet's peak: large products reach about 0.8 of the dense rate (clocks drop under load),
# streams 0.85 of the memory's, messages 0.8 of the link's. A product with dims of 1024 then has
# 0.4 of the peak, one of 4096 0.64, which is what cuBLAS is seen to do on H100.
_MATRIX: Final = 0.8
_HALF_SIZE: Final = 1024.0
_MEMORY: Final = 0.85
_LINK: Final = 0.8

# One more peer in an all-to-all costs little more than issuing its message: all are on their way
# at once.
_LAUNCH_S: Final = 5e-6
_WITHIN_LATENCY_S: Final = 1e-6
_BETWEEN_LATENCY_S: Final = 2e-6


def _accelerator(
    name: str,
    source: str,
    *,
    tflops: dict[str, float],
    memory_gb_per_s: float,
    memory_gb: float,
    gb_per_s: tuple[float, float],
    device_type: str = "cuda",
) -> Hardware:
    """A preset from a datasheet; ``gb_per_s`` are one direction within and between nodes."""
    within, between = gb_per_s
    return Hardware(
        name=name,
        source=source,
        device_type=device_type,
        matrix_rates={
            dtype: MatrixRate(peak_flops_per_s=rate * 1e12 * _MATRIX, half_size=_HALF_SIZE)
            for dtype, rate in tflops.items()
        },
        memory_bytes_per_s=memory_gb_per_s * 1e9 * _MEMORY,
        memory_bytes=memory_gb * 1e9,
        operation_s=_LAUNCH_S,
        within_node=Link(latency_s=_WITHIN_LATENCY_S, bytes_per_s=within * 1e9 * _LINK),
        between_nodes=Link(latency_s=_BETWEEN_LATENCY_S, bytes_per_s=between * 1e9 * _LINK),
        ranks_per_node=8,
    )


PRESETS: Final[dict[str, Hardware]] = {
    hardware.name: hardware
    for hardware in (
        # 80 GB SXM: NVLink 600 GB/s both ways; a DGX A100 has one 200 Gbit/s port per GPU.
        _accelerator(
            "a100",
            "https://www.nvidia.com/en-us/data-center/a100/",
            tflops={"bfloat16": 312, "float16": 312, "float32": 19.5, "float64": 19.5},
            memory_gb_per_s=2039,
            memory_gb=80,
            gb_per_s=(300, 25),
        ),
        # SXM, dense rates: NVLink 900 GB/s both ways, one 400 Gbit/s port per GPU.
        _accelerator(
            "h100",
            "https://www.nvidia.com/en-us/data-center/h100/",
            tflops={"bfloat16": 989, "float16": 989, "float32": 67, "float64": 67},
            memory_gb_per_s=3350,
            memory_gb=80,
            gb_per_s=(450, 50),
        ),
        _accelerator(
            "h200",
            "https://www.nvidia.com/en-us/data-center/h200/",
            tflops={"bfloat16": 989, "float16": 989, "float32": 67, "float64": 67},
            memory_gb_per_s=4800,
            memory_gb=141,
            gb_per_s=(450, 50),
        ),
        # One GPU of a DGX B200: NVLink 1.8 TB/s both ways, one 400 Gbit/s port.
        _accelerator(
            "b200",
            "https://www.nvidia.com/en-us/data-center/dgx-b200/",
            tflops={"bfloat16": 2250, "float16": 2250, "float32": 75, "float64": 37},
            memory_gb_per_s=8000,
            memory_gb=180,
            gb_per_s=(900, 50),
        ),
        # Seven Infinity Fabric links of 128 GB/s both ways; one 400 Gbit/s port per GPU.
        _accelerator(
            "mi300x",
            "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
            tflops={"bfloat16": 1307, "float16": 1307, "float32": 163, "float64": 163},
            memory_gb_per_s=5300,
            memory_gb=192,
            gb_per_s=(448, 50),
        ),
        # One of eight in an Atlas 800T A2: seven HCCS links of 56 GB/s both ways, one 200 Gbit/s
        # port.
        _accelerator(
            "ascend910b",
            "https://e.huawei.com/en/products/computing/ascend/atlas-800t-a2",
            tflops={"bfloat16": 313, "float16": 313, "float32": 75},
            memory_gb_per_s=1600,
            memory_gb=64,
            gb_per_s=(196, 25),
            device_type="npu",
        ),
        # Gloo over loopback, one thread a rank. Only the order of magnitude counts: calibrate.
        Hardware(
            name="cpu",
            source="a server core with AVX-512 and AMX, measured by `hyper-parallel calibrate`",
            device_type="cpu",
            matrix_rates={
                "bfloat16": MatrixRate(peak_flops_per_s=4e11, half_size=100),
                "float16": MatrixRate(peak_flops_per_s=2e10, half_size=50),
                "float32": MatrixRate(peak_flops_per_s=1e11, half_size=50),
                "float64": MatrixRate(peak_flops_per_s=5e10, half_size=50),
            },
            memory_bytes_per_s=1e10,
            memory_bytes=8e9,
            operation_s=4e-6,
            within_node=Link(latency_s=1e-4, bytes_per_s=1e9),
            between_nodes=Link(latency_s=2e-4, bytes_per_s=1e9),
            ranks_per_node=8,
            cores_per_node=8,
        ),
    )
}
"""By name: ``a100``, ``h100``, ``h200``, ``b200``, ``mi300x``, ``ascend910b``, ``cpu``."""


def preset(name: str) -> Hardware:
    """A preset by name.

    Args:
        name: One of :data:`PRESETS`, in any case; hyphens, underscores and blanks do not count.

    Returns:
        The hardware.

    Raises:
        ValueError: If there is none of that name; the message lists the near ones.

    Example:
        >>> preset("H200").memory_bytes
        141000000000.0
    """
    plain = name.lower().translate(str.maketrans("", "", "-_ "))
    if plain not in PRESETS:
        near = get_close_matches(plain, PRESETS, n=3, cutoff=0.5) or list(PRESETS)
        raise ValueError(
            f"hardware: expected one of {', '.join(PRESETS)} or a hardware file, got {name!r}; "
            f"near: {', '.join(near)}"
        )
    return PRESETS[plain]
