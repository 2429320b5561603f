# SPDX-License-Identifier: Apache-2.0
"""A bucket made ready to run on one rank: offsets, slices and batches, fixed at construction."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyper_parallel.core.optimizer.bucket import HEADER_BYTES, Bucket, Orthogonalization
from hyper_parallel.core.optimizer.layout import Box
from hyper_parallel.core.optimizer.plan import Plan
from hyper_parallel.core.optimizer.routes import (
    Cargo,
    gather_route,
    scatter_route,
    stored_cargo,
)

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of one of this rank's local tensors.

    Attributes:
        param: Index into the plan's parameters.
        slices: The box; None if it is the whole local tensor.
        num_rows: Rows of the matrix that it is a part of.
        num_cols: Columns of that matrix.
    """

    param: int
    slices: Slices | None
    num_rows: int
    num_cols: int

    def of(self, local: Tensor) -> Tensor:
        """The box of a local tensor, as a view."""
        return local if self.slices is None else local[self.slices]


@dataclass(frozen=True, slots=True)
class Slot:
    """A box of a whole matrix on its owner.

    Attributes:
        batch: Which batch of the bucket.
        index: Which matrix of the batch.
        slices: The box, relative to the matrix; None if it is all of it.
    """

    batch: int
    index: int
    slices: Slices | None

    def of(self, batches: Sequence[Tensor]) -> Tensor:
        """The box, as a view of the batch that holds it."""
        matrix = batches[self.batch][self.index]
        return matrix if self.slices is None else matrix[self.slices]


@dataclass(frozen=True, slots=True)
class Parcel:
    """Where a piece lies in a packet.

    Attributes:
        offset: First element.
        shape: Shape of the piece.
        numel: Its number of elements.
    """

    offset: int
    shape: tuple[int, ...]
    numel: int

    def of(self, packet: Tensor) -> Tensor:
        """The piece, as a view of the packet."""
        return packet.narrow(0, self.offset, self.numel).view(self.shape)


@dataclass(frozen=True, slots=True)
class PacketFormat:
    """Layout of what one rank sends, or receives, in one direction.

    Attributes:
        sizes: Elements for each rank of the group, in group order.
        headers: First element of each peer's header, by global rank.
        parcels: One per piece, in the order of the cargo.
    """

    sizes: tuple[int, ...]
    headers: dict[int, int]
    parcels: tuple[Parcel, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Matrices of one shape that are orthogonalized together.

    Attributes:
        work: How.
        box_shape: Shape of one matrix as a box of its parameter.
        num_rows: Rows of the matrix.
        num_cols: Columns of the matrix.
        params: Parameter of each matrix.
    """

    work: Orthogonalization
    box_shape: tuple[int, ...]
    num_rows: int
    num_cols: int
    params: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What one rank does for one bucket; pairs are in packing order.

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
    stored: tuple[Part, ...]


def build_program(plan: Plan, number: int) -> Program:
    """Fix everything that this rank does for one bucket.

    Args:
        plan: The plan of this rank.
        number: Position of the bucket in the plan.

    Returns:
        The program.
    """
    bucket, rank = plan.buckets[number], plan.rank
    gather, scatter = (
        gather_route(plan.params, bucket, rank),
        scatter_route(plan.params, bucket, rank),
    )
    batches, places = _batches(plan, bucket, rank)

    def part(cargo: Cargo, *, stored: bool) -> Part:
        planned = bucket.matrices[cargo.matrix]
        param = plan.params[planned.param]
        layout = param.source if stored else param.layout
        local_shape = layout.local_shape(layout.mesh.coordinate(rank))
        slices = _slices(cargo.piece.local, local_shape)
        return Part(planned.param, slices, planned.matrix.num_rows, planned.matrix.num_cols)

    def slot(cargo: Cargo) -> Slot:
        batch, index = places[cargo.matrix]
        return Slot(batch, index, _slices(cargo.piece.inner, batches[batch].box_shape))

    sent, received = _in_order(gather.sends, bucket), _in_order(gather.receives, bucket)
    returned, updated = _in_order(scatter.sends, bucket), _in_order(scatter.receives, bucket)
    return Program(
        bucket=bucket,
        number=number,
        wire_dtype=getattr(torch, bucket.wire_dtype),
        batches=batches,
        gather_out=_format(gather.sends, bucket, rank),
        gather_in=_format(gather.receives, bucket, rank),
        sends=tuple(part(cargo, stored=True) for cargo in sent),
        fills=tuple(slot(cargo) for cargo in received),
        keeps=tuple((part(cargo, stored=True), slot(cargo)) for cargo in gather.keeps),
        scatter_out=_format(scatter.sends, bucket, rank),
        scatter_in=_format(scatter.receives, bucket, rank),
        returns=tuple(slot(cargo) for cargo in returned),
        updates=tuple(part(cargo, stored=False) for cargo in updated),
        kept_updates=tuple((part(cargo, stored=False), slot(cargo)) for cargo in scatter.keeps),
        stored=tuple(part(cargo, stored=True) for cargo in stored_cargo(plan.params, bucket, rank)),
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


def _in_order(parcels: dict[int, list[Cargo]], bucket: Bucket) -> Iterable[Cargo]:
    return [cargo for peer in bucket.ranks for cargo in parcels.get(peer, ())]


def _format(parcels: dict[int, list[Cargo]], bucket: Bucket, rank: int) -> PacketFormat:
    header = HEADER_BYTES // bucket.itemsize
    sizes: list[int] = []
    headers: dict[int, int] = {}
    places: list[Parcel] = []
    offset = 0
    for peer in bucket.ranks:
        start = offset
        if peer != rank:
            headers[peer] = offset
            offset += header
            for cargo in parcels.get(peer, ()):
                shape = tuple(stop - begin for begin, stop in cargo.piece.local)
                places.append(Parcel(offset, shape, cargo.piece.numel))
                offset += cargo.piece.numel
        sizes.append(offset - start)
    return PacketFormat(tuple(sizes), headers, tuple(places))


def _slices(box: Box, shape: tuple[int, ...]) -> Slices | None:
    if all(span == (0, length) for span, length in zip(box, shape, strict=True)):
        return None
    return tuple(slice(start, stop) for start, stop in box)
