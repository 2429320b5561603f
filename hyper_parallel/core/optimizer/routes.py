# SPDX-License-Identifier: Apache-2.0
"""One rank's part in a bucket: which pieces it sends and receives. No torch.

A rank derives its own routes only, so the work does not grow as parameters x ranks: it meets every
matrix of the bucket once, and every rank only for the matrices that it owns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hyper_parallel.core.optimizer.bucket import Bucket, PlannedMatrix, PlannedParam
from hyper_parallel.core.optimizer.layout import Piece, pieces_of


@dataclass(frozen=True, slots=True)
class Cargo:
    """A piece of a matrix on its way.

    Attributes:
        matrix: Position in :attr:`Bucket.matrices`.
        piece: The piece, as the rank that stores it sees it.
    """

    matrix: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank sends and receives in one direction.

    Attributes:
        sends: Cargo for each peer (global rank), in packing order.
        receives: Cargo from each peer, in packing order.
        keeps: Cargo that stays on this rank.
    """

    sends: dict[int, list[Cargo]] = field(default_factory=dict)
    receives: dict[int, list[Cargo]] = field(default_factory=dict)
    keeps: list[Cargo] = field(default_factory=list)

    def numel_sent(self) -> int:
        """Elements that leave this rank."""
        return sum(cargo.piece.numel for parcel in self.sends.values() for cargo in parcel)

    def numel_received(self) -> int:
        """Elements that reach this rank from others."""
        return sum(cargo.piece.numel for parcel in self.receives.values() for cargo in parcel)


def gather_route(params: Sequence[PlannedParam], bucket: Bucket, rank: int) -> Exchange:
    """Pieces that travel to their owners.

    A piece comes from the copy of the tensor that the owner itself belongs to, so gathering
    crosses no replicate axis.

    Args:
        params: The plan's parameters.
        bucket: One of its buckets.
        rank: Global rank, a member of ``bucket.ranks``.

    Returns:
        What ``rank`` sends and receives; boxes are local to the *source* layout.
    """
    exchange = Exchange()
    for number, planned in enumerate(bucket.matrices):
        source = params[planned.param].source
        box = planned.matrix.box
        owner_at = source.mesh.coordinate(planned.owner)
        if planned.owner == rank:
            for coordinate in source.copy_coordinates(owner_at):
                cargo = [Cargo(number, p) for p in pieces_of(source.region(coordinate), box)]
                if coordinate == owner_at:
                    exchange.keeps.extend(cargo)
                elif cargo:
                    peer = source.mesh.rank_at(coordinate)
                    exchange.receives.setdefault(peer, []).extend(cargo)
            continue
        here = source.mesh.coordinate(rank)
        if source.replica_of(here, like=owner_at):
            pieces = pieces_of(source.region(here), box)
            if pieces:
                parcel = exchange.sends.setdefault(planned.owner, [])
                parcel.extend(Cargo(number, piece) for piece in pieces)
    return exchange


def scatter_route(params: Sequence[PlannedParam], bucket: Bucket, rank: int) -> Exchange:
    """Pieces of the update that travel back from the owners to every rank that holds them.

    Args:
        params: The plan's parameters.
        bucket: One of its buckets.
        rank: Global rank, a member of ``bucket.ranks``.

    Returns:
        What ``rank`` sends and receives; boxes are local to the *parameter's* layout.
    """
    exchange = Exchange()
    for number, planned in enumerate(bucket.matrices):
        layout = params[planned.param].layout
        if planned.owner == rank:
            for peer, pieces in _holders(params, planned):
                cargo = [Cargo(number, piece) for piece in pieces]
                if peer == rank:
                    exchange.keeps.extend(cargo)
                else:
                    exchange.sends.setdefault(peer, []).extend(cargo)
            continue
        region = layout.region(layout.mesh.coordinate(rank))
        pieces = pieces_of(region, planned.matrix.box)
        if pieces:
            parcel = exchange.receives.setdefault(planned.owner, [])
            parcel.extend(Cargo(number, piece) for piece in pieces)
    return exchange


def stored_cargo(params: Sequence[PlannedParam], bucket: Bucket, rank: int) -> list[Cargo]:
    """Pieces of a bucket's matrices in a rank's own momentum.

    Args:
        params: The plan's parameters.
        bucket: One of its buckets.
        rank: Global rank.

    Returns:
        The pieces; boxes are local to the *source* layout.
    """
    cargo: list[Cargo] = []
    for number, planned in enumerate(bucket.matrices):
        source = params[planned.param].source
        region = source.region(source.mesh.coordinate(rank))
        cargo.extend(Cargo(number, piece) for piece in pieces_of(region, planned.matrix.box))
    return cargo


def _holders(
    params: Sequence[PlannedParam], planned: PlannedMatrix
) -> Iterator[tuple[int, list[Piece]]]:
    layout = params[planned.param].layout
    owner_at = layout.mesh.coordinate(planned.owner)
    for shard_at in layout.copy_coordinates(owner_at):
        pieces = pieces_of(layout.region(shard_at), planned.matrix.box)
        if pieces:
            for coordinate in layout.replica_coordinates(shard_at):
                yield layout.mesh.rank_at(coordinate), pieces
