# SPDX-License-Identifier: Apache-2.0
"""What a matrix is: the boxes of a parameter that are orthogonalized one by one. No torch.

The last two dims are the matrix and every leading dim is a batch, unless the parameter group says
otherwise:

``"flatten"``               the whole tensor is one ``shape[0] x rest`` matrix (convolutions)
``("split", (q, k, v))``    blocks of rows, which may differ in size (fused QKV, gate and up)
``("heads", num_heads)``    equal blocks of rows

Every view is a list of boxes, so a shard that cuts through a block is nothing special.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

from hyper_parallel.core.optimizer.regions import Box, Span

MatrixView = str | tuple[str, int] | tuple[str, tuple[int, ...]] | None

_FORMS = "None, 'flatten', ('split', (rows, ...)) or ('heads', num_heads)"


@dataclass(frozen=True, slots=True)
class MatrixBox:
    """One matrix of a parameter.

    Attributes:
        box: Global indices, one span per dim of the parameter.
        num_rows: Rows of the matrix.
        num_cols: Columns of the matrix.
    """

    box: Box
    num_rows: int
    num_cols: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.num_rows * self.num_cols


def normalize_view(view: Any, name: str) -> MatrixView:
    """Check the form of a ``matrix_view`` and bring it to tuples.

    Args:
        view: What the parameter group says. Lists are accepted in place of tuples, since that is
            what JSON gives back.
        name: What to call it in an error.

    Returns:
        The view made of strings, integers and tuples.

    Raises:
        ValueError: If it is none of the known forms.
    """
    if view is None or (isinstance(view, str) and view == "flatten"):
        return view
    if isinstance(view, list | tuple) and len(view) == 2:
        kind, argument = view
        if kind == "heads" and _is_positive(argument):
            return ("heads", argument)
        if kind == "split" and isinstance(argument, list | tuple) and argument:
            blocks = tuple(argument)
            if all(map(_is_positive, blocks)):
                return ("split", blocks)
    raise ValueError(f"{name}: matrix_view must be {_FORMS}, got {view!r}")


def matrices_of(shape: tuple[int, ...], view: MatrixView, name: str) -> list[MatrixBox]:
    """List the matrices of a parameter.

    Args:
        shape: Global shape, at least two dims.
        view: A normalized view.
        name: Name of the parameter, for errors.

    Returns:
        The matrices in row-major order of the batch dims, blocks of rows innermost.

    Raises:
        ValueError: If the sizes of a view do not fit the shape.

    Example:
        >>> [m.box for m in matrices_of((6, 4), ("split", (4, 2)), "qkv")]
        [((0, 4), (0, 4)), ((4, 6), (0, 4))]
        >>> len(matrices_of((3, 8, 16), None, "experts"))
        3
    """
    if view == "flatten":
        whole = tuple((0, length) for length in shape)
        return [MatrixBox(whole, shape[0], math.prod(shape[1:]))]
    *batch, num_rows, num_cols = shape
    blocks = _row_blocks(num_rows, view, name)
    matrices: list[MatrixBox] = []
    for index in product(*(range(size) for size in batch)):
        lead = tuple((i, i + 1) for i in index)
        for start, stop in blocks:
            box = (*lead, (start, stop), (0, num_cols))
            matrices.append(MatrixBox(box, stop - start, num_cols))
    return matrices


def _row_blocks(num_rows: int, view: MatrixView, name: str) -> list[Span]:
    if not isinstance(view, tuple):
        return [(0, num_rows)]
    kind, argument = view
    if kind == "heads":
        assert isinstance(argument, int)
        if num_rows % argument:
            raise ValueError(
                f"{name}: matrix_view ('heads', {argument}) needs a number of rows that it "
                f"divides, got {num_rows} rows"
            )
        sizes = (num_rows // argument,) * argument
    else:
        assert isinstance(argument, tuple)
        sizes = argument
        if sum(sizes) != num_rows:
            raise ValueError(
                f"{name}: matrix_view ('split', {sizes}) sums to {sum(sizes)} rows, but the "
                f"parameter has {num_rows}; list every block, gates included"
            )
    blocks: list[Span] = []
    start = 0
    for size in sizes:
        blocks.append((start, start + size))
        start += size
    return blocks


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
