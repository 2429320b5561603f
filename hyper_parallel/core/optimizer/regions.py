# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of a tensor: spans of indices, and pieces of boxes. Plain integers, no torch.

[Note: regions]
A placement shards one tensor dim, so what a rank holds is a product over the dims: on each dim
a list of *spans* ``(start, stop)`` of global indices, in the order in which they lie in the local
tensor. ``Shard`` gives one span; ``_StridedShard`` (FSDP over tensor parallel) several; an empty
shard none. FSDP, HSDP, TP, EP and their mixtures differ in nothing else.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

Span = tuple[int, int]
Region = tuple[tuple[Span, ...], ...]
Box = tuple[Span, ...]


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
def positions_with(
    length: int, cuts: tuple[tuple[int, int], ...], span: Span
) -> tuple[tuple[int, ...], ...]:
    """Positions on the axes that cut one dim at which a rank holds all of a span.

    Args:
        length: Global length of the dim.
        cuts: ``(num_parts, split_factor)`` of each mesh axis that shards the dim.
        span: Global indices.

    Returns:
        One position per axis, for each place; none if every rank holds only part of the span.
    """
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


@dataclass(frozen=True)
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

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(stop - start for start, stop in self.local)


@lru_cache(maxsize=1 << 16)
def pieces_of(region: Region, box: Box, fine: Region | None = None) -> tuple[Piece, ...]:
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
            return ()
        per_dim.append(found)
    return tuple(
        Piece(*(tuple(spans) for spans in zip(*combo, strict=True))) for combo in product(*per_dim)
    )


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
