# SPDX-License-Identifier: Apache-2.0
"""Latency and rate of an all-to-all, measured between real ranks."""

import statistics
import time
from collections.abc import Sequence
from typing import Final

import torch

from hyper_parallel.core.optimizer.collectives import ProcessGroups, start_all_to_all
from hyper_parallel.core.optimizer.hardware import Link

SIZES: Final = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Bytes that a rank receives from all others together."""

_ROUNDS: Final = 15


def measure_exchanges(rank: int, num_ranks: int, device: torch.device) -> list[tuple[int, float]]:
    """Time all-to-alls of several sizes. Called on every rank.

    Args:
        rank: Global rank.
        num_ranks: How many there are.
        device: Where the packets lie.

    Returns:
        Bytes received, and seconds, by size.
    """
    group = ProcessGroups([]).group(tuple(range(num_ranks)))
    found: list[tuple[int, float]] = []
    for nbytes in SIZES:
        each = nbytes // max(1, num_ranks - 1)
        splits = [0 if peer == rank else each for peer in range(num_ranks)]
        packet = torch.zeros(sum(splits), dtype=torch.uint8, device=device)
        took: list[float] = []
        for _ in range(_ROUNDS):
            ready = torch.zeros(num_ranks, dtype=torch.uint8, device=device)
            start_all_to_all(ready, [1] * num_ranks, [1] * num_ranks, group).wait()
            start = time.perf_counter()
            start_all_to_all(packet, splits, splits, group).wait()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            took.append(time.perf_counter() - start)
        found.append((sum(splits), statistics.median(took[2:])))
    return found


def fit_link(samples: Sequence[tuple[int, float]], num_peers: int) -> Link:
    """Latency and rate from times of several sizes.

    Args:
        samples: Bytes received, and seconds; the smallest gives the latency.
        num_peers: Peers of a rank.

    Returns:
        The link.

    Example:
        >>> link = fit_link([(0, 3e-4), (10**6, 3e-4 + 1e-3)], num_peers=3)
        >>> round(link.latency_s, 7), round(link.bytes_per_s)
        (0.0001, 1000000000)
    """
    _, latency = min(samples)
    # Relative errors, least in squares, of the rate alone.
    pairs = [(nbytes / seconds, (seconds - latency) / seconds) for nbytes, seconds in samples]
    above = [(x, y) for x, y in pairs if y > 0]
    slope = sum(x * y for x, y in above) / sum(x * x for x, _ in above) if above else 1e-12
    return Link(latency_s=latency / max(1, num_peers), bytes_per_s=1 / slope)
