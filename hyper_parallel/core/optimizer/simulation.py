# SPDX-License-Identifier: Apache-2.0
"""What a plan would cost on a machine: loads, bytes, memory and a timeline. No torch.

The plan is the one that would run, so FLOPs, bytes, collectives and memory are counts; only seconds
are predictions.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from hyper_parallel.core.optimizer.bucket import Bucket, PlannedParam
from hyper_parallel.core.optimizer.cost_model import ITEMSIZE
from hyper_parallel.core.optimizer.hardware import Hardware
from hyper_parallel.core.optimizer.layout import MeshLayout
from hyper_parallel.core.optimizer.memory import step_bytes
from hyper_parallel.core.optimizer.plan import Plan
from hyper_parallel.core.optimizer.rank_routes import rank_routes
from hyper_parallel.core.optimizer.routes import Exchange
from hyper_parallel.core.optimizer.timeline import LANES, Span, bucket_costs, play, start_seconds
from hyper_parallel.core.optimizer.traffic import DomainTotals, domain_totals, local_numels

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One rank's step in detail.

    Attributes:
        rank: Global rank.
        flops: Operations.
        num_matrices: Matrices that it owns.
        num_collectives: Collectives that it takes part in.
        received_bytes: Bytes from other ranks, headers included.
        received_by_axis: The same by the mesh axes that they cross: ``"tp"``, ``"dp + tp"``.
        received_by_link: The same by kind of link, ``"within_node"`` and ``"between_nodes"``.
        peak_extra_bytes: Most memory that the step allocates at once.
        momentum_bytes: Memory of its momentum, which stays.
        seconds_by_lane: How long it is busy in each lane, by :data:`~.timeline.LANES`.
        timeline: What it does when.
    """

    rank: int
    flops: int
    num_matrices: int
    num_collectives: int
    received_bytes: int
    received_by_axis: dict[str, int]
    received_by_link: dict[str, int]
    peak_extra_bytes: int
    momentum_bytes: int
    seconds_by_lane: dict[str, float]
    timeline: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A step of all ranks.

    Attributes:
        version: Of this record.
        hardware: Name of the hardware.
        axis_names: Names of the mesh axes.
        mesh_shape: Their sizes.
        num_params: Parameters that Muon steps on.
        num_matrices: Their matrices.
        num_elements: Their elements.
        num_buckets: Buckets of the plan.
        bucket_bytes: The bound that they were cut by.
        ranks: All ranks, ascending; the lists that follow are in this order.
        flops: Operations of each rank.
        matrices: Matrices that each rank owns.
        received_bytes: Bytes that each rank receives from others.
        largest_matrix_flops: Operations of the most expensive matrix.
        step_s: Predicted seconds of a step.
        busiest: The rank with most operations, in detail.
    """

    version: int
    hardware: str
    axis_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    num_params: int
    num_matrices: int
    num_elements: int
    num_buckets: int
    bucket_bytes: int
    ranks: tuple[int, ...]
    flops: tuple[int, ...]
    matrices: tuple[int, ...]
    received_bytes: tuple[int, ...]
    largest_matrix_flops: int
    step_s: float
    busiest: RankStep

    @property
    def max_flops(self) -> int:
        """Operations of the busiest rank."""
        return max(self.flops)

    @property
    def mean_flops(self) -> float:
        """Operations of a rank, on average."""
        return sum(self.flops) / len(self.flops)

    @property
    def imbalance(self) -> float:
        """Load of the busiest rank over the mean; 1 is even."""
        return self.max_flops / self.mean_flops if self.mean_flops else 1.0

    @property
    def num_idle(self) -> int:
        """Ranks that own no matrix."""
        return self.matrices.count(0)

    @property
    def exposed_exchange_s(self) -> float:
        """Seconds in which the busiest rank waits for an exchange."""
        exchanges = ("exchange in", "exchange back")
        spans = self.busiest.timeline
        busy = sum(span.stop_s - span.start_s for span in spans if span.lane not in exchanges)
        begun = min((span.start_s for span in spans), default=0.0)
        return max(0.0, self.step_s - begun - busy)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold, with what is derived from them."""
        return {
            **asdict(self),
            "max_flops": self.max_flops,
            "mean_flops": self.mean_flops,
            "imbalance": self.imbalance,
            "num_idle": self.num_idle,
            "exposed_exchange_s": self.exposed_exchange_s,
        }


def simulate(
    plan: Plan,
    hardware: Hardware,
    *,
    axis_names: Sequence[str] | None = None,
    mesh: MeshLayout | None = None,
    storage_dtype: str = "float32",
) -> Simulation:
    """Predict a step of all ranks from the plan of one of them.

    A domain that is a part of the mesh, such as one replica that shares no work with the others, is
    taken to have siblings that do the same: those that fill the mesh along its other axes.

    Args:
        plan: The plan of any rank of the mesh.
        hardware: What it runs on.
        axis_names: Names of the mesh axes; ``axis 0`` and so on if None.
        mesh: The mesh of all ranks. None takes the largest of the parameters' meshes.
        storage_dtype: Dtype of gradients and momentum.

    Returns:
        The simulation.

    Raises:
        ValueError: If there are not as many names as axes, the plan is empty, or the hardware has
            no rate for a dtype that the plan needs.
    """
    if not plan.params:
        raise ValueError("plan: expected at least one parameter for Muon, got an empty plan")
    mesh = mesh or reference_mesh(plan.params)
    names = tuple(axis_names or (f"axis {i}" for i in range(len(mesh.shape))))
    if len(names) != len(mesh.shape):
        raise ValueError(
            f"axis_names: expected {len(mesh.shape)} for a mesh of shape {mesh.shape}, got {names}"
        )
    totals = [_spread(domain, mesh) for domain in plan_domains(plan)]
    flops, matrices, received = (_sum([t[i] for t in totals], len(mesh.ranks)) for i in range(3))
    ranks = mesh.members
    load = dict(zip(ranks, flops, strict=True))
    busiest = max(_home(plan) or [plan.rank], key=lambda rank: (load[rank], -rank))
    step = rank_step(plan, busiest, hardware, mesh=mesh, axis_names=names, storage=storage_dtype)
    costs = [p.param for bucket in plan.buckets for p in bucket.matrices]
    return Simulation(
        version=SCHEMA_VERSION,
        hardware=hardware.name,
        axis_names=names,
        mesh_shape=mesh.shape,
        num_params=len(plan.params),
        num_matrices=len(costs),
        num_elements=sum(math.prod(param.layout.shape) for param in plan.params),
        num_buckets=len(plan.buckets),
        bucket_bytes=plan.bucket_bytes,
        ranks=ranks,
        flops=flops,
        matrices=matrices,
        received_bytes=received,
        largest_matrix_flops=_largest(plan),
        step_s=max((span.stop_s for span in step.timeline), default=0.0),
        busiest=step,
    )


def reference_mesh(params: Sequence[PlannedParam]) -> MeshLayout:
    """The mesh with most ranks, and of those the one with most axes."""
    return max((p.layout.mesh for p in params), key=lambda m: (len(m.ranks), len(m.shape)))


def plan_domains(plan: Plan) -> list[DomainTotals]:
    """Totals of each set of ranks that shares buckets."""
    domains: dict[tuple[int, ...], list[Bucket]] = {}
    for bucket in plan.buckets:
        domains.setdefault(bucket.ranks, []).append(bucket)
    return [domain_totals(plan.params, buckets, ranks) for ranks, buckets in domains.items()]


def _home(plan: Plan) -> list[int]:
    """Ranks whose whole step this plan knows: those of all its domains."""
    sets = [set(bucket.ranks) for bucket in plan.buckets]
    return sorted(set.intersection(*sets)) if sets else []


def _sum(lists: Sequence[Sequence[int]], length: int) -> tuple[int, ...]:
    return tuple(map(sum, zip(*lists, strict=True))) if lists else (0,) * length


def _spread(
    domain: DomainTotals, mesh: MeshLayout
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Numbers of all ranks of the mesh, those of the domain's siblings by position."""
    columns = (domain.flops, domain.num_matrices, domain.received_bytes)
    if domain.ranks == mesh.members:
        return columns
    known = {rank: i for i, rank in enumerate(domain.ranks)}
    members = set(mesh.members)
    places = [mesh.coordinate(rank) for rank in domain.ranks if rank in members]
    varying = [i for i in range(len(mesh.shape)) if len({place[i] for place in places}) > 1]
    is_product = len(places) == math.prod(mesh.shape[i] for i in varying) == len(domain.ranks)
    spread: tuple[list[int], ...] = ([], [], [])
    for rank in mesh.members:
        if is_product:
            at = list(places[0])
            for i in varying:
                at[i] = mesh.coordinate(rank)[i]
            like: int | None = known[mesh.rank_at(at)]
        else:
            like = known.get(rank)
        for column, numbers in zip(spread, columns, strict=True):
            column.append(0 if like is None else numbers[like])
    return tuple(spread[0]), tuple(spread[1]), tuple(spread[2])


def _largest(plan: Plan) -> int:
    works = {
        (plan.params[p.param].work, p.matrix.num_rows, p.matrix.num_cols): p
        for bucket in plan.buckets
        for p in bucket.matrices
    }
    return max((work.flops(p.matrix) for (work, _, _), p in works.items()), default=0)


def rank_step(
    plan: Plan,
    rank: int,
    hardware: Hardware,
    *,
    mesh: MeshLayout,
    axis_names: Sequence[str],
    storage: str = "float32",
) -> RankStep:
    """Predict one rank's step in detail.

    Args:
        plan: The plan of this rank, or of another that shares all its buckets.
        rank: The rank.
        hardware: What it runs on.
        mesh: The mesh of all ranks.
        axis_names: Names of its axes.
        storage: Dtype of gradients and momentum.

    Returns:
        The step.
    """
    routes = rank_routes(plan.params, plan.buckets, rank)
    by_axis: Counter[str] = Counter()
    by_link: Counter[str] = Counter()
    for one in routes:
        for exchange in one.exchanges():
            for peer, nbytes in _received(exchange, one.bucket.itemsize, rank).items():
                by_axis[_axis(mesh, rank, peer, axis_names)] += nbytes
                by_link[hardware.link(rank, peer)] += nbytes
    owned = [p for one in routes for p in one.bucket.matrices if p.owner == rank]
    costs = [
        bucket_costs(plan.params, one, rank, hardware, storage_dtype=storage) for one in routes
    ]
    start_s = start_seconds(plan, rank, hardware, storage_dtype=storage)
    spans = play(plan, costs, start_s=start_s)
    seconds = dict.fromkeys(LANES, 0.0)
    for span in spans:
        seconds[span.lane] += span.stop_s - span.start_s
    held = sum(
        local_numels(param.source)[param.source.mesh.ranks.index(rank)]
        for param in plan.params
        if rank in param.source.mesh.ranks
    )
    return RankStep(
        rank=rank,
        flops=sum(plan.params[p.param].work.flops(p.matrix) for p in owned),
        num_matrices=len(owned),
        num_collectives=sum(one.bucket.num_collectives for one in routes),
        received_bytes=sum(by_link.values()),
        received_by_axis={name: by_axis[name] for name in _axis_keys(by_axis, axis_names)},
        received_by_link={kind: by_link[kind] for kind in ("within_node", "between_nodes")},
        peak_extra_bytes=step_bytes(plan.params, routes, rank, storage_dtype=storage),
        momentum_bytes=held * ITEMSIZE[storage],
        seconds_by_lane=seconds,
        timeline=spans,
    )


def _received(exchange: Exchange, itemsize: int, rank: int) -> dict[int, int]:
    header = exchange.header_bytes() // max(1, len(exchange.ranks) - 1)
    return {
        peer: header
        + itemsize * sum(cargo.piece.numel for cargo in exchange.receives.get(peer, ()))
        for peer in exchange.ranks
        if peer != rank
    }


def _axis_keys(found: Iterable[str], axis_names: Sequence[str]) -> list[str]:
    several = set(found) - set(axis_names)
    return [*axis_names, *sorted(several, key=lambda name: (name.count("+"), name))]


def _axis(mesh: MeshLayout, rank: int, peer: int, axis_names: Sequence[str]) -> str:
    here, there = mesh.coordinate(rank), mesh.coordinate(peer)
    pairs = zip(axis_names, here, there, strict=True)
    return " + ".join(name for name, a, b in pairs if a != b)
