# SPDX-License-Identifier: Apache-2.0
"""All ranks of a node, which measure together: they meet, and hear each other's times."""

from typing import TypeVar

import torch

from hyper_parallel.core.optimizer.collectives import (
    ProcessGroups,
    gather_objects,
    start_all_to_all,
)

_Value = TypeVar("_Value")


class Crowd:
    """The ranks. Every method is called on each of them.

    Args:
        rank: Global rank.
        num_ranks: How many there are.
        device: Where this one works.
    """

    def __init__(self, rank: int, num_ranks: int, device: torch.device) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self._group = ProcessGroups([]).group(tuple(range(num_ranks)))

    def meet(self) -> None:
        """Wait until all are here."""
        self.exchange(torch.zeros(self.num_ranks, dtype=torch.uint8, device=self.device), 1)

    def exchange(self, packet: torch.Tensor, each: int, *, with_itself: bool = True) -> None:
        """Send as many elements to every rank, and wait until theirs are here.

        Args:
            packet: 1-D; what is sent.
            each: Elements for each rank.
            with_itself: Whether this rank is one of them.
        """
        splits = [each] * self.num_ranks
        if not with_itself:
            splits[self.rank] = 0
        start_all_to_all(packet, splits, splits, self._group).wait()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def all(self, value: _Value) -> list[_Value]:
        """What each rank says."""
        said: list[_Value] = gather_objects(value, self._group)
        return said
