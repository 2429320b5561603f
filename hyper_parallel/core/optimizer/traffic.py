# SPDX-License-Identifier: Apache-2.0
"""What every rank of a plan computes and receives, without walking ranks x matrices. No torch.

[Note: bytes of all ranks at once]
Going in, an owner receives of each of its matrices what it does not store itself. Coming back, a
rank receives its piece of every matrix that it does not own, on whichever route. So of a parameter
whose updates travel, a rank receives as many elements as it holds, less its pieces of what it owns:
one table per layout, and one look at each matrix and its owner. The sums are those of
:func:`~.routes.exchanges_of`, which lists the pieces of one rank.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hyper_parallel.core.optimizer.bucket import (
    HEADER_BYTES,
    Bucket,
    Orthogonalization,
    PlannedParam,
)
from hyper_parallel.core.optimizer.cost_model import orthogonalize_seconds
from hyper_parallel.core.optimizer.hardware import Hardware
from hyper_parallel.core.optimizer.layout import ParamLayout, Ranks
from hyper_parallel.core.optimizer.regions import pieces_of, spans_after_cuts
from hyper_parallel.core.optimizer.routes import Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainTotals:
    """What the ranks of one domain do in a step; lists are in the order of ``ranks``.

    Attributes:
        ranks: The ranks, ascending.
        num_buckets: Buckets.
        num_collectives: All-to-alls.
        flops: Operations.
        num_matrices: Matrices owned.
        received_bytes: Bytes from other ranks, headers included.
    """

    ranks: Ranks
    num_buckets: int
    num_collectives: int
    flops: tuple[int, ...]
    num_matrices: tuple[int, ...]
    received_bytes: tuple[int, ...]


def domain_totals(
    params: Sequence[PlannedParam], buckets: Sequence[Bucket], ranks: Ranks
) -> DomainTotals:
    """Sum up a domain; see [Note: bytes of all ranks at once].

    Args:
        params: The plan's parameters.
        buckets: All buckets of the plan with these ranks.
        ranks: The ranks.

    Returns:
        The totals.
    """
    position = {rank: i for i, rank in enumerate(ranks)}
    flops, owned, received = ([0] * len(ranks) for _ in range(3))
    returning = {
        planned.param for bucket in buckets if bucket.scatters for planned in bucket.matrices
    }
    headers = 0
    costs: dict[tuple[int, int, int], int] = {}  # hashing the work itself costs more
    for bucket in buckets:
        headers += _header_bytes(params, bucket)
        for planned in bucket.matrices:
            param, matrix, owner = params[planned.param], planned.matrix, planned.owner
            i = position[owner]
            kind = (planned.param, matrix.num_rows, matrix.num_cols)
            if kind not in costs:
                costs[kind] = param.work.flops(matrix)
            flops[i] += costs[kind]
            owned[i] += 1
            at = param.layout.mesh.coordinate(owner)
            held = _held(param.layout, at, matrix.box)
            if bucket.gathers:
                is_same = param.source is param.layout
                stored = held if is_same else _held(param.source, at, matrix.box)
                received[i] += (matrix.numel - stored) * bucket.itemsize
            if planned.param in returning:
                received[i] -= held * bucket.itemsize
    for (layout, itemsize), times in _layouts(params, buckets, returning).items():
        for rank, numel in zip(layout.mesh.ranks, local_numels(layout), strict=True):
            received[position[rank]] += numel * itemsize * times
    return DomainTotals(
        ranks=ranks,
        num_buckets=len(buckets),
        num_collectives=sum(bucket.num_collectives for bucket in buckets),
        flops=tuple(flops),
        num_matrices=tuple(owned),
        received_bytes=tuple(nbytes + headers for nbytes in received),
    )


def _layouts(
    params: Sequence[PlannedParam], buckets: Sequence[Bucket], returning: set[int]
) -> Counter[tuple[ParamLayout, int]]:
    itemsizes = {p.param: b.itemsize for b in buckets for p in b.matrices if p.param in returning}
    return Counter((params[index].layout, itemsize) for index, itemsize in itemsizes.items())


def _held(layout: ParamLayout, at: tuple[int, ...], box: tuple[tuple[int, int], ...]) -> int:
    return sum(piece.numel for piece in pieces_of(layout.region(at), box))


@lru_cache(maxsize=1024)
def local_numels(layout: ParamLayout) -> tuple[int, ...]:
    """Elements that each rank holds of a tensor.

    Args:
        layout: Its layout.

    Returns:
        Numbers in the order of ``layout.mesh.ranks``.

    Example:
        >>> from hyper_parallel.core.optimizer.layout import AxisPlacement, MeshLayout
        >>> mesh = MeshLayout(shape=(2, 2), ranks=(0, 1, 2, 3))
        >>> axes = (AxisPlacement(), AxisPlacement(dim=0))
        >>> local_numels(ParamLayout(shape=(3, 5), mesh=mesh, axes=axes))
        (10, 5, 10, 5)
    """
    sizes, axes = layout.mesh.shape, layout.axes
    whole = math.prod(n for d, n in enumerate(layout.shape) if not _cutting(layout, d))
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    numels = [whole] * len(layout.mesh.ranks)
    for dim, length in enumerate(layout.shape):
        cutting = _cutting(layout, dim)
        if not cutting:
            continue
        lengths: dict[tuple[int, ...], int] = {}
        for i in range(len(numels)):
            at = tuple(i // strides[axis] % sizes[axis] for axis in cutting)
            if at not in lengths:
                cuts = tuple(
                    (sizes[axis], index, axes[axis].split_factor)
                    for axis, index in zip(cutting, at, strict=True)
                )
                spans = spans_after_cuts(length, cuts)
                lengths[at] = sum(stop - start for start, stop in spans)
            numels[i] *= lengths[at]
    return tuple(numels)


def _cutting(layout: ParamLayout, dim: int) -> list[int]:
    return [i for i, axis in enumerate(layout.axes) if axis.dim == dim]


def _header_bytes(params: Sequence[PlannedParam], bucket: Bucket) -> int:
    """Bytes of the headers that each rank receives for a bucket."""
    if bucket.route == "direct":
        return HEADER_BYTES * (len(bucket.ranks) - 1) * bucket.num_collectives
    first = params[bucket.matrices[0].param]
    peers = (first.source.num_shards - 1) * bucket.gathers
    peers += (first.layout.num_shards - 1) + (first.layout.num_replicas - 1)
    return HEADER_BYTES * peers


def seconds_by_owner(
    params: Sequence[PlannedParam], bucket: Bucket, hardware: Hardware
) -> dict[int, float]:
    """How long each rank orthogonalizes its matrices of a bucket.

    Args:
        params: The plan's parameters.
        bucket: One of its buckets.
        hardware: Rates.

    Returns:
        Seconds, by owner.
    """
    owned: dict[int, Counter[tuple[Orthogonalization, int, int]]] = {}
    for planned in bucket.matrices:
        matrix = planned.matrix
        key = (params[planned.param].work, matrix.num_rows, matrix.num_cols)
        owned.setdefault(planned.owner, Counter())[key] += 1
    like: dict[tuple[object, ...], float] = {}  # owners of as many matrices of the same shapes
    seconds = {}
    for owner, counts in owned.items():
        kinds = tuple(counts.items())
        if kinds not in like:
            like[kinds] = sum(
                orthogonalize_seconds(
                    work.form(num_rows, num_cols),
                    (num_rows, num_cols),
                    hardware,
                    num_steps=len(work.coefficients),
                    dtype=work.dtype,
                    count=count,
                )
                for (work, num_rows, num_cols), count in kinds
            )
        seconds[owner] = like[kinds]
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """One rank's share of an exchange on one kind of link.

    Attributes:
        num_peers: Ranks that it exchanges packets with.
        sent_bytes: Bytes that it sends.
        received_bytes: Bytes that it receives.
    """

    num_peers: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


def link_use(
    exchange: Exchange, itemsize: int, rank: int, hardware: Hardware
) -> dict[str, LinkUse]:
    """How much of an exchange crosses which kind of link.

    Args:
        exchange: What the rank sends and receives.
        itemsize: Bytes of an element.
        rank: The rank.
        hardware: Says which ranks share a node.

    Returns:
        By kind, ``"within_node"`` and ``"between_nodes"``.
    """
    peers: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    received: Counter[str] = Counter()
    for peer in exchange.ranks:
        if peer == rank:
            continue
        kind = hardware.link(rank, peer)
        peers[kind] += 1
        out = sum(cargo.piece.numel for cargo in exchange.sends.get(peer, ()))
        into = sum(cargo.piece.numel for cargo in exchange.receives.get(peer, ()))
        sent[kind] += out * itemsize + HEADER_BYTES
        received[kind] += into * itemsize + HEADER_BYTES
    return {
        kind: LinkUse(num_peers=peers[kind], sent_bytes=sent[kind], received_bytes=received[kind])
        for kind in ("within_node", "between_nodes")
    }


def exchange_seconds(use: Mapping[str, LinkUse], hardware: Hardware) -> float:
    """Seconds of an exchange: both kinds of link work at once, in both directions.

    Args:
        use: What crosses which kind.
        hardware: Rates.

    Returns:
        Seconds.
    """
    links = {"within_node": hardware.within_node, "between_nodes": hardware.between_nodes}
    return max(
        (
            one.num_peers * links[kind].latency_s
            + max(one.sent_bytes, one.received_bytes) / links[kind].bytes_per_s
            for kind, one in use.items()
            if one.num_peers
        ),
        default=0.0,
    )
