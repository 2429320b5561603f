# SPDX-License-Identifier: Apache-2.0
"""Time calls in turn, alone or while other ranks do the same.

A machine that others share is at times half as fast as some seconds before. So nothing is timed at
a stretch: every round times everything once, and what is slow for a while is slow for all of it.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from hyper_parallel.calibration.crowd import Crowd

_FEWEST_ROUNDS: Final = 5
_MOST_ROUNDS: Final = 200
_BURST_S: Final = 0.008  # long enough for ranks on one core to take turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Something to time.

    Attributes:
        call: What to do.
        once: Whether it is done once a round, and not for some milliseconds.
        waits_for_all: Whether the slowest rank of a round counts, and not each for itself.
        by_first_rank: Whether the first rank does it while all others wait.
    """

    call: Callable[[], object]
    once: bool = False
    waits_for_all: bool = False
    by_first_rank: bool = False


def time_in_turn(probes: Mapping[str, Probe], crowd: Crowd, *, budget_s: float) -> dict[str, float]:
    """Median time of each call over the rounds. Called on every rank, with the same names.

    All ranks begin together: so it is in a step, where a rank takes its turn on a core and finds
    other things in its caches.

    Args:
        probes: What to time.
        crowd: The ranks.
        budget_s: For how long; at least some rounds.

    Returns:
        Seconds of one call, by name; 0 on ranks that left it to the first.
    """
    mine = {n: p for n, p in probes.items() if crowd.rank == 0 or not p.by_first_rank}
    alone = {name: _warm(probe, crowd.device) for name, probe in mine.items() if not probe.once}
    counts = crowd.all({name: max(1, round(_BURST_S / s)) for name, s in alone.items()})[0]

    def one_round() -> dict[str, float]:
        took = {}
        for name, probe in probes.items():
            crowd.meet()
            if name in mine:
                took[name] = _burst(probe, crowd.device, counts.get(name, 1))
        return took

    one_round()
    begun = time.perf_counter()
    one_round()
    possible = budget_s / (time.perf_counter() - begun)
    num_rounds = crowd.all(int(min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, possible))))[0]
    rounds = [one_round() for _ in range(num_rounds)]
    everywhere = crowd.all(rounds)
    found = {}
    for name, probe in probes.items():
        times = [one.get(name, 0.0) for one in rounds]
        if probe.waits_for_all:
            times = [max(ranks[i][name] for ranks in everywhere) for i in range(num_rounds)]
        found[name] = statistics.median(times)
    return found


def _warm(probe: Probe, device: torch.device) -> float:
    _burst(probe, device, 1)
    return min(_burst(probe, device, 1) for _ in range(2))


def _burst(probe: Probe, device: torch.device, times: int) -> float:
    """Seconds of one call, when it is made some times in a row."""
    start = time.perf_counter()
    for _ in range(times):
        probe.call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return (time.perf_counter() - start) / times
