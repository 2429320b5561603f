# SPDX-License-Identifier: Apache-2.0
"""A bucket made ready to run on one rank: offsets, slices and batches, fixed at construction."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hyper_parallel.core.optimizer.bucket import HEADER_BYTES, Bucket, Orthogonalization
from hyper_parallel.core.optimizer.packet import (
    Batch,
    PacketFormat,
    Parcel,
    Part,
    Slot,
    slices_of,
)
from hyper_parallel.core.optimizer.plan import Plan
from hyper_parallel.core.optimizer.regions import Box
from hyper_parallel.core.optimizer.routes import (
    Cargo,
    Exchange,
    gather_route,
    relay_route,
    scatter_route,
    stored_cargo,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What one rank does for one bucket; everything is in packing order.

    Attributes:
        bucket: The bucket.
        number: Its position in the plan.
        wire_dtype: Dtype of the packets.
        batches: What this rank orthogonalizes.
        gather_out: Format of what it sends to owners.
        gather_in: Format of what it receives as an owner.
        sends: Its own parts that it sends to owners.
        fills: Slots that receive from other ranks.
        keeps: Its own parts that stay, and their slots.
        scatter_out: Format of the updates that it sends.
        scatter_in: Format of the updates that it receives.
        returns: Slots whose updates it sends.
        updates: Its own parts that receive an update from others.
        kept_updates: Its own parts whose update it has itself, and their slots.
        relay: The second stage of a staged bucket; None on the direct route.
        stored: Its own parts of the momentum.
    """

    bucket: Bucket
    number: int
    wire_dtype: torch.dtype
    batches: tuple[Batch, ...]
    gather_out: PacketFormat
    gather_in: PacketFormat
    sends: tuple[Part, ...]
    fills: tuple[Slot, ...]
    keeps: tuple[tuple[Part, Slot], ...]
    scatter_out: PacketFormat
    scatter_in: PacketFormat
    returns: tuple[Slot, ...]
    updates: tuple[Part, ...]
    kept_updates: tuple[tuple[Part, Slot], ...]
    relay: "Relay | None"
    stored: tuple[Part, ...]

    def groups(self) -> list[tuple[int, ...]]:
        """Sets of ranks that this program needs a process group for, in order of use."""
        formats = [self.gather_out] if self.bucket.gathers else []
        formats += [self.scatter_out] if self.bucket.scatters else []
        formats += [self.relay.out] if self.relay is not None else []
        return [form.ranks for form in formats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """Passing updates on along the replicate axes.

    Attributes:
        out: Format of what this rank passes on.
        into: Format of what it receives.
        sources: For each piece that it passes on, the position of its update among those that it
            has: ``updates`` first, then ``kept_updates``.
        updates: Its own parts that receive an update.
    """

    out: PacketFormat
    into: PacketFormat
    sources: tuple[int, ...]
    updates: tuple[Part, ...]


def build_program(plan: Plan, number: int) -> Program:
    """Fix everything that this rank does for one bucket.

    Args:
        plan: The plan of this rank.
        number: Position of the bucket in the plan.

    Returns:
        The program.
    """
    bucket, rank = plan.buckets[number], plan.rank
    gather = gather_route(plan.params, bucket, rank)
    scatter = scatter_route(plan.params, bucket, rank)
    batches, places = _batches(plan, bucket, rank)

    def slot(cargo: Cargo) -> Slot:
        batch, index = places[cargo.matrix]
        return Slot(batch, index, slices_of(cargo.piece.inner, batches[batch].box_shape))

    part = _PartMaker(plan, bucket)
    updated = scatter.received()
    return Program(
        bucket=bucket,
        number=number,
        wire_dtype=getattr(torch, bucket.wire_dtype),
        batches=batches,
        gather_out=_format(gather, gather.sends, bucket, rank=rank),
        gather_in=_format(gather, gather.receives, bucket, rank=rank),
        sends=tuple(part(cargo) for cargo in gather.sent()),
        fills=tuple(slot(cargo) for cargo in gather.received()),
        keeps=tuple((part(cargo), slot(cargo)) for cargo in gather.keeps),
        scatter_out=_format(scatter, scatter.sends, bucket, rank=rank),
        scatter_in=_format(scatter, scatter.receives, bucket, rank=rank),
        returns=tuple(slot(cargo) for cargo in scatter.sent()),
        updates=tuple(part(cargo) for cargo in updated),
        kept_updates=tuple((part(cargo), slot(cargo)) for cargo in scatter.keeps),
        relay=_relay(plan, bucket, [*updated, *scatter.keeps]),
        stored=tuple(part(cargo) for cargo in stored_cargo(plan.params, bucket, rank)),
    )


class _PartMaker:
    """Turns cargo into parts of this rank's local tensors; the same cargo into the same part."""

    def __init__(self, plan: Plan, bucket: Bucket) -> None:
        self._plan = plan
        self._bucket = bucket
        self._made: dict[tuple[int, Box, Box], Part] = {}

    def __call__(self, cargo: Cargo) -> Part:
        key = (cargo.matrix, cargo.piece.local, cargo.piece.fine)
        part = self._made.get(key)
        if part is None:
            part = self._made[key] = self._make(cargo)
        return part

    def _make(self, cargo: Cargo) -> Part:
        planned = self._bucket.matrices[cargo.matrix]
        param = self._plan.params[planned.param]
        here = param.layout.mesh.coordinate(self._plan.rank)
        return Part(
            planned.param,
            slices_of(cargo.piece.local, param.layout.local_shape(here)),
            slices_of(cargo.piece.fine, param.source.local_shape(here)),
            planned.matrix.num_rows,
            planned.matrix.num_cols,
        )


def _relay(plan: Plan, bucket: Bucket, arrived: Sequence[Cargo]) -> Relay | None:
    if bucket.route != "staged":
        return None
    route = relay_route(plan.params, bucket, plan.rank)
    position = {(cargo.matrix, cargo.piece.local): i for i, cargo in enumerate(arrived)}
    part = _PartMaker(plan, bucket)
    return Relay(
        out=_format(route, route.sends, bucket, rank=plan.rank),
        into=_format(route, route.receives, bucket, rank=plan.rank),
        sources=tuple(position[cargo.matrix, cargo.piece.local] for cargo in route.sent()),
        updates=tuple(part(cargo) for cargo in route.received()),
    )


def _batches(
    plan: Plan, bucket: Bucket, rank: int
) -> tuple[tuple[Batch, ...], dict[int, tuple[int, int]]]:
    members: dict[tuple[Orthogonalization, tuple[int, ...], int, int], list[int]] = {}
    for number, planned in enumerate(bucket.matrices):
        if planned.owner == rank:
            matrix = planned.matrix
            box_shape = tuple(stop - start for start, stop in matrix.box)
            key = (plan.params[planned.param].work, box_shape, matrix.num_rows, matrix.num_cols)
            members.setdefault(key, []).append(number)
    batches: list[Batch] = []
    places: dict[int, tuple[int, int]] = {}
    for (work, box_shape, num_rows, num_cols), numbers in members.items():
        places.update({number: (len(batches), i) for i, number in enumerate(numbers)})
        params = tuple(bucket.matrices[number].param for number in numbers)
        batches.append(Batch(work, box_shape, num_rows, num_cols, params))
    return tuple(batches), places


def _format(
    exchange: Exchange, parcels: dict[int, list[Cargo]], bucket: Bucket, *, rank: int
) -> PacketFormat:
    header = HEADER_BYTES // bucket.itemsize
    sizes: list[int] = []
    headers: dict[int, int] = {}
    places: list[Parcel] = []
    offset = 0
    for peer in exchange.ranks:
        start = offset
        if peer != rank:
            headers[peer] = offset
            offset += header
            for cargo in parcels.get(peer, ()):
                shape = tuple(stop - begin for begin, stop in cargo.piece.local)
                places.append(Parcel(offset, shape, cargo.piece.numel))
                offset += cargo.piece.numel
        sizes.append(offset - start)
    return PacketFormat(exchange.ranks, tuple(sizes), headers, tuple(places))
