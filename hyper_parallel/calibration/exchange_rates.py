# SPDX-License-Identifier: Apache-2.0
"""What ranks cost each other, measured between real ones: exchanges, and waiting for cores."""

import statistics
import time
from collections.abc import Sequence
from typing import Final

import torch

from hyper_parallel.calibration.crowd import Crowd
from hyper_parallel.core.optimizer.coefficients import resolve_coefficients
from hyper_parallel.core.optimizer.collectives import ProcessGroups, start_all_to_all
from hyper_parallel.core.optimizer.hardware import Link
from hyper_parallel.core.optimizer.polar import orthogonalize_with_schedule

SIZES: Final = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Bytes that a rank receives from all others together."""

_ROUNDS: Final = 15
_BURST: Final = (4, 256, 512)  # matrices; about 10 ms of a core


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


def measure_crowd(rank: int, num_ranks: int) -> tuple[float, list[float]]:
    """Time the same burst of work on one rank, and on all at once. Called on every rank of a CPU.

    Args:
        rank: Global rank.
        num_ranks: How many there are.

    Returns:
        Seconds alone, 0 on all ranks but the first; and seconds of each burst with all others.
    """
    crowd = Crowd(num_ranks)
    schedule = resolve_coefficients("jordan", 5)
    batch = torch.randn(*_BURST).bfloat16()

    def burst() -> float:
        start = time.perf_counter()
        orthogonalize_with_schedule(batch, schedule, method="standard")
        return time.perf_counter() - start

    alone = [burst() for _ in range(_ROUNDS)] if rank == 0 else [0.0]
    together: list[float] = []
    for _ in range(_ROUNDS):
        crowd.meet()
        together.append(burst())
    return statistics.median(alone), together[2:]


def cores_in_effect(seen: Sequence[tuple[float, Sequence[float]]], num_cores: int) -> float:
    """How many cores the ranks of a node get together, by what their bursts took.

    Args:
        seen: What :func:`measure_crowd` returned on each rank.
        num_cores: Cores that there are.

    Returns:
        Cores; not more than there are, nor less than one.

    Example:
        >>> cores_in_effect([(1.0, [2.5, 2.5]), (0.0, [2.0, 1.5]), (0.0, [1.0, 2.0])], 2)
        1.2
    """
    alone = seen[0][0]
    rounds = zip(*(times for _, times in seen), strict=True)
    slowest: float = statistics.median(max(times) for times in rounds)
    return max(1.0, min(float(num_cores), len(seen) * alone / slowest))


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
