# SPDX-License-Identifier: Apache-2.0
"""What ranks cost each other, measured between real ones: exchanges, and waiting for cores."""

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch

from hyper_parallel.calibration.crowd import Crowd
from hyper_parallel.calibration.timing import Probe
from hyper_parallel.core.optimizer.coefficients import resolve_coefficients
from hyper_parallel.core.optimizer.hardware import Link
from hyper_parallel.core.optimizer.polar import orthogonalize_with_schedule

SIZES: Final = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Bytes that a rank receives from all others together."""

_BURST: Final = (4, 256, 512)  # matrices; about 10 ms of a core


def exchange_probes(crowd: Crowd) -> dict[int, Probe]:
    """All-to-alls of several sizes.

    Args:
        crowd: The ranks.

    Returns:
        Probes by the bytes that a rank receives from all others together.
    """
    found: dict[int, Probe] = {}
    for nbytes in SIZES:
        each = nbytes // max(1, crowd.num_ranks - 1)
        packet = torch.zeros(each * (crowd.num_ranks - 1), dtype=torch.uint8, device=crowd.device)
        call = partial(crowd.exchange, packet)
        found[packet.numel()] = Probe(call=call, once=True, waits_for_all=True)
    return found


def crowd_probes() -> tuple[Probe, Probe]:
    """The same burst of work on one rank of a CPU, and on all at once.

    Returns:
        Both.
    """
    schedule = resolve_coefficients("jordan", 5)
    batch = torch.randn(*_BURST).bfloat16()

    def burst() -> None:
        orthogonalize_with_schedule(batch, schedule, method="standard", out=batch)

    alone = Probe(call=burst, once=True, by_first_rank=True)
    return alone, Probe(call=burst, once=True, waits_for_all=True)


def cores_in_effect(alone_s: float, together_s: float, *, num_ranks: int, num_cores: int) -> float:
    """How many cores the ranks of a node get together, by what their bursts took.

    Args:
        alone_s: Seconds of a burst on one rank.
        together_s: Seconds until the last of all ranks is through with its own.
        num_ranks: Ranks.
        num_cores: Cores that there are.

    Returns:
        Cores; not more than there are, nor less than one.

    Example:
        >>> cores_in_effect(1.0, 2.5, num_ranks=3, num_cores=2)
        1.2
    """
    return max(1.0, min(float(num_cores), num_ranks * alone_s / together_s))


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
