# SPDX-License-Identifier: Apache-2.0
"""Where a parameter lives: plain integers, no torch.

[Note: regions]
A placement shards one tensor dim, so what a rank holds is a product over the dims: on each dim
a list of *spans* ``(start, stop)`` of global indices, in the order in which they lie in the local
tensor. ``Shard`` gives one span; ``_StridedShard`` (FSDP over tensor parallel) several; an empty
shard none. FSDP, HSDP, TP, EP and their mixtures differ in nothing else.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

Span = tuple[int, int]
Region = tuple[tuple[Span, ...], ...]
Box = tuple[Span, ...]
Coordinate = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class MeshLayout:
    """A device mesh as numbers.

    Attributes:
        shape: Size of each mesh axis.
        ranks: Global ranks, row-major.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if math.prod(self.shape) != len(self.ranks):
            raise ValueError(f"mesh of shape {self.shape} cannot hold {len(self.ranks)} ranks")

    @cached_property
    def text(self) -> str:
        """Shape and ranks; different for different meshes, and short for large ones."""
        ranks = str(list(self.ranks))
        if len(self.ranks) > 64:
            ranks = (
                f"{self.ranks[0]} to {self.ranks[-1]}, {hashlib.sha256(ranks.encode()).hexdigest()}"
            )
        return f"{self.shape} of ranks {ranks}"

    @cached_property
    def _coordinates(self) -> dict[int, Coordinate]:
        return {rank: _unravel(i, self.shape) for i, rank in enumerate(self.ranks)}

    def coordinate(self, rank: int) -> Coordinate:
        """Position of a global rank on every axis."""
        return self._coordinates[rank]

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Global rank at a position."""
        index = 0
        for size, position in zip(self.shape, coordinate, strict=True):
            index = index * size + position
        return self.ranks[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlacement:
    """What one mesh axis does to a tensor.

    Attributes:
        dim: The tensor dim it shards; None if it replicates.
        split_factor: Number of blocks that the dim is cut into before each block is sharded:
            1 for ``Shard``, more for ``_StridedShard``.
    """

    dim: int | None = None
    split_factor: int = 1


@dataclass(frozen=True, kw_only=True)
class ParamLayout:
    """Storage layout of one tensor on one mesh.

    Attributes:
        shape: Global shape.
        mesh: The mesh.
        axes: One placement per mesh axis.
    """

    shape: tuple[int, ...]
    mesh: MeshLayout
    axes: tuple[AxisPlacement, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.mesh.shape):
            raise ValueError(f"{len(self.axes)} placements for a mesh of shape {self.mesh.shape}")

    @cached_property
    def shard_axes(self) -> tuple[int, ...]:
        """Mesh axes that cut the tensor; an axis of size one never does."""
        return tuple(
            i
            for i, (axis, size) in enumerate(zip(self.axes, self.mesh.shape, strict=True))
            if axis.dim is not None and size > 1
        )

    @cached_property
    def replicate_axes(self) -> tuple[int, ...]:
        """Mesh axes along which ranks hold the same values; an axis of size one never counts."""
        return tuple(
            i
            for i, (axis, size) in enumerate(zip(self.axes, self.mesh.shape, strict=True))
            if axis.dim is None and size > 1
        )

    @cached_property
    def num_replicas(self) -> int:
        """Number of ranks that hold the same shard."""
        return math.prod(self.mesh.shape[i] for i in self.replicate_axes)

    @property
    def num_shards(self) -> int:
        """Number of ranks over which one copy is spread."""
        return len(self.mesh.ranks) // self.num_replicas

    def placements_text(self) -> str:
        """Placements in short, one per mesh axis: ``R``, ``S(dim)`` or ``S(dim/split)``."""
        words = []
        for axis in self.axes:
            split = f"/{axis.split_factor}" if axis.split_factor != 1 else ""
            words.append("R" if axis.dim is None else f"S({axis.dim}{split})")
        return " ".join(words)

    def region(self, coordinate: Coordinate) -> Region:
        """What the rank at ``coordinate`` holds; see [Note: regions]."""
        cuts: list[list[tuple[int, int, int]]] = [[] for _ in self.shape]
        for axis, size, index in zip(self.axes, self.mesh.shape, coordinate, strict=True):
            if axis.dim is not None:
                cuts[axis.dim].append((size, index, axis.split_factor))
        return tuple(
            spans_after_cuts(length, tuple(dim_cuts))
            for length, dim_cuts in zip(self.shape, cuts, strict=True)
        )

    def local_shape(self, coordinate: Coordinate) -> tuple[int, ...]:
        """Shape of the local tensor at ``coordinate``."""
        return tuple(
            sum(stop - start for start, stop in spans) for spans in self.region(coordinate)
        )

    def replica_of(self, coordinate: Coordinate, like: Coordinate) -> bool:
        """Whether two positions belong to the same copy of the tensor."""
        return all(coordinate[i] == like[i] for i in self.replicate_axes)

    def copy_coordinates(self, coordinate: Coordinate) -> Iterator[Coordinate]:
        """Positions that together hold one whole copy and include ``coordinate``."""
        return _vary(coordinate, self.shard_axes, self.mesh.shape)

    def replica_coordinates(self, coordinate: Coordinate) -> Iterator[Coordinate]:
        """Positions that hold the same shard as ``coordinate``, itself included."""
        return _vary(coordinate, self.replicate_axes, self.mesh.shape)

    def holders(self, box: Box) -> list[Coordinate]:
        """Positions, of the first replica, that hold a box whole; none if all have only a part."""
        origin = (0,) * len(self.mesh.shape)
        found = [origin]
        for dim, (length, span) in enumerate(zip(self.shape, box, strict=True)):
            axes = tuple(i for i in self.shard_axes if self.axes[i].dim == dim)
            if not axes:
                continue
            cuts = tuple((self.mesh.shape[i], self.axes[i].split_factor) for i in axes)
            positions = _positions_with(length, cuts, span)
            found = [
                _placed(coordinate, axes, position)
                for coordinate in found
                for position in positions
            ]
        return found

    def cut_over_replicas(self) -> "ParamLayout":
        """The same tensor, cut further along the replicate axes.

        Every rank then holds a part of what it holds now. A replicate axis takes a dim that no
        later axis cuts, so that its cut comes last, or one that divides evenly. An axis for which
        there is neither stays replicated.

        Returns:
            The finer layout, on the same mesh.
        """
        axes = list(self.axes)
        for i in self.replicate_axes:
            size = self.mesh.shape[i]
            options: list[tuple[bool, int, AxisPlacement]] = []
            for dim, length in enumerate(self.shape):
                later = [
                    self.mesh.shape[j]
                    for j in range(i + 1, len(axes))
                    if axes[j].dim == dim and self.mesh.shape[j] > 1
                ]
                plain = all(a.split_factor == 1 for a in axes if a.dim == dim)
                if not later:
                    options.append((length < size, dim, AxisPlacement(dim=dim)))
                elif plain and length % (size * self._num_cuts(dim, axes)) == 0:
                    factor = math.prod(later)
                    options.append((True, dim, AxisPlacement(dim=dim, split_factor=factor)))
            if options:
                axes[i] = min(options, key=lambda option: option[:2])[2]
        return ParamLayout(shape=self.shape, mesh=self.mesh, axes=tuple(axes))

    def _num_cuts(self, dim: int, axes: Sequence[AxisPlacement]) -> int:
        sizes = zip(axes, self.mesh.shape, strict=True)
        return math.prod(size for axis, size in sizes if axis.dim == dim)

    def without_replicas(self, rank: int) -> "ParamLayout":
        """The copy that ``rank`` belongs to, as a layout of its own."""
        keep = [i for i, axis in enumerate(self.axes) if axis.dim is not None]
        kept_ranks = tuple(
            self.mesh.rank_at(c) for c in _vary(self.mesh.coordinate(rank), keep, self.mesh.shape)
        )
        return ParamLayout(
            shape=self.shape,
            mesh=MeshLayout(shape=tuple(self.mesh.shape[i] for i in keep), ranks=kept_ranks),
            axes=tuple(self.axes[i] for i in keep),
        )


@lru_cache(maxsize=1 << 16)
def spans_after_cuts(length: int, cuts: tuple[tuple[int, int, int], ...]) -> tuple[Span, ...]:
    """Indices of one dim that a rank holds after the mesh axes have cut it, left to right.

    Args:
        length: Global length of the dim.
        cuts: ``(num_parts, part, split_factor)`` of each mesh axis that shards this dim.

    Returns:
        Spans in local order; adjacent ones are merged, empty ones left out.

    Example:
        Eight rows, FSDP of size 2 over tensor parallelism of size 2, as torch places them:

        >>> spans_after_cuts(8, ((2, 0, 2), (2, 1, 1)))
        ((4, 6),)
        >>> spans_after_cuts(5, ((4, 3, 1),))
        ()
    """
    spans: tuple[Span, ...] = ((0, length),) if length else ()
    for num_parts, part, split_factor in cuts:
        held = sum(stop - start for start, stop in spans)
        pieces: list[Span] = []
        for block in range(split_factor):
            first, last = chunk_bounds(held, split_factor, block)
            start, stop = chunk_bounds(last - first, num_parts, part)
            pieces.extend(_cut(spans, first + start, first + stop))
        spans = _merged(pieces)
    return spans


@lru_cache(maxsize=1 << 16)
def _positions_with(
    length: int, cuts: tuple[tuple[int, int], ...], span: Span
) -> tuple[Coordinate, ...]:
    """Positions on the axes that cut one dim at which a rank holds all of ``span``."""
    found = []
    for position in product(*(range(size) for size, _ in cuts)):
        parts = tuple((size, i, factor) for (size, factor), i in zip(cuts, position, strict=True))
        spans = spans_after_cuts(length, parts)
        if any(start <= span[0] and span[1] <= stop for start, stop in spans):
            found.append(position)
    return tuple(found)


def chunk_bounds(length: int, num_chunks: int, index: int) -> Span:
    """Bounds of one chunk under ``torch.chunk``'s rule; trailing chunks may be empty.

    Args:
        length: Number of indices.
        num_chunks: Number of chunks.
        index: Which chunk.

    Returns:
        ``(start, stop)``.

    Example:
        >>> [chunk_bounds(5, 4, i) for i in range(4)]
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    size = -(-length // num_chunks)
    return min(index * size, length), min((index + 1) * size, length)


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a matrix that one rank holds.

    Attributes:
        local: Box in the rank's local tensor.
        inner: The same elements as a box relative to the corner of the matrix.
        fine: The same elements as a box in a finer local tensor: momentum that is cut further over
            the replicas. Equal to ``local`` where it is not.
    """

    local: Box
    inner: Box
    fine: Box

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(stop - start for start, stop in self.local)


def pieces_of(region: Region, box: Box, fine: Region | None = None) -> list[Piece]:
    """Cut a rank's region with a box of the global tensor.

    Args:
        region: What the rank holds.
        box: Box of global indices, one span per dim.
        fine: A part of ``region``: only the pieces in it are listed. All of it if None.

    Returns:
        The non-empty pieces, row-major in local order: the same list on the rank that sends them
        and on the rank that receives them.
    """
    per_dim: list[list[tuple[Span, Span, Span]]] = []
    for dim, (spans, (low, high)) in enumerate(zip(region, box, strict=True)):
        found: list[tuple[Span, Span, Span]] = []
        for start, stop, offset in _with_offsets(spans):
            for fine_start, fine_stop, fine_offset in _with_offsets(fine[dim] if fine else spans):
                first, last = max(start, low, fine_start), min(stop, high, fine_stop)
                if first < last:
                    found.append(
                        (
                            (offset + first - start, offset + last - start),
                            (first - low, last - low),
                            (fine_offset + first - fine_start, fine_offset + last - fine_start),
                        )
                    )
        if not found:
            return []
        per_dim.append(found)
    return [
        Piece(*(tuple(spans) for spans in zip(*combo, strict=True))) for combo in product(*per_dim)
    ]


def _with_offsets(spans: tuple[Span, ...]) -> Iterator[tuple[int, int, int]]:
    offset = 0
    for start, stop in spans:
        yield start, stop, offset
        offset += stop - start


def _cut(spans: tuple[Span, ...], first: int, last: int) -> Iterator[Span]:
    for start, stop, offset in _with_offsets(spans):
        low = max(first - offset, 0)
        high = min(last - offset, stop - start)
        if low < high:
            yield start + low, start + high


def _merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    merged: list[Span] = []
    for start, stop in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def _unravel(index: int, shape: tuple[int, ...]) -> Coordinate:
    coordinate: list[int] = []
    for size in reversed(shape):
        index, position = divmod(index, size)
        coordinate.append(position)
    return tuple(reversed(coordinate))


def _placed(coordinate: Coordinate, axes: Sequence[int], position: Sequence[int]) -> Coordinate:
    placed = list(coordinate)
    for i, p in zip(axes, position, strict=True):
        placed[i] = p
    return tuple(placed)


def _vary(
    coordinate: Coordinate, axes: Sequence[int], shape: tuple[int, ...]
) -> Iterator[Coordinate]:
    for position in product(*(range(shape[i]) for i in axes)):
        yield _placed(coordinate, axes, position)
