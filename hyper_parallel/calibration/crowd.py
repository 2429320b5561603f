# SPDX-License-Identifier: Apache-2.0
"""Ranks that share the cores of a machine, and measure together."""

from collections.abc import Sequence

import torch

from hyper_parallel.core.optimizer.collectives import (
    ProcessGroups,
    gather_objects,
    start_all_to_all,
)


class Crowd:
    """All ranks of a node. Every method is called on each of them.

    Args:
        num_ranks: How many there are.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._group = ProcessGroups([]).group(tuple(range(num_ranks)))

    def meet(self) -> None:
        """Wait until all are here."""
        ready = torch.zeros(self._num_ranks, dtype=torch.uint8)
        start_all_to_all(ready, [1] * self._num_ranks, [1] * self._num_ranks, self._group).wait()

    def first(self, value: float) -> float:
        """What the first rank says, so that all do the same."""
        said: float = gather_objects(value, self._group)[0]
        return said

    def slowest(self, times: Sequence[float]) -> list[float]:
        """For each round, the time of the rank that took longest: a step waits for it."""
        rounds = zip(*gather_objects(list(times), self._group), strict=True)
        return [max(one) for one in rounds]
