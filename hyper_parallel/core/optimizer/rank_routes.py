# SPDX-License-Identifier: Apache-2.0
"""All that one rank sends, receives and keeps of a bucket, derived once. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.core.optimizer.bucket import Bucket, PlannedParam
from hyper_parallel.core.optimizer.routes import (
    Cargo,
    Exchange,
    gather_route,
    relay_route,
    scatter_route,
    stored_cargo,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRoutes:
    """One rank's routes of one bucket.

    Attributes:
        number: Position of the bucket in the plan.
        bucket: The bucket.
        gather: Pieces on their way to owners; all are kept if the bucket does not gather.
        scatter: Updates on their way back.
        relay: The second stage of the staged route; None on the direct one.
        stored_numel: Elements of the bucket's matrices in the rank's momentum.
    """

    number: int
    bucket: Bucket
    gather: Exchange
    scatter: Exchange
    relay: Exchange | None
    stored_numel: int

    def exchanges(self) -> list[Exchange]:
        """What runs, as :func:`~.routes.exchanges_of` lists it."""
        found = [self.gather] if self.bucket.gathers else []
        found += [self.scatter] if self.bucket.scatters else []
        return [*found, *([self.relay] if self.relay is not None else [])]

    def packed_numels(self) -> list[int]:
        """Elements of each of its own pieces that the rank prepares, in packing order."""
        return [cargo.piece.numel for cargo in (*self.gather.keeps, *self.gather.sent())]

    @property
    def held_numel(self) -> int:
        """Elements of its own weights that are updated before the relay."""
        return self.scatter.numel_received() + numel_of(self.scatter.keeps)


def rank_routes(
    params: Sequence[PlannedParam], buckets: Sequence[Bucket], rank: int
) -> list[RankRoutes]:
    """Derive the routes of the buckets that a rank takes part in.

    Args:
        params: The plan's parameters.
        buckets: The plan's buckets.
        rank: Global rank.

    Returns:
        In the order of the plan.
    """
    return [
        RankRoutes(
            number=number,
            bucket=bucket,
            gather=gather_route(params, bucket, rank),
            scatter=scatter_route(params, bucket, rank),
            relay=relay_route(params, bucket, rank) if bucket.relays else None,
            stored_numel=numel_of(stored_cargo(params, bucket, rank)),
        )
        for number, bucket in enumerate(buckets)
        if rank in bucket.ranks
    ]


def numel_of(cargo: Sequence[Cargo]) -> int:
    """Elements of some cargo."""
    return sum(one.piece.numel for one in cargo)
