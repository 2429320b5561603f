# SPDX-License-Identifier: Apache-2.0
"""The most memory that a step allocates on a rank, tensor by tensor. No torch.

[Note: what a step allocates]
Owned matrices, packets and updates, the directions that are packed, and the working set of
Newton-Schulz. This module plays a step in the executor's order and keeps a ledger of what is alive.
Not in it: what the parameters, gradients and momentum take anyway, what a kernel allocates and
frees within itself, and scalars.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.core.optimizer.bucket import (
    HEADER_BYTES,
    Bucket,
    Orthogonalization,
    PlannedParam,
)
from hyper_parallel.core.optimizer.cost_model import ITEMSIZE
from hyper_parallel.core.optimizer.forms import Form
from hyper_parallel.core.optimizer.rank_routes import RankRoutes, rank_routes
from hyper_parallel.core.optimizer.routes import Exchange
from hyper_parallel.core.optimizer.step_order import portions, run_in_order


def orthogonalize_bytes(
    form: Form, shape: tuple[int, int], *, count: int, dtype: str, wire_dtype: str
) -> int:
    """Most bytes alive at once while matrices of one shape are orthogonalized in place.

    Args:
        form: The form of the iteration.
        shape: Rows and columns of a matrix.
        count: Matrices of the batch.
        dtype: Name of the dtype that the iteration runs in.
        wire_dtype: Name of the dtype that they come in and the result has.

    Returns:
        Bytes, without the matrices themselves.

    Example:
        >>> orthogonalize_bytes(
        ...     Form(batched=False), (64, 256), count=9, dtype="float32", wire_dtype="float32"
        ... ) // (64 * 256 * 4)
        1
    """
    together = count if form.batched else min(count, 1)
    rows, cols = shape
    size, numel = ITEMSIZE[dtype], rows * cols * together
    wide_dtype = "float64" if "float64" in (dtype, wire_dtype) else "float32"
    wide = ITEMSIZE[wide_dtype]
    transposed = form.transposes and rows > cols
    # Two matrices take turns; one of them is that which comes, if it has the dtype.
    turns = numel * size * (1 if wire_dtype == dtype else 2)
    scaled = 0 if wire_dtype == dtype == wide_dtype and not transposed else numel * wide
    rounded = numel * size if transposed else 0
    norms = 2 * together * (rows + 4) * wide  # of rows and of matrices, and what is made from them
    return turns + max(scaled + rounded + norms, together * _square_bytes(form, shape, size))


def _square_bytes(form: Form, shape: tuple[int, int], size: int) -> int:
    """Most bytes alive at once for one matrix, beside the two that take turns."""
    n, m = min(shape), max(shape)
    if form.kind == "standard":
        return 2 * n * n * size
    chain_size = ITEMSIZE[form.chain_dtype or "float32"]
    chain, differs = n * n * chain_size, chain_size != size
    copy, rounded = (n * m * chain_size, n * n * size) if differs else (0, 0)
    # R beside X in its dtype; then R, Z, Q and a fourth one, and Q in the dtype of X.
    return max(copy + chain, 4 * chain + rounded)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Bytes of what one rank allocates for one bucket."""

    batches: tuple[int, ...]
    working: tuple[int, ...]
    directions: int
    gather_out: int
    gather_in: int
    scatter_out: int
    scatter_in: int
    relay_out: int
    relay_in: int
    headers: int


def _sizes(params: Sequence[PlannedParam], routes: RankRoutes, rank: int, storage: int) -> _Sizes:
    bucket, relay = routes.bucket, routes.relay
    packed = routes.packed_numels()
    gather, scatter = routes.gather, routes.scatter
    batches: dict[tuple[Orthogonalization, tuple[int, ...], int, int], int] = {}
    for planned in bucket.matrices:
        if planned.owner == rank:
            matrix = planned.matrix
            box_shape = tuple(stop - start for start, stop in matrix.box)
            work = params[planned.param].work
            key = (work, box_shape, matrix.num_rows, matrix.num_cols)
            batches[key] = batches.get(key, 0) + 1
    size = bucket.itemsize
    return _Sizes(
        batches=tuple(rows * cols * n * size for (_, _, rows, cols), n in batches.items()),
        working=tuple(
            orthogonalize_bytes(
                work.form(rows, cols),
                (rows, cols),
                count=count,
                dtype=work.dtype,
                wire_dtype=bucket.wire_dtype,
            )
            for (work, _, rows, cols), count in batches.items()
        ),
        directions=max((sum(packed[run]) for run in portions(packed)), default=0) * storage,
        gather_out=gather.numel_sent() * size + gather.header_bytes(),
        gather_in=gather.numel_received() * size + gather.header_bytes(),
        scatter_out=scatter.numel_sent() * size + scatter.header_bytes(),
        scatter_in=scatter.numel_received() * size + scatter.header_bytes(),
        relay_out=0 if relay is None else _relay_bytes(relay.numel_sent(), relay, size),
        relay_in=0 if relay is None else _relay_bytes(relay.numel_received(), relay, size),
        headers=2 * HEADER_BYTES * len(bucket.ranks),
    )


def _relay_bytes(numel: int, relay: Exchange, size: int) -> int:
    return numel * size + relay.header_bytes()


@dataclass(slots=True)
class _Flight:
    bucket: Bucket
    sizes: _Sizes
    is_gathered: bool = False
    is_computed: bool = False
    is_here: bool = False
    held: int = 0  # alive until the flight is dropped


@dataclass(slots=True)
class _Ledger:
    alive: int = 0
    peak: int = 0

    def take(self, nbytes: int) -> int:
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)
        return nbytes

    def drop(self, nbytes: int) -> None:
        self.alive -= nbytes

    def start(self, program: tuple[Bucket, _Sizes]) -> _Flight:
        bucket, sizes = program
        flight = _Flight(bucket, sizes)
        flight.held += self.take(sum(sizes.batches))
        packet = self.take(sizes.gather_out)
        self.drop(self.take(sizes.directions))
        if bucket.gathers:
            self.take(sizes.gather_in)
        else:
            self.drop(packet)
        return flight

    def gathered(self, flight: _Flight) -> None:
        if flight.bucket.gathers and not flight.is_gathered:
            flight.is_gathered = True
            self.take(flight.sizes.headers)
            self.drop(flight.sizes.headers + flight.sizes.gather_out + flight.sizes.gather_in)

    def compute(self, flight: _Flight) -> None:
        if flight.is_computed:
            return
        self.gathered(flight)
        for working in flight.sizes.working:
            self.drop(self.take(working))
        if flight.bucket.scatters:
            self.take(flight.sizes.scatter_out)
            flight.held += self.take(flight.sizes.scatter_in)
        flight.is_computed = True

    def arrive(self, flight: _Flight) -> None:
        if flight.is_here:
            return
        flight.is_here = True
        if flight.bucket.scatters:
            self.take(flight.sizes.headers)
            self.drop(flight.sizes.headers + flight.sizes.scatter_out)
        if flight.bucket.relays:
            packet = self.take(flight.sizes.relay_out)
            flight.held += self.take(flight.sizes.relay_in)
            self.drop(packet)

    def open(self, program: tuple[Bucket, _Sizes]) -> _Flight:
        bucket = program[0]
        flight = self.start(program)
        self.gathered(flight)
        if not bucket.gathers or bucket.relays:
            self.compute(flight)
            self.arrive(flight)
        return flight

    def finish(self, flight: _Flight) -> None:
        self.arrive(flight)
        self.drop(flight.held)


def step_bytes(
    params: Sequence[PlannedParam],
    routes: Sequence[RankRoutes],
    rank: int,
    *,
    storage_dtype: str = "float32",
) -> int:
    """Most bytes that a step allocates on a rank at once; see [Note: what a step allocates].

    Args:
        params: The plan's parameters.
        routes: Those of the rank, in the order of the plan.
        rank: Global rank.
        storage_dtype: The wider of the dtypes of gradients and momentum.

    Returns:
        Bytes: never less than what is allocated, and little more.
    """
    ledger = _Ledger()
    domains: dict[tuple[int, ...], list[tuple[Bucket, _Sizes]]] = {}
    alone: list[tuple[Bucket, _Sizes]] = []
    for one in routes:
        sizes = _sizes(params, one, rank, ITEMSIZE[storage_dtype])
        bucket = one.bucket
        where = domains.setdefault(bucket.ranks, []) if bucket.num_collectives else alone
        where.append((bucket, sizes))
    run_in_order(ledger, domains.values(), alone)
    return ledger.peak


def peak_extra_bytes(params: Sequence[PlannedParam], buckets: Sequence[Bucket], rank: int) -> int:
    """Most bytes that a step allocates on a rank at once, for float32 gradients and momentum.

    Args:
        params: The plan's parameters.
        buckets: Buckets that the rank takes part in, in the order of the plan.
        rank: Global rank.

    Returns:
        The bytes.
    """
    return step_bytes(params, rank_routes(params, buckets, rank), rank)
