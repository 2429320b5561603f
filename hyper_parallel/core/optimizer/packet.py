# SPDX-License-Identifier: Apache-2.0
"""Where things lie: boxes of local tensors, of matrices on their owner, and of packets."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from hyper_parallel.core.optimizer.bucket import Orthogonalization
from hyper_parallel.core.optimizer.regions import Box

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of one of this rank's local tensors.

    Attributes:
        param: Index into the plan's parameters.
        slices: The box in weight and gradient; None if it is the whole local tensor.
        stored: The box in the momentum, which may be cut finer; None if it is all of it.
        num_rows: Rows of the matrix that it is a part of.
        num_cols: Columns of that matrix.
    """

    param: int
    slices: Slices | None
    stored: Slices | None
    num_rows: int
    num_cols: int

    def of(self, local: Tensor) -> Tensor:
        """The box of a local weight or gradient, as a view."""
        return local if self.slices is None else local[self.slices]

    def of_momentum(self, local: Tensor) -> Tensor:
        """The box of a local momentum, as a view."""
        return local if self.stored is None else local[self.stored]


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
    """Layout of what one rank sends, or receives, in one all-to-all.

    Attributes:
        ranks: Global ranks of the all-to-all, ascending.
        sizes: Elements for each rank of the group, in group order.
        headers: First element of each peer's header, by global rank.
        parcels: One per piece, in the order of the cargo.
    """

    ranks: tuple[int, ...]
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


@lru_cache(maxsize=1 << 16)
def slices_of(box: Box, shape: tuple[int, ...]) -> Slices | None:
    """A box as slices; None if it is all of a tensor of this shape."""
    if all(span == (0, length) for span, length in zip(box, shape, strict=True)):
        return None
    return tuple(slice(start, stop) for start, stop in box)
