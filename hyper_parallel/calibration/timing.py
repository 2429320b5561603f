# SPDX-License-Identifier: Apache-2.0
"""Time a call on whatever device it runs."""

import statistics
import time
from collections.abc import Callable

import torch

_FEWEST = 3


def seconds_of(call: Callable[[], object], device: torch.device, *, budget_s: float) -> float:
    """Median time of a call, after one to warm up.

    Args:
        call: What to time.
        device: Where it runs.
        budget_s: For how long to repeat it; at least three times.

    Returns:
        Seconds.
    """
    call()
    _wait(device)
    took: list[float] = []
    stop = time.perf_counter() + budget_s
    while len(took) < _FEWEST or time.perf_counter() < stop:
        start = time.perf_counter()
        call()
        _wait(device)
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
