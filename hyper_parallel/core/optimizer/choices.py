# SPDX-License-Identifier: Apache-2.0
"""What a plan does with each group of parameters, and why not otherwise. No torch.

Parameters that share a layout and a kind of work form a group.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hyper_parallel.core.optimizer.bucket import PlannedParam
from hyper_parallel.core.optimizer.hardware import Hardware
from hyper_parallel.core.optimizer.layout import MeshLayout
from hyper_parallel.core.optimizer.matrix_view import matrices_of
from hyper_parallel.core.optimizer.plan import Plan
from hyper_parallel.core.optimizer.report import quantity
from hyper_parallel.core.optimizer.simulation import reference_mesh
from hyper_parallel.core.optimizer.strategies import (
    LayoutGroup,
    Strategy,
    planned_split,
    shape_flops,
    split_evenly,
    strategies_of,
)


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
        members = param.layout.mesh.members  # thousands of ranks: hashed once a parameter
        load, most = loads.setdefault(members, Counter()), largest.get(members, 0)
        for (owner, rows, cols), count in owners.get(index, Counter()).items():
            cost = shape_flops(param.work, (rows, cols))
            load[owner] += cost * count
            most = max(most, cost)
        largest[members] = most
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, param in enumerate(plan.params):
        layout = param.layout
        layout_and_work = (layout.axes, layout.mesh.shape, layout.mesh.ranks, param.work)
        groups.setdefault(layout_and_work, []).append(index)
    choices = []
    for indices in groups.values():
        params = [plan.params[i] for i in indices]
        group = LayoutGroup(
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


def _choice(group: LayoutGroup) -> GroupChoice:
    shards, copies = group.layout.num_shards, group.num_copies
    num_ranks = shards * group.layout.num_replicas
    everyone = planned_split(group) if group.is_whole else split_evenly(group, num_ranks)
    chosen = _chosen(group)
    found = strategies_of(group, everyone)
    first = next(strategy for strategy in found if strategy.name == chosen)
    others = sorted((s for s in found if s is not first), key=lambda s: s.seconds)
    mean = sum(group.domain_loads.values()) / num_ranks
    imbalance = max(group.domain_loads.values()) / mean
    num_idle = num_ranks - len(group.domain_loads)
    top = sorted(group.shapes.items(), key=lambda pair: -shape_flops(group.work, pair[0]) * pair[1])
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


def _chosen(group: LayoutGroup) -> str:
    if group.layout.num_replicas > 1:
        return f"owner, {group.route or 'direct'}"
    if group.is_whole:
        return "local"
    return "owner in each replica" if group.num_copies > 1 else "owner, direct"


def _reason(group: LayoutGroup, first: Strategy, others: Sequence[Strategy], copies: int) -> str:
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


def _advice(group: LayoutGroup, num_idle: int, imbalance: float) -> str:
    if num_idle:
        return (
            f"{num_idle:,} ranks have nothing to do: there are fewer matrices than ranks. "
            "A finer view such as matrix_view=('heads', n) makes more of them; it changes what "
            "Muon computes."
        )
    if imbalance > 1.2:
        return "More or smaller matrices on the same ranks would even this out."
    return ""
