# SPDX-License-Identifier: Apache-2.0
"""Time a call on whatever device it runs."""

import statistics
import time
from collections.abc import Callable

import torch

_FEWEST = 3
_PAUSE_S = 0.002


def seconds_of(
    call: Callable[[], object], device: torch.device, *, budget_s: float, is_crowded: bool = False
) -> float:
    """Median time of a call, after one to warm up.

    Where ranks share cores, it is the time that the call spends on a core, after a short pause: in
    a step, too, a rank waits for others between its calls, and a core that comes back to it has
    other things in its caches.

    Args:
        call: What to time.
        device: Where it runs.
        budget_s: For how long to repeat it; at least three times.
        is_crowded: Whether there are more ranks than cores.

    Returns:
        Seconds.
    """
    clock = time.thread_time if is_crowded else time.perf_counter
    call()
    _wait(device)
    took: list[float] = []
    stop = time.perf_counter() + budget_s
    while len(took) < _FEWEST or time.perf_counter() < stop:
        if is_crowded:
            time.sleep(_PAUSE_S)
        start = clock()
        call()
        _wait(device)
        took.append(clock() - start)
    return statistics.median(took)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
