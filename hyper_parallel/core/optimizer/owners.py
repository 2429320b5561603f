# SPDX-License-Identifier: Apache-2.0
"""Who owns what: longest processing time first. No torch."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.core.optimizer.layout import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A matrix that is to be given an owner.

    Attributes:
        cost: FLOPs of orthogonalizing it.
        nbytes: Its bytes on the wire.
        candidates: Ranks that may own it; any rank of the domain if None.
    """

    cost: int
    nbytes: int
    candidates: Ranks | None = None


def assign_owners(items: Sequence[Item], ranks: Ranks) -> list[int]:
    """Give each item to its least loaded candidate, most expensive item first.

    This is Graham's longest-processing-time rule, whose largest load is at most
    ``4/3 - 1/(3 * num_ranks)`` times the optimum when any rank may own any item.

    Args:
        items: What is to be owned.
        ranks: The ranks of the domain.

    Returns:
        One rank per item. Ties go to the rank with fewer bytes, then to the lower rank, then to
        the earlier item, so every rank computes the same answer.

    Example:
        >>> costs = [3, 9, 4, 2]
        >>> assign_owners([Item(cost=c, nbytes=0) for c in costs], (0, 1))
        [1, 0, 1, 1]

    References:
        Graham, "Bounds on Multiprocessing Timing Anomalies", 1969.
        https://doi.org/10.1137/0117039
    """
    loads = dict.fromkeys(ranks, (0, 0))
    heaps: dict[Ranks, list[tuple[int, int, int]]] = {}
    heap_of: dict[int, list[tuple[int, int, int]]] = {}  # by identity: hashing many ranks is slow
    # What can only be owned in one place comes first: the rest is then balanced around it.
    order = sorted(
        range(len(items)),
        key=lambda i: (_has_choice(items[i]), -items[i].cost, -items[i].nbytes, i),
    )
    owners = [-1] * len(items)
    for i in order:
        item = items[i]
        choice = item.candidates or ranks
        heap = heap_of.get(id(choice))
        if heap is None:
            if choice not in heaps:
                heaps[choice] = [(*loads[rank], rank) for rank in choice]
                heapq.heapify(heaps[choice])
            heap = heap_of[id(choice)] = heaps[choice]
        while heap[0][:2] != loads[heap[0][2]]:  # its load has grown since: put it in its place
            owner = heap[0][2]
            heapq.heapreplace(heap, (*loads[owner], owner))
        flops, nbytes, owner = heap[0]
        loads[owner] = (flops + item.cost, nbytes + item.nbytes)
        owners[i] = owner
    return owners


def _has_choice(item: Item) -> bool:
    return item.candidates is None or len(item.candidates) > 1
