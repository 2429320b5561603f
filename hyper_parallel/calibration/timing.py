# SPDX-License-Identifier: Apache-2.0
"""Time a call on whatever device it runs."""

import statistics
import time
from collections.abc import Callable

import torch

_FEWEST = 3


def seconds_of(
    call: Callable[[], object], device: torch.device, *, budget_s: float, is_crowded: bool = False
) -> float:
    """Median time of a call, after one to warm up; the mean where ranks take turns on a core.

    A short call mostly runs while its rank has the core: the median then says nothing of the turns
    of others, nor of the caches that they leave behind.

    Args:
        call: What to time.
        device: Where it runs.
        budget_s: For how long to repeat it; at least three times.
        is_crowded: Whether there are more ranks than cores.

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
    return statistics.fmean(took) if is_crowded else statistics.median(took)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
