# SPDX-License-Identifier: Apache-2.0
"""Time a call on whatever device it runs, alone or while others want the same cores."""

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

from hyper_parallel.calibration.crowd import Crowd

_FEWEST: Final = 3
_BURST_S: Final = 0.008  # long enough for ranks on one core to take turns
_MOST_ROUNDS: Final = 12


def seconds_of(
    call: Callable[[], object],
    device: torch.device,
    *,
    budget_s: float,
    crowd: Crowd | None = None,
) -> float:
    """Median time of a call, after one to warm up.

    In a crowd all ranks begin together, repeat the call for some milliseconds, and the slowest
    counts: so it is in a step, where a rank takes its turn on a core, finds other things in its
    caches, and is waited for.

    Args:
        call: What to time.
        device: Where it runs.
        budget_s: For how long to repeat it; at least three times.
        crowd: The ranks, where there are more of them than cores.

    Returns:
        Seconds.
    """
    call()
    _wait(device)
    took: list[float] = []
    stop = time.perf_counter() + (budget_s if crowd is None else 0.0)
    while len(took) < _FEWEST or time.perf_counter() < stop:
        took.append(_burst(call, device, 1))
    if crowd is None:
        return statistics.median(took)
    alone = crowd.first(min(took))
    times = max(1, round(_BURST_S / alone))
    rounds = int(min(_MOST_ROUNDS, max(_FEWEST, budget_s / (4 * times * alone))))
    bursts = []
    for _ in range(rounds):
        crowd.meet()
        bursts.append(_burst(call, device, times))
    return statistics.median(crowd.slowest(bursts))


def _burst(call: Callable[[], object], device: torch.device, times: int) -> float:
    """Seconds of one call, when it is made some times in a row."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    _wait(device)
    return (time.perf_counter() - start) / times


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
