# SPDX-License-Identifier: Apache-2.0
"""Where a parameter lives: meshes and placements as plain integers, no torch."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

from typing_extensions import override

from hyper_parallel.core.optimizer.regions import Box, Region, positions_with, spans_after_cuts

Coordinate = tuple[int, ...]
Ranks = tuple[int, ...]


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
    def _hash(self) -> int:
        return hash((self.shape, self.ranks))

    # Meshes are keys, and may have thousands of ranks.
    @override
    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The ranks in ascending order, which names a set of ranks, however a mesh arranges it."""
        return tuple(sorted(self.ranks))

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
        return self._placements_text

    @cached_property
    def _placements_text(self) -> str:
        words = []
        for axis in self.axes:
            split = f"/{axis.split_factor}" if axis.split_factor != 1 else ""
            words.append("R" if axis.dim is None else f"S({axis.dim}{split})")
        return " ".join(words)

    @cached_property
    def _local_shapes(self) -> dict[Coordinate, tuple[int, ...]]:
        return {}

    @cached_property
    def _regions(self) -> dict[Coordinate, Region]:
        return {}

    def region(self, coordinate: Coordinate) -> Region:
        """What the rank at ``coordinate`` holds; see [Note: regions]."""
        region = self._regions.get(coordinate)
        if region is None:
            region = _region(self.shape, self.axes, self.mesh.shape, coordinate)
            self._regions[coordinate] = region
        return region

    def local_shape(self, coordinate: Coordinate) -> tuple[int, ...]:
        """Shape of the local tensor at ``coordinate``."""
        shape = self._local_shapes.get(coordinate)
        if shape is None:
            region = self.region(coordinate)
            shape = tuple(sum(stop - start for start, stop in spans) for spans in region)
            self._local_shapes[coordinate] = shape
        return shape

    def replica_of(self, coordinate: Coordinate, like: Coordinate) -> bool:
        """Whether two positions belong to the same copy of the tensor."""
        return all(coordinate[i] == like[i] for i in self.replicate_axes)

    @cached_property
    def _copies(self) -> dict[Coordinate, tuple[Coordinate, ...]]:
        return {}

    def copy_coordinates(self, coordinate: Coordinate) -> tuple[Coordinate, ...]:
        """Positions that together hold one whole copy and include ``coordinate``."""
        copy = tuple(coordinate[i] for i in self.replicate_axes)
        if copy not in self._copies:
            self._copies[copy] = tuple(_vary(coordinate, self.shard_axes, self.mesh.shape))
        return self._copies[copy]

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
            positions = positions_with(length, cuts, span)
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


# Parameters of a model have few shapes and layouts, but are many.
@lru_cache(maxsize=1 << 16)
def _region(
    shape: tuple[int, ...],
    axes: tuple[AxisPlacement, ...],
    mesh_shape: tuple[int, ...],
    coordinate: Coordinate,
) -> Region:
    cuts: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    for axis, size, index in zip(axes, mesh_shape, coordinate, strict=True):
        if axis.dim is not None:
            cuts[axis.dim].append((size, index, axis.split_factor))
    return tuple(
        spans_after_cuts(length, tuple(dim_cuts))
        for length, dim_cuts in zip(shape, cuts, strict=True)
    )


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
