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
        self.exchange(torch.zeros(self.num_ranks - 1, dtype=torch.uint8, device=self.device))

    def exchange(self, packet: torch.Tensor) -> None:
        """Send an equal part to every other rank, and wait until theirs are here.

        Args:
            packet: 1-D; what is sent.
        """
        splits = [packet.numel() // max(1, self.num_ranks - 1)] * self.num_ranks
        splits[self.rank] = 0
        start_all_to_all(packet, splits, splits, self._group).wait()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def all(self, value: _Value) -> list[_Value]:
        """What each rank says."""
        said: list[_Value] = gather_objects(value, self._group)
        return said
