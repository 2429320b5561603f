# SPDX-License-Identifier: Apache-2.0
"""When a rank does what in a step: the executor's order, played with predicted times. No torch.

See [Note: order of a step] in ``executor.py``. A rank has one stream of work and one of exchanges.
An exchange starts when its slowest sender is ready, and those of one rank follow each other.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hyper_parallel.core.optimizer.bucket import PlannedParam
from hyper_parallel.core.optimizer.cost_model import ITEMSIZE
from hyper_parallel.core.optimizer.hardware import Hardware
from hyper_parallel.core.optimizer.plan import Plan
from hyper_parallel.core.optimizer.rank_routes import RankRoutes
from hyper_parallel.core.optimizer.routes import Cargo, Exchange
from hyper_parallel.core.optimizer.step_order import run_in_order
from hyper_parallel.core.optimizer.traffic import exchange_seconds, link_use, seconds_by_owner

LANES: Final = ("prepare", "exchange in", "orthogonalize", "exchange back", "apply")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that a rank is busy with.

    Attributes:
        bucket: Position of the bucket in the plan.
        lane: One of :data:`LANES`.
        start_s: Seconds from the start of the step.
        stop_s: Likewise.
    """

    bucket: int
    lane: str
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCosts:
    """What one rank has to do for one bucket.

    Attributes:
        number: Position of the bucket in the plan.
        prepare_s: Reading gradients and momentum, and packing.
        gather_s: Pieces on their way to owners; None if none travels.
        fill_s: Putting them in place.
        compute_s: Orthogonalizing.
        slowest_s: The same on the rank that takes longest.
        pack_s: Packing what goes back.
        scatter_s: Updates on their way; None if none travels.
        relay_s: The second stage of the staged route; None on the direct one.
        apply_s: Writing momentum and weights.
    """

    number: int
    prepare_s: float
    gather_s: float | None
    fill_s: float
    compute_s: float
    slowest_s: float
    pack_s: float
    scatter_s: float | None
    relay_s: float | None
    apply_s: float


# Reads and writes per element, and launches per piece: what the kernels of update_rule.py and the
# copies of executor.py do. Weights, gradients and momentum have ``storage_dtype``.
_PREPARE_STORED: Final = 4  # gradient and momentum read, direction written and read
_MOMENTUM_STORED: Final = 3  # gradient, momentum read and written
_UPDATE_STORED: Final = 4  # weight decayed, weight updated
_OPERATIONS: Final = {"prepare": 5, "fill": 3, "pack": 3, "apply": 5}
# What Python does besides, in launches of an operation: at the start of a step, for each parameter,
# and to send and to receive the headers of an exchange. From a profile of CPU ranks.
_STEP_OPERATIONS: Final = 180
_PARAM_OPERATIONS: Final = 6
_SEND_OPERATIONS: Final = 60
_WAIT_OPERATIONS: Final = 30


def bucket_costs(
    params: Sequence[PlannedParam],
    routes: RankRoutes,
    rank: int,
    hardware: Hardware,
    *,
    storage_dtype: str,
) -> BucketCosts:
    """Predict what one rank has to do for one bucket.

    Args:
        params: The plan's parameters.
        routes: What the rank sends and receives.
        rank: The rank.
        hardware: Rates.
        storage_dtype: Dtype of weights, gradients and momentum.

    Returns:
        Seconds.
    """
    bucket, stored_size, wire = routes.bucket, ITEMSIZE[storage_dtype], routes.bucket.itemsize
    gather, scatter = routes.gather, routes.scatter
    received = gather.numel_received()
    loads = seconds_by_owner(params, bucket, hardware)
    waiting = _contention(bucket.ranks, rank, hardware)
    on_node = sum(s for owner, s in loads.items() if hardware.link(owner, rank) == "within_node")
    slowest = max(loads.values(), default=0.0)
    crowd = on_node / hardware.cores_per_node if hardware.cores_per_node else 0.0

    def passes(nbytes: float, num_pieces: int, kind: str, headers: int = 0) -> float:
        launches = num_pieces * _OPERATIONS[kind] + headers
        seconds = nbytes / hardware.memory_bytes_per_s + launches * hardware.operation_s
        return waiting * seconds

    def seconds(exchange: Exchange | None, *, runs: bool) -> float | None:
        if exchange is None or not runs:
            return None
        return exchange_seconds(link_use(exchange, wire, rank, hardware), hardware)

    return BucketCosts(
        number=routes.number,
        prepare_s=passes(
            sum(routes.packed_numels()) * (_PREPARE_STORED * stored_size + wire),
            _num_pieces(gather.sends) + len(gather.keeps),
            "prepare",
            _SEND_OPERATIONS * bucket.gathers,
        ),
        gather_s=seconds(gather, runs=bucket.gathers),
        fill_s=passes(
            2 * received * wire,
            _num_pieces(gather.receives),
            "fill",
            _WAIT_OPERATIONS * bucket.gathers,
        ),
        compute_s=max(loads.get(rank, 0.0), crowd if rank in loads else 0.0),
        slowest_s=max(slowest, crowd),
        pack_s=passes(
            2 * scatter.numel_sent() * wire,
            _num_pieces(scatter.sends),
            "pack",
            _SEND_OPERATIONS * bucket.scatters,
        ),
        scatter_s=seconds(scatter, runs=bucket.scatters),
        relay_s=seconds(routes.relay, runs=True),
        apply_s=passes(
            routes.stored_numel * _MOMENTUM_STORED * stored_size
            + routes.held_numel * (_UPDATE_STORED * stored_size + wire),
            _num_pieces(scatter.receives) + len(scatter.keeps),
            "apply",
            _WAIT_OPERATIONS * bucket.scatters,
        ),
    )


def start_seconds(plan: Plan, rank: int, hardware: Hardware, *, storage_dtype: str) -> float:
    """Predict what a rank does before the first bucket: look at every parameter and its gradient.

    Args:
        plan: The plan.
        rank: The rank.
        hardware: Rates.
        storage_dtype: Dtype of gradients.

    Returns:
        Seconds.
    """
    meshes = {param.layout.mesh.members for param in plan.params}
    ranks = {peer for members in meshes for peer in members}
    launches = _STEP_OPERATIONS + _PARAM_OPERATIONS * len(plan.params)
    numel = sum(
        math.prod(param.layout.local_shape(param.layout.mesh.coordinate(rank)))
        for param in plan.params
    )
    finite = numel * ITEMSIZE[storage_dtype] / hardware.memory_bytes_per_s  # one look at gradients
    return _contention(ranks, rank, hardware) * (launches * hardware.operation_s + finite)


def _contention(ranks: Collection[int], rank: int, hardware: Hardware) -> float:
    """How much longer work takes since ranks of a node wait for its cores."""
    if hardware.cores_per_node is None:
        return 1.0
    crowd = sum(hardware.link(peer, rank) == "within_node" for peer in ranks)
    return max(1.0, crowd / hardware.cores_per_node)


def _num_pieces(parcels: Mapping[int, Sequence[Cargo]]) -> int:
    return sum(map(len, parcels.values()))


@dataclass(slots=True)
class _Flight:
    costs: BucketCosts
    arrives_s: float | None = None
    returns_s: float | None = None
    is_computed: bool = False
    is_here: bool = False


@dataclass(slots=True)
class _Clock:
    """Plays one rank's step."""

    now_s: float = 0.0
    exchanges_s: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def work(self, flight: _Flight, lane: str, seconds: float) -> None:
        start, self.now_s = self.now_s, self.now_s + seconds
        self._note(flight, lane, start, self.now_s)

    def exchange(self, flight: _Flight, lane: str, seconds: float, *, ready_s: float) -> float:
        start = max(ready_s, self.exchanges_s)
        self.exchanges_s = start + seconds
        self._note(flight, lane, start, self.exchanges_s)
        return self.exchanges_s

    def _note(self, flight: _Flight, lane: str, start: float, stop: float) -> None:
        if stop > start:
            number = flight.costs.number
            self.spans.append(Span(bucket=number, lane=lane, start_s=start, stop_s=stop))

    def start(self, costs: BucketCosts) -> _Flight:
        flight = _Flight(costs)
        self.work(flight, "prepare", costs.prepare_s)
        if costs.gather_s is not None:
            flight.arrives_s = self.exchange(
                flight, "exchange in", costs.gather_s, ready_s=self.now_s
            )
        return flight

    def gathered(self, flight: _Flight) -> None:
        if flight.arrives_s is not None:
            self.now_s = max(self.now_s, flight.arrives_s)
            flight.arrives_s = None
            self.work(flight, "prepare", flight.costs.fill_s)

    def compute(self, flight: _Flight) -> None:
        if flight.is_computed:
            return
        self.gathered(flight)
        costs, begun = flight.costs, self.now_s
        self.work(flight, "orthogonalize", costs.compute_s)
        if costs.scatter_s is not None:
            self.work(flight, "exchange back", costs.pack_s)
            ready = max(self.now_s, begun + costs.slowest_s)
            flight.returns_s = self.exchange(
                flight, "exchange back", costs.scatter_s, ready_s=ready
            )
        flight.is_computed = True

    def arrive(self, flight: _Flight) -> None:
        if flight.is_here:
            return
        flight.is_here = True
        if flight.returns_s is not None:
            self.now_s = max(self.now_s, flight.returns_s)
        if flight.costs.relay_s is not None:
            self.now_s = self.exchange(
                flight, "exchange back", flight.costs.relay_s, ready_s=self.now_s
            )

    def open(self, costs: BucketCosts) -> _Flight:
        flight = self.start(costs)
        self.gathered(flight)
        if costs.gather_s is None or costs.relay_s is not None:
            self.compute(flight)
            self.arrive(flight)
        return flight

    def finish(self, flight: _Flight) -> None:
        self.arrive(flight)
        self.work(flight, "apply", flight.costs.apply_s)


def play(plan: Plan, costs: Sequence[BucketCosts], *, start_s: float = 0.0) -> tuple[Span, ...]:
    """Play a step of one rank: domains are opened first, then each runs as a pipeline.

    Args:
        plan: The plan.
        costs: What the rank has to do, one entry per bucket that it takes part in.
        start_s: When the first of them begins.

    Returns:
        Spans in the order in which they begin on the rank's stream of work.
    """
    clock = _Clock(now_s=start_s)
    domains: dict[tuple[int, ...], list[BucketCosts]] = {}
    alone: list[BucketCosts] = []
    for one in costs:
        bucket = plan.buckets[one.number]
        if bucket.num_collectives:
            domains.setdefault(bucket.ranks, []).append(one)
        else:
            alone.append(one)
    run_in_order(clock, domains.values(), alone)
    return tuple(clock.spans)
