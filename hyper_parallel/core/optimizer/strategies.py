# SPDX-License-Identifier: Apache-2.0
"""Ways to orthogonalize a group of parameters, and what each would cost its busiest rank. No torch.

Each is priced for the group alone and without overlap: these numbers are for comparing strategies,
not for a clock.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from hyper_parallel.core.optimizer.bucket import Orthogonalization
from hyper_parallel.core.optimizer.cost_model import ITEMSIZE, orthogonalize_seconds
from hyper_parallel.core.optimizer.hardware import Hardware, Link
from hyper_parallel.core.optimizer.layout import ParamLayout
from hyper_parallel.core.optimizer.matrix_view import matrices_of
from hyper_parallel.core.optimizer.memory import orthogonalize_bytes
from hyper_parallel.core.optimizer.owners import Item, assign_owners

STRATEGIES: Final = {
    "local": "each rank orthogonalizes the matrices that it holds whole",
    "owner, direct": "one owner per matrix, one all-to-all each way among all ranks",
    "owner, staged": "one owner per matrix, back inside its copy, then along the replicas",
    "owner in each replica": "every replica group orthogonalizes all matrices for itself",
    "gather and repeat": "every rank gathers matrix after matrix and repeats all work, as is usual",
}
"""What each strategy does, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to orthogonalize a group, as its busiest rank sees it.

    Attributes:
        name: One of :data:`STRATEGIES`.
        seconds: Predicted seconds, without overlap.
        flops: Operations.
        received_bytes: Bytes from other ranks.
        memory_bytes: Whole matrices and the working set of the largest, without buckets.
    """

    name: str
    seconds: float
    flops: int
    received_bytes: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutGroup:
    """Parameters that share a layout and a kind of work, with what all strategies need to know.

    Attributes:
        layout: The layout.
        work: How they are orthogonalized.
        shapes: Shapes of matrices, and how many there are of each.
        num_params: Parameters.
        num_elements: Elements of all of them.
        is_whole: Whether every matrix lies whole on one rank of each copy.
        num_copies: Replicas, including those that share nothing in this plan.
        route: Route of the plan.
        owned: By owner, how many matrices of each shape the plan gave it.
        domain_loads: Operations by owner, with the groups on the same ranks.
        domain_largest: Operations of the most expensive matrix on these ranks.
        hardware: What it runs on.
    """

    layout: ParamLayout
    work: Orthogonalization
    shapes: Counter[tuple[int, int]]
    num_params: int
    num_elements: int
    is_whole: bool
    num_copies: int
    route: str
    owned: Mapping[int, Mapping[tuple[int, int], int]]
    domain_loads: Mapping[int, int]
    domain_largest: int
    hardware: Hardware

    @property
    def wire_bytes(self) -> int:
        """Bytes of all matrices on the wire."""
        return self.num_elements * ITEMSIZE[self.work.wire_dtype]

    @property
    def num_matrices(self) -> int:
        """Matrices of all parameters."""
        return self.shapes.total()

    def seconds(self, shapes: Mapping[tuple[int, int], int], *, one_by_one: bool = False) -> float:
        """Seconds of orthogonalizing matrices on one rank, those of a shape together or not."""
        return sum(
            orthogonalize_seconds(
                self.work.form(*shape),
                shape,
                self.hardware,
                num_steps=len(self.work.coefficients),
                dtype=self.work.dtype,
                count=1 if one_by_one else count,
            )
            * (count if one_by_one else 1)
            for shape, count in shapes.items()
        )

    def working_bytes(self) -> int:
        """The working set of the largest matrix."""
        shape = max(self.shapes, key=math.prod)
        return orthogonalize_bytes(
            self.work.form(*shape),
            shape,
            count=1,
            dtype=self.work.dtype,
            wire_dtype=self.work.wire_dtype,
        )


@lru_cache(maxsize=4096)
def shape_flops(work: Orthogonalization, shape: tuple[int, int]) -> int:
    """Operations that one matrix of a shape takes."""
    box = tuple((0, length) for length in shape)
    return work.flops(matrices_of(shape, None, "")[0]) if all(box) else 0


@dataclass(frozen=True, slots=True)
class Split:
    """What the busiest owner has.

    Attributes:
        busiest: Its matrices, by shape.
    """

    busiest: Counter[tuple[int, int]]


def split_evenly(group: LayoutGroup, num_ranks: int) -> Split:
    """Give the matrices to ranks as the planner does, any rank being free to take any of them."""
    costs = {shape: shape_flops(group.work, shape) for shape in group.shapes}
    shapes = sorted(group.shapes.elements(), key=lambda shape: -costs[shape])
    items = [Item(cost=costs[shape], nbytes=math.prod(shape)) for shape in shapes]
    owners = assign_owners(items, tuple(range(num_ranks)))
    loads: Counter[int] = Counter()
    for item, owner in zip(items, owners, strict=True):
        loads[owner] += item.cost
    busiest = max(loads, key=lambda owner: loads[owner])
    mine = Counter(s for s, owner in zip(shapes, owners, strict=True) if owner == busiest)
    return Split(mine)


def planned_split(group: LayoutGroup) -> Split:
    """Owners as the plan has them."""
    loads = {
        owner: sum(shape_flops(group.work, shape) * n for shape, n in mine.items())
        for owner, mine in group.owned.items()
    }
    busiest = max(loads, key=lambda owner: loads[owner])
    return Split(Counter(group.owned[busiest]))


def strategies_of(group: LayoutGroup, everyone: Split) -> list[Strategy]:
    """Price every strategy that makes sense for a group.

    Args:
        group: The group.
        everyone: What the busiest rank has if all ranks of the group's mesh share the work.

    Returns:
        One record per strategy, in no order that means anything.
    """
    layout, copies = group.layout, group.num_copies
    shards, size = layout.num_shards, layout.num_shards * copies
    wire, held = group.wire_bytes, group.wire_bytes // layout.num_shards
    working = group.working_bytes()
    whole = Counter(group.shapes)
    alone = split_evenly(group, shards) if copies > 1 else everyone
    found = []

    def add(name: str, work: Counter[tuple[int, int]], nbytes: int, links: float) -> None:
        owned = sum(rows * cols * n for (rows, cols), n in work.items())
        repeats = name == "gather and repeat"  # one matrix after the other
        memory = (0 if repeats else owned) * ITEMSIZE[group.work.wire_dtype]
        found.append(
            Strategy(
                name=name,
                seconds=group.seconds(work, one_by_one=repeats) + links,
                flops=sum(shape_flops(group.work, shape) * n for shape, n in work.items()),
                received_bytes=nbytes,
                memory_bytes=memory + working,
            )
        )

    if group.is_whole:
        add("local", alone.busiest, 0, 0.0)
    if size > 1:
        split = everyone if layout.num_replicas == copies else split_evenly(group, size)
        into = 0 if group.is_whole else _owned_bytes(group, split) * (shards - 1) // shards
        back = held * (size - 1) // size if not group.is_whole or copies > 1 else 0
        rounds = (1 if into else 0) + (1 if back else 0)
        if into + back:
            add("owner, direct", split.busiest, into + back, _seconds(group, size, into, back))
        if copies > 1 and shards > 1 and rounds:
            links = _seconds(group, shards, into, held * (shards - 1) // size)
            links += _seconds(group, copies, 0, back * (copies - 1) // copies)
            add("owner, staged", split.busiest, into + back, links)
    if copies > 1 and not group.is_whole:
        into = _owned_bytes(group, alone) * (shards - 1) // shards
        back = held * (shards - 1) // shards
        nbytes = into + back
        add("owner in each replica", alone.busiest, nbytes, _seconds(group, shards, into, back))
    gathered = wire * (shards - 1) // shards
    links = _link(group, shards).latency_s * (shards - 1) * group.num_params if shards > 1 else 0.0
    links += gathered / _link(group, shards).bytes_per_s
    add("gather and repeat", whole, gathered, links)
    return found


def _owned_bytes(group: LayoutGroup, split: Split) -> int:
    numel = sum(rows * cols * n for (rows, cols), n in split.busiest.items())
    return numel * ITEMSIZE[group.work.wire_dtype]


def _link(group: LayoutGroup, num_ranks: int) -> Link:
    hardware = group.hardware
    inside = num_ranks <= hardware.ranks_per_node
    return hardware.within_node if inside else hardware.between_nodes


def _seconds(group: LayoutGroup, num_ranks: int, *nbytes: int) -> float:
    link = _link(group, num_ranks)
    return sum((num_ranks - 1) * link.latency_s + n / link.bytes_per_s for n in nbytes if n)
