# SPDX-License-Identifier: Apache-2.0
"""What the matrices of a parameter are."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.core.optimizer.matrix_view import MatrixView, matrices_of, normalize_view
from hyper_parallel.core.optimizer.regions import Box


def boxes(shape: tuple[int, ...], view: MatrixView) -> list[Box]:
    return [matrix.box for matrix in matrices_of(shape, view, "w")]


def sizes(shape: tuple[int, ...], view: MatrixView) -> list[tuple[int, int]]:
    return [(m.num_rows, m.num_cols) for m in matrices_of(shape, view, "w")]


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (None, None),
        ("flatten", "flatten"),
        (("heads", 4), ("heads", 4)),
        (["heads", 4], ("heads", 4)),
        (("split", (8, 1, 1)), ("split", (8, 1, 1))),
        (["split", [8, 1, 1]], ("split", (8, 1, 1))),
        (("split", [5]), ("split", (5,))),
    ],
)
def test_normalize_view_accepts_every_form_and_lists_for_tuples(
    view: Any, expected: MatrixView
) -> None:
    assert normalize_view(view, "w") == expected
    assert normalize_view(expected, "w") == expected
    assert normalize_view(json.loads(json.dumps(expected)), "w") == expected


@pytest.mark.parametrize(
    "view",
    [
        "rows",
        "heads",
        "",
        0,
        True,
        (),
        ("heads",),
        ("heads", 0),
        ("heads", -2),
        ("heads", True),
        ("heads", 2.0),
        ("heads", (2,)),
        ("heads", 2, 2),
        ("split", ()),
        ("split", 3),
        ("split", "34"),
        ("split", (3, 0)),
        ("split", (3, -1)),
        ("split", (3, True)),
        ("split", (3, 1.0)),
        ("flatten", 2),
        {"heads": 2},
    ],
)
def test_normalize_view_refuses_anything_else_and_names_the_parameter(view: Any) -> None:
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.qkv: matrix_view must be") as caught:
        normalize_view(view, "blocks.0.attn.qkv")
    message = str(caught.value)
    assert repr(view) in message
    assert all(form in message for form in ("None", "'flatten'", "'split'", "'heads'"))


def test_matrices_of_a_matrix_is_itself() -> None:
    assert boxes((6, 4), None) == [((0, 6), (0, 4))]
    assert sizes((6, 4), None) == [(6, 4)]


def test_matrices_of_a_stack_are_its_leading_indices_in_order() -> None:
    assert boxes((2, 2, 3, 5), None) == [
        ((0, 1), (0, 1), (0, 3), (0, 5)),
        ((0, 1), (1, 2), (0, 3), (0, 5)),
        ((1, 2), (0, 1), (0, 3), (0, 5)),
        ((1, 2), (1, 2), (0, 3), (0, 5)),
    ]
    assert sizes((4, 8, 16), None) == [(8, 16)] * 4


def test_matrices_of_a_flattened_convolution_are_one() -> None:
    (matrix,) = matrices_of((8, 4, 3, 2), "flatten", "conv")
    assert matrix.box == ((0, 8), (0, 4), (0, 3), (0, 2))
    assert (matrix.num_rows, matrix.num_cols, matrix.numel) == (8, 24, 192)


def test_matrices_of_a_convolution_not_flattened_are_its_kernels() -> None:
    assert sizes((8, 4, 3, 2), None) == [(3, 2)] * 32


def test_matrices_of_heads_are_equal_blocks_of_rows() -> None:
    assert boxes((6, 4), ("heads", 3)) == [
        ((0, 2), (0, 4)),
        ((2, 4), (0, 4)),
        ((4, 6), (0, 4)),
    ]


def test_matrices_of_a_split_may_have_unequal_blocks() -> None:
    assert boxes((7, 4), ("split", (4, 1, 2))) == [
        ((0, 4), (0, 4)),
        ((4, 5), (0, 4)),
        ((5, 7), (0, 4)),
    ]
    assert sizes((7, 4), ("split", (4, 1, 2))) == [(4, 4), (1, 4), (2, 4)]


def test_matrices_of_a_stack_with_blocks_have_the_blocks_innermost() -> None:
    assert boxes((2, 3, 4), ("split", (1, 2))) == [
        ((0, 1), (0, 1), (0, 4)),
        ((0, 1), (1, 3), (0, 4)),
        ((1, 2), (0, 1), (0, 4)),
        ((1, 2), (1, 3), (0, 4)),
    ]


@pytest.mark.parametrize("view", [None, "flatten", ("heads", 2)])
def test_matrices_of_no_rows_are_empty_ones(view: MatrixView) -> None:
    assert {m.numel for m in matrices_of((0, 4), view, "w")} == {0}


def test_matrices_of_an_empty_stack_are_none() -> None:
    assert boxes((0, 4, 4), None) == []


def test_split_that_forgets_a_block_raises_with_rows_and_sum() -> None:
    """A17: a gated model has four blocks; a split into three failed in a reshape."""
    with pytest.raises(ValueError, match=r"attn.qkv: .*\(8, 1, 1\).*sums to 10 rows.* has 18"):
        matrices_of((18, 4), ("split", (8, 1, 1)), "attn.qkv")


def test_split_of_a_stack_counts_the_rows_of_one_matrix() -> None:
    with pytest.raises(ValueError, match=r"experts: .*sums to 8 rows.* has 4"):
        matrices_of((2, 4, 4), ("split", (4, 4)), "experts")


def test_heads_that_do_not_divide_the_rows_raise_with_both() -> None:
    with pytest.raises(ValueError, match=r"attn.q: .*\('heads', 4\).* got 6 rows"):
        matrices_of((6, 4), ("heads", 4), "attn.q")


@st.composite
def viewed_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], MatrixView]:
    batch = draw(st.lists(st.integers(0, 3), max_size=2))
    num_cols = draw(st.integers(0, 4))
    blocks = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    num_heads, head_rows = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    view, num_rows = draw(
        st.sampled_from(
            [
                (None, head_rows),
                ("flatten", head_rows),
                (("heads", num_heads), num_heads * head_rows),
                (("split", tuple(blocks)), sum(blocks)),
            ]
        )
    )
    return (*batch, num_rows, num_cols), view


@given(case=viewed_shapes())
@settings(max_examples=150)
def test_matrices_partition_the_parameter(case: tuple[tuple[int, ...], MatrixView]) -> None:
    shape, view = case
    times = torch.zeros(shape, dtype=torch.int)
    for matrix in matrices_of(shape, view, "w"):
        part = times[tuple(slice(*span) for span in matrix.box)]
        part.add_(1)
        assert part.numel() == matrix.numel == matrix.num_rows * matrix.num_cols
        if view != "flatten":
            assert part.shape[-2:] == (matrix.num_rows, matrix.num_cols)
            assert math.prod(part.shape[:-2]) == 1
    assert bool((times == 1).all())
