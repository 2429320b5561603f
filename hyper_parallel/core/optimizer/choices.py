# SPDX-License-Identifier: Apache-2.0
"""What else one could do with each group of parameters, what it would cost, and why not. No torch.

Parameters that share a layout, a view and a kind of work form a group. Each strategy is priced for
the group alone and without overlap: these numbers are for comparing strategies, not for a clock.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final

from hyper_parallel.core.optimizer.bucket import Orthogonalization, PlannedParam
from hyper_parallel.core.optimizer.cost_model import ITEMSIZE, orthogonalize_seconds
from hyper_parallel.core.optimizer.hardware import Hardware, Link
from hyper_parallel.core.optimizer.layout import MeshLayout, ParamLayout
from hyper_parallel.core.optimizer.matrix_view import matrices_of
from hyper_parallel.core.optimizer.memory import orthogonalize_bytes
from hyper_parallel.core.optimizer.owners import Item, assign_owners
from hyper_parallel.core.optimizer.plan import Plan
from hyper_parallel.core.optimizer.report import quantity
from hyper_parallel.core.optimizer.simulation import reference_mesh

STRATEGIES: Final = {
    "local": "each rank orthogonalizes the matrices that it holds whole",
    "owner, direct": "one owner per matrix, one all-to-all each way among all ranks",
    "owner, staged": "one owner per matrix, back inside its copy, then along the replicas",
    "owner in each replica": "every replica group orthogonalizes all matrices for itself",
    "gather and repeat": "every rank gathers all matrices and repeats the work of all, as is usual",
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
class GroupChoice:
    """A group of parameters, and what is done with it.

    Attributes:
        placements: Layout in short, as in :meth:`ParamLayout.placements_text`.
        mesh_shape: Its mesh.
        work: How it is orthogonalized, in words.
        num_params: Parameters.
        num_matrices: Matrices.
        shapes: Shapes of matrices, and how many there are of each, most work first.
        strategies: What was compared, the chosen one first, then by time.
        chosen: Name of the strategy of the plan.
        reason: Why, in one sentence.
        imbalance: Load of the busiest rank over the mean, with the groups on the same ranks.
        bound: What bounds the balance, in one sentence.
        num_idle: Ranks that own no matrix, of this group or another on the same ranks.
        advice: What to do about idle ranks or imbalance; empty if there is nothing to do.
    """

    placements: str
    mesh_shape: tuple[int, ...]
    work: str
    num_params: int
    num_matrices: int
    shapes: tuple[tuple[int, int, int], ...]
    strategies: tuple[Strategy, ...]
    chosen: str
    reason: str
    imbalance: float
    bound: str
    num_idle: int
    advice: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A group with what all strategies need to know of it."""

    layout: ParamLayout
    work: Orthogonalization
    shapes: Counter[tuple[int, int]]
    num_params: int
    num_elements: int
    is_whole: bool  # every matrix lies whole on one rank of each copy
    num_copies: int  # replicas, including those that share nothing in this plan
    route: str
    owned: Mapping[int, Mapping[tuple[int, int], int]]  # by owner, what the plan gave it
    domain_loads: Mapping[int, int]  # operations by owner, with the groups on the same ranks
    domain_largest: int  # operations of the most expensive matrix on these ranks
    hardware: Hardware

    @property
    def wire_bytes(self) -> int:
        return self.num_elements * ITEMSIZE[self.work.wire_dtype]

    @property
    def num_matrices(self) -> int:
        return self.shapes.total()

    @property
    def flops(self) -> Counter[tuple[int, int]]:
        return Counter({shape: _flops(self.work, shape) * n for shape, n in self.shapes.items()})

    def seconds(self, shapes: Mapping[tuple[int, int], int]) -> float:
        """Seconds of orthogonalizing some matrices on one rank."""
        return sum(
            orthogonalize_seconds(
                self.work.form(*shape),
                shape,
                self.hardware,
                num_steps=len(self.work.coefficients),
                dtype=self.work.dtype,
                count=count,
            )
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
def _flops(work: Orthogonalization, shape: tuple[int, int]) -> int:
    box = tuple((0, length) for length in shape)
    return work.flops(matrices_of(shape, None, "")[0]) if all(box) else 0


def explain(
    plan: Plan, hardware: Hardware, *, mesh: MeshLayout | None = None
) -> tuple[GroupChoice, ...]:
    """Compare strategies for each group of a plan.

    Args:
        plan: The plan.
        hardware: What it runs on.
        mesh: The mesh of all ranks. None takes the largest of the parameters' meshes.

    Returns:
        One choice per group, most operations first.
    """
    if not plan.params:
        return ()
    mesh = mesh or reference_mesh(plan.params)
    routes = {p.param: bucket.route for bucket in plan.buckets for p in bucket.matrices}
    travels = {p.param: bucket.gathers for bucket in plan.buckets for p in bucket.matrices}
    owners: dict[int, Counter[tuple[int, int, int]]] = {}
    for planned in (planned for bucket in plan.buckets for planned in bucket.matrices):
        key = (planned.owner, planned.matrix.num_rows, planned.matrix.num_cols)
        owners.setdefault(planned.param, Counter())[key] += 1
    loads: dict[tuple[int, ...], Counter[int]] = {}
    largest: dict[tuple[int, ...], int] = {}
    for index, param in enumerate(plan.params):
        members = param.layout.mesh.members
        load = loads.setdefault(members, Counter())
        for (owner, rows, cols), count in owners.get(index, Counter()).items():
            cost = _flops(param.work, (rows, cols))
            load[owner] += cost * count
            largest[members] = max(largest.get(members, 0), cost)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, param in enumerate(plan.params):
        layout = param.layout
        layout_and_work = (layout.axes, layout.mesh.shape, layout.mesh.ranks, param.work)
        groups.setdefault(layout_and_work, []).append(index)
    choices = []
    for indices in groups.values():
        params = [plan.params[i] for i in indices]
        group = _Group(
            layout=params[0].layout,
            work=params[0].work,
            shapes=_shapes(params),
            num_params=len(params),
            num_elements=sum(math.prod(param.layout.shape) for param in params),
            is_whole=_is_whole(params),
            num_copies=params[0].layout.num_replicas
            * (len(mesh.ranks) // len(params[0].layout.mesh.ranks)),
            route=next((routes[i] for i in indices if travels.get(i)), routes.get(indices[0], "")),
            owned=_owned(indices, owners),
            domain_loads=loads[params[0].layout.mesh.members],
            domain_largest=largest[params[0].layout.mesh.members],
            hardware=hardware,
        )
        if group.num_matrices:
            choices.append(_choice(group))
    return tuple(sorted(choices, key=lambda choice: -choice.strategies[0].flops))


def _owned(
    indices: Sequence[int], owners: Mapping[int, Counter[tuple[int, int, int]]]
) -> dict[int, Counter[tuple[int, int]]]:
    found: dict[int, Counter[tuple[int, int]]] = {}
    for index in indices:
        for (owner, rows, cols), count in owners.get(index, Counter()).items():
            found.setdefault(owner, Counter())[rows, cols] += count
    return found


def _shapes(params: Sequence[PlannedParam]) -> Counter[tuple[int, int]]:
    shapes: Counter[tuple[int, int]] = Counter()
    for (shape, view), times in Counter((p.layout.shape, p.view) for p in params).items():
        for matrix in matrices_of(shape, view, params[0].name):
            if matrix.numel:
                shapes[matrix.num_rows, matrix.num_cols] += times
    return shapes


def _is_whole(params: Sequence[PlannedParam]) -> bool:
    seen = {(p.layout.shape, p.view): p for p in params}.values()
    return all(
        p.layout.num_shards == 1 or p.layout.holders(matrix.box)
        for p in seen
        for matrix in matrices_of(p.layout.shape, p.view, p.name)
        if matrix.numel
    )


@dataclass(frozen=True, slots=True)
class _Split:
    """Matrices on owners."""

    busiest: Counter[tuple[int, int]]
    busiest_flops: int


def _split(group: _Group, num_ranks: int) -> _Split:
    """Give the matrices to ranks as the planner does, any rank being free to take any of them."""
    costs = {shape: _flops(group.work, shape) for shape in group.shapes}
    shapes = sorted(group.shapes.elements(), key=lambda shape: -costs[shape])
    items = [Item(cost=costs[shape], nbytes=math.prod(shape)) for shape in shapes]
    owners = assign_owners(items, tuple(range(num_ranks)))
    loads: Counter[int] = Counter()
    for item, owner in zip(items, owners, strict=True):
        loads[owner] += item.cost
    busiest = max(loads, key=lambda owner: loads[owner])
    mine = Counter(s for s, owner in zip(shapes, owners, strict=True) if owner == busiest)
    return _Split(mine, loads[busiest])


def _planned(group: _Group) -> _Split:
    """Owners as the plan has them."""
    loads = {
        owner: sum(_flops(group.work, shape) * n for shape, n in mine.items())
        for owner, mine in group.owned.items()
    }
    busiest = max(loads, key=lambda owner: loads[owner])
    return _Split(Counter(group.owned[busiest]), loads[busiest])


def _choice(group: _Group) -> GroupChoice:
    shards, copies = group.layout.num_shards, group.num_copies
    num_ranks = shards * group.layout.num_replicas
    everyone = _planned(group) if group.is_whole else _split(group, num_ranks)
    chosen = _chosen(group)
    found = _strategies(group, everyone)
    first = next(strategy for strategy in found if strategy.name == chosen)
    others = sorted((s for s in found if s is not first), key=lambda s: s.seconds)
    mean = sum(group.domain_loads.values()) / num_ranks
    imbalance = max(group.domain_loads.values()) / mean
    num_idle = num_ranks - len(group.domain_loads)
    top = sorted(group.shapes.items(), key=lambda pair: -_flops(group.work, pair[0]) * pair[1])
    form = group.work.form(*top[0][0])
    return GroupChoice(
        placements=group.layout.placements_text() or "whole",
        mesh_shape=group.layout.mesh.shape,
        work=f"{form}, {len(group.work.coefficients)} steps, {group.work.dtype}",
        num_params=group.num_params,
        num_matrices=group.num_matrices,
        shapes=tuple((rows, cols, count) for (rows, cols), count in top),
        strategies=(first, *others),
        chosen=chosen,
        reason=_reason(group, first, others, copies),
        imbalance=imbalance,
        bound=_bound(group.domain_largest, mean, imbalance),
        num_idle=num_idle,
        advice=_advice(group, num_idle, imbalance),
    )


def _chosen(group: _Group) -> str:
    if group.layout.num_replicas > 1:
        return f"owner, {group.route or 'direct'}"
    if group.is_whole:
        return "local"
    return "owner in each replica" if group.num_copies > 1 else "owner, direct"


def _strategies(group: _Group, everyone: _Split) -> list[Strategy]:
    layout, copies = group.layout, group.num_copies
    shards, size = layout.num_shards, layout.num_shards * copies
    wire, held = group.wire_bytes, group.wire_bytes // layout.num_shards
    working = group.working_bytes()
    whole = Counter(group.shapes)
    alone = _split(group, shards) if copies > 1 else everyone
    found = []

    def add(name: str, work: Counter[tuple[int, int]], nbytes: int, links: float) -> None:
        owned = sum(rows * cols * n for (rows, cols), n in work.items())
        memory = (owned if name != "gather and repeat" else 0) * ITEMSIZE[group.work.wire_dtype]
        found.append(
            Strategy(
                name=name,
                seconds=group.seconds(work) + links,
                flops=sum(_flops(group.work, shape) * n for shape, n in work.items()),
                received_bytes=nbytes,
                memory_bytes=memory + working,
            )
        )

    if group.is_whole:
        add("local", alone.busiest, 0, 0.0)
    if size > 1:
        split = everyone if layout.num_replicas == copies else _split(group, size)
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


def _owned_bytes(group: _Group, split: _Split) -> int:
    numel = sum(rows * cols * n for (rows, cols), n in split.busiest.items())
    return numel * ITEMSIZE[group.work.wire_dtype]


def _link(group: _Group, num_ranks: int) -> Link:
    hardware = group.hardware
    inside = num_ranks <= hardware.ranks_per_node
    return hardware.within_node if inside else hardware.between_nodes


def _seconds(group: _Group, num_ranks: int, *nbytes: int) -> float:
    link = _link(group, num_ranks)
    return sum((num_ranks - 1) * link.latency_s + n / link.bytes_per_s for n in nbytes if n)


def _reason(group: _Group, first: Strategy, others: Sequence[Strategy], copies: int) -> str:
    repeat = next((s for s in others if s.name == "gather and repeat"), first)
    times = repeat.flops / first.flops if first.flops else 1.0
    share = f"1/{times:,.0f}" if times >= 10 else f"1/{times:.2g}"
    if first.name == "local":
        if copies > 1:
            return (
                "Each rank holds its matrices whole, and on the replicas computing them again is "
                "cheaper than sending the updates."
            )
        return "Each rank holds its matrices whole, so nothing has to travel."
    if group.is_whole:
        return (
            f"The matrices lie whole on every replica; sharing leaves each rank {share} of the "
            "work for one message back."
        )
    if first.name == "owner in each replica":
        return (
            "Nothing crosses the replica axes: asked for by share_replicas=False, or because "
            "sharing does not pay on small matrices."
        )
    end = ""
    if first.name == "owner, staged":
        end = "; among so many ranks one all-to-all would open too many connections"
    elif group.layout.num_replicas > 1:
        end = "; replicas share the work, which costs no more bytes than repeating it"
    return (
        f"Each matrix is orthogonalized once: the busiest rank does {share} of what "
        f"gathering and repeating would{end}."
    )


def _bound(largest: int, mean: float, imbalance: float) -> str:
    if imbalance <= 1.02:
        return "The work is even."
    if largest >= mean:
        return (
            f"One matrix ({quantity(largest, 'FLOP')}) is more than a rank's mean share "
            f"({quantity(mean, 'FLOP')}): no owner can do less."
        )
    return (
        f"Whole matrices of up to {quantity(largest, 'FLOP')} do not divide evenly into a mean "
        f"share of {quantity(mean, 'FLOP')}."
    )


def _advice(group: _Group, num_idle: int, imbalance: float) -> str:
    if num_idle:
        return (
            f"{num_idle:,} ranks have nothing to do: there are fewer matrices than ranks. "
            "A finer view such as matrix_view=('heads', n) makes more of them; it changes what "
            "Muon computes."
        )
    if imbalance > 1.2:
        return "More or smaller matrices on the same ranks would even this out."
    return ""
