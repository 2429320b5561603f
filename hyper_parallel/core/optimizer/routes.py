# SPDX-License-Identifier: Apache-2.0
"""One rank's part in a bucket: which pieces it sends and receives. No torch.

A rank derives its own routes only, so the work does not grow as parameters x ranks: it meets every
matrix of the bucket once, and every rank only for the matrices that it owns.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hyper_parallel.core.optimizer.bucket import HEADER_BYTES, Bucket, PlannedMatrix, PlannedParam
from hyper_parallel.core.optimizer.layout import Coordinate, MeshLayout, Ranks
from hyper_parallel.core.optimizer.regions import Piece, pieces_of

Params = Sequence[PlannedParam]


@dataclass(frozen=True, slots=True)
class Cargo:
    """A piece of a matrix on its way.

    Attributes:
        matrix: Position in :attr:`~.bucket.Bucket.matrices`.
        piece: The piece, as the rank that stores it sees it.
    """

    matrix: int
    piece: Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What one rank sends and receives in one all-to-all.

    Attributes:
        ranks: Global ranks of the all-to-all, ascending.
        sends: Cargo for each peer (global rank), in packing order.
        receives: Cargo from each peer, in packing order.
        keeps: Cargo that stays on this rank.
    """

    ranks: Ranks
    sends: dict[int, list[Cargo]] = field(default_factory=dict)
    receives: dict[int, list[Cargo]] = field(default_factory=dict)
    keeps: list[Cargo] = field(default_factory=list)

    def sent(self) -> list[Cargo]:
        """Cargo that leaves this rank, in packing order."""
        return [cargo for peer in self.ranks for cargo in self.sends.get(peer, ())]

    def received(self) -> list[Cargo]:
        """Cargo that reaches this rank from others, in packing order."""
        return [cargo for peer in self.ranks for cargo in self.receives.get(peer, ())]

    def numel_sent(self) -> int:
        """Elements that leave this rank."""
        return sum(cargo.piece.numel for parcel in self.sends.values() for cargo in parcel)

    def numel_received(self) -> int:
        """Elements that reach this rank from others."""
        return sum(cargo.piece.numel for parcel in self.receives.values() for cargo in parcel)

    def header_bytes(self) -> int:
        """Bytes of the headers that this rank receives."""
        return HEADER_BYTES * (len(self.ranks) - 1)


def exchanges_of(params: Params, bucket: Bucket, rank: int) -> list[Exchange]:
    """All exchanges of a rank for one bucket in one step, in order.

    Args:
        params: The plan's parameters.
        bucket: One of its buckets.
        rank: Global rank, a member of ``bucket.ranks``.

    Returns:
        Gather, scatter and relay, as far as the bucket has them.
    """
    routes: list[Exchange] = []
    if bucket.gathers:
        routes.append(gather_route(params, bucket, rank))
    if bucket.scatters:
        routes.append(scatter_route(params, bucket, rank))
    if bucket.relays:
        routes.append(relay_route(params, bucket, rank))
    return routes


def gather_route(params: Params, bucket: Bucket, rank: int) -> Exchange:
    """Pieces that travel to their owners.

    A piece comes from the copy of the tensor that the owner itself belongs to, so gathering
    crosses no replicate axis.

    Args:
        params: The plan's parameters.
        bucket: One of its buckets.
        rank: Global rank, a member of ``bucket.ranks``.

    Returns:
        What ``rank`` sends and receives.
    """
    exchange = Exchange(ranks=_gather_ranks(params, bucket, rank))
    for number, planned in enumerate(bucket.matrices):
        source = params[planned.param].source
        owner_at = source.mesh.coordinate(planned.owner)
        if planned.owner == rank:
            for coordinate in source.copy_coordinates(owner_at):
                cargo = _stored(params, number, planned, coordinate)
                if coordinate == owner_at:
                    exchange.keeps.extend(cargo)
                elif cargo:
                    peer = source.mesh.rank_at(coordinate)
                    exchange.receives.setdefault(peer, []).extend(cargo)
            continue
        here = source.mesh.coordinate(rank)
        if source.replica_of(here, like=owner_at):
            cargo = _stored(params, number, planned, here)
            if cargo:
                exchange.sends.setdefault(planned.owner, []).extend(cargo)
    return exchange


def scatter_route(params: Params, bucket: Bucket, rank: int) -> Exchange:
    """Pieces of the update that travel back from their owners.

    On the direct route every rank that holds a piece receives it; on the staged route only those
    of the owner's own copy.

    Args:
        params: The plan's parameters.
        bucket: One of its buckets.
        rank: Global rank, a member of ``bucket.ranks``.

    Returns:
        What ``rank`` sends and receives.
    """
    staged = bucket.route == "staged"
    exchange = Exchange(ranks=_scatter_ranks(params, bucket, rank))
    for number, planned in enumerate(bucket.matrices):
        layout = params[planned.param].layout
        owner_at = layout.mesh.coordinate(planned.owner)
        if planned.owner == rank:
            for peer, pieces in _holders(params, planned, with_replicas=not staged):
                cargo = [Cargo(number, piece) for piece in pieces]
                if peer == rank:
                    exchange.keeps.extend(cargo)
                else:
                    exchange.sends.setdefault(peer, []).extend(cargo)
            continue
        here = layout.mesh.coordinate(rank)
        if staged and not layout.replica_of(here, like=owner_at):
            continue
        cargo = _held(params, number, planned, here)
        if cargo:
            exchange.receives.setdefault(planned.owner, []).extend(cargo)
    return exchange


def relay_route(params: Params, bucket: Bucket, rank: int) -> Exchange:
    """Second stage of the staged route: pieces pass along the replicate axes.

    Args:
        params: The plan's parameters.
        bucket: A staged bucket.
        rank: Global rank, a member of ``bucket.ranks``.

    Returns:
        What ``rank`` sends, the same to every replica of itself, and receives.
    """
    layout = params[bucket.matrices[0].param].layout
    here = layout.mesh.coordinate(rank)
    exchange = Exchange(ranks=_ranks_at(layout.mesh, layout.replica_coordinates(here)))
    for number, planned in enumerate(bucket.matrices):
        layout = params[planned.param].layout
        owner_at = layout.mesh.coordinate(planned.owner)
        cargo = _held(params, number, planned, here)
        if not cargo:
            continue
        if layout.replica_of(here, like=owner_at):
            for peer in exchange.ranks:
                if peer != rank:
                    exchange.sends.setdefault(peer, []).extend(cargo)
        else:
            peer = layout.mesh.rank_at(
                tuple(
                    owner_at[i] if i in layout.replicate_axes else position
                    for i, position in enumerate(here)
                )
            )
            exchange.receives.setdefault(peer, []).extend(cargo)
    return exchange


def stored_cargo(params: Params, bucket: Bucket, rank: int) -> list[Cargo]:
    """Pieces of a bucket's matrices in a rank's own momentum.

    Args:
        params: The plan's parameters.
        bucket: One of its buckets.
        rank: Global rank.

    Returns:
        The pieces, in the order of the matrices.
    """
    cargo: list[Cargo] = []
    for number, planned in enumerate(bucket.matrices):
        here = params[planned.param].layout.mesh.coordinate(rank)
        cargo.extend(_stored(params, number, planned, here))
    return cargo


def _stored(
    params: Params, number: int, planned: PlannedMatrix, coordinate: Coordinate
) -> list[Cargo]:
    """Pieces that a rank has momentum for."""
    param = params[planned.param]
    fine = None if param.source is param.layout else param.source.region(coordinate)
    pieces = pieces_of(param.layout.region(coordinate), planned.matrix.box, fine)
    return [Cargo(number, piece) for piece in pieces]


def _held(
    params: Params, number: int, planned: PlannedMatrix, coordinate: Coordinate
) -> list[Cargo]:
    """Pieces that a rank has weights for."""
    layout = params[planned.param].layout
    pieces = pieces_of(layout.region(coordinate), planned.matrix.box)
    return [Cargo(number, piece) for piece in pieces]


def _holders(
    params: Params, planned: PlannedMatrix, *, with_replicas: bool
) -> Iterator[tuple[int, tuple[Piece, ...]]]:
    layout = params[planned.param].layout
    owner_at = layout.mesh.coordinate(planned.owner)
    for shard_at in layout.copy_coordinates(owner_at):
        pieces = pieces_of(layout.region(shard_at), planned.matrix.box)
        if pieces:
            replicas = layout.replica_coordinates(shard_at) if with_replicas else [shard_at]
            for coordinate in replicas:
                yield layout.mesh.rank_at(coordinate), pieces


def _gather_ranks(params: Params, bucket: Bucket, rank: int) -> Ranks:
    if bucket.route == "direct":
        return bucket.ranks
    source = params[bucket.matrices[0].param].source
    return _ranks_at(source.mesh, source.copy_coordinates(source.mesh.coordinate(rank)))


def _scatter_ranks(params: Params, bucket: Bucket, rank: int) -> Ranks:
    if bucket.route == "direct":
        return bucket.ranks
    layout = params[bucket.matrices[0].param].layout
    return _ranks_at(layout.mesh, layout.copy_coordinates(layout.mesh.coordinate(rank)))


def _ranks_at(mesh: MeshLayout, coordinates: Iterable[Coordinate]) -> Ranks:
    return tuple(sorted(mesh.rank_at(coordinate) for coordinate in coordinates))
