# SPDX-License-Identifier: Apache-2.0
"""Orthogonalization against an SVD, and on everything a gradient can be."""

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from hyper_parallel.core.optimizer.coefficients import PRESETS, Schedule, resolve_coefficients
from hyper_parallel.core.optimizer.polar import (
    METHODS,
    _frobenius_norm,
    orthogonalize,
    orthogonalize_with_schedule,
)

JORDAN = (3.4445, -4.7750, 2.0315)
SHAPES = [(16, 16), (12, 40), (40, 12), (1, 9), (9, 1), (1, 1), (3, 8, 20), (2, 2, 20, 8)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
# Relative to the Frobenius norm. A step multiplies what it is given, rounding included, by up to
# 8, so that half precision ends near 1e-2, and CANS and five Polar Express steps beyond.
RTOL = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Matrices of a few rows gain nothing from threads, and wait for them on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def exact(X: Tensor, schedule: Schedule) -> Tensor:
    """``U p(S) V^T`` by a float64 SVD, ``p`` being the schedule's polynomial."""
    U, S, Vh = torch.linalg.svd(X.double(), full_matrices=False)
    S = S / S.norm(dim=-1, keepdim=True)
    for a, b, c in schedule:
        S = a * S + b * S**3 + c * S**5
    return U @ torch.diag_embed(S) @ Vh


def relative_error(actual: Tensor, expected: Tensor) -> float:
    difference = torch.linalg.matrix_norm(actual.double() - expected.double())
    return float((difference / torch.linalg.matrix_norm(expected.double())).max())


def matrix_with_singular_values(S: Tensor, num_rows: int, num_columns: int) -> Tensor:
    U, _ = torch.linalg.qr(torch.randn(num_rows, len(S), dtype=torch.float64))
    V, _ = torch.linalg.qr(torch.randn(num_columns, len(S), dtype=torch.float64))
    return U @ torch.diag(S) @ V.T


def bits(X: Tensor) -> list[Any]:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[X.itemsize]
    values: list[Any] = X.detach().contiguous().view(integer).tolist()
    return values


# --- What it computes -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_result_is_the_polynomial_of_the_singular_values(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    X = torch.randn(shape, dtype=dtype)
    for name, schedule in PRESETS.items():
        result = orthogonalize(X, coefficients=name, dtype=dtype)
        assert result.shape == X.shape
        assert result.dtype == dtype
        assert relative_error(result, exact(X, schedule)) < RTOL[dtype], name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_wrong_by_its_rounding_only(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    X = torch.randn(shape)
    for name in ("jordan", "you", "polar_express", "deepseek_v4"):
        result = orthogonalize(X, coefficients=name, dtype=dtype)
        assert result.dtype == torch.float32
        assert relative_error(result, exact(X, PRESETS[name])) < RTOL[dtype], name


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_steps_are_those_asked_for(steps: int) -> None:
    X = torch.randn(6, 10, dtype=torch.float64)
    for coefficients in ("you", JORDAN):
        result = orthogonalize(X, coefficients=coefficients, steps=steps, dtype=torch.float64)
        assert relative_error(result, exact(X, resolve_coefficients(coefficients, steps))) < 1e-12


def test_default_is_jordan_five_steps_in_bfloat16() -> None:
    X = torch.randn(6, 10)
    expected = orthogonalize(
        X, coefficients=[JORDAN] * 5, steps=5, method="standard", dtype=torch.bfloat16
    )
    assert torch.equal(orthogonalize(X), expected)


@pytest.mark.parametrize(
    ("name", "steps", "low", "high"),
    [
        ("jordan", 5, 0.471, 1.202),
        ("you", 5, 0.475, 1.145),
        ("polar_express", 5, 0.846, 1.124),
        ("polar_express", 6, 0.994, 1.001),
        ("polar_express", 8, 1.000, 1.000),
        ("polar_express_5", 5, 0.859, 1.141),
        ("cans", 5, 0.862, 1.114),
        ("deepseek_v4", 10, 1.000, 1.0005),
    ],
)
def test_singular_values_end_in_the_band_of_the_preset(
    name: str, steps: int, low: float, high: float
) -> None:
    S = torch.logspace(0, -3, 60, dtype=torch.float64)
    S = S[S / S.norm() >= 1e-3]
    X = matrix_with_singular_values(S, 60, 90).float()
    result = orthogonalize(X, coefficients=name, steps=steps, dtype=torch.float32)
    values = torch.linalg.svdvals(result.double())[: len(S)]
    assert low - 1e-3 < values.min()
    assert values.max() < high + 1e-3


@pytest.mark.parametrize("method", ["auto", "gram"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PRESETS)
def test_rank_one_keeps_its_sign_and_stays_bounded(
    name: str, dtype: torch.dtype, method: str
) -> None:
    """A singular value at the very end of the interval; all ones round all in one direction."""
    for num_rows, num_columns in [(8, 8), (5, 13), (13, 5), (20, 31), (24, 57)]:
        noise = torch.outer(torch.randn(num_rows), torch.randn(num_columns))
        for X in (noise, torch.ones(num_rows, num_columns)):
            result = orthogonalize(X, coefficients=name, method=method, dtype=dtype).double()
            assert (result * X).sum() / torch.linalg.matrix_norm(X) > 0.6
            assert torch.linalg.matrix_norm(result, 2) < 1.25


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("name", PRESETS)
def test_equal_singular_values_stay_bounded_in_bfloat16(name: str, rank: int) -> None:
    X = matrix_with_singular_values(torch.ones(rank, dtype=torch.float64), 32, 48)
    assert torch.linalg.matrix_norm(orthogonalize(X, coefficients=name), 2) < 1.25


@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (1, 1), (8, 1, 1), (1, 8, 1), (2, 3, 1, 4, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_vector_like_matrix_keeps_its_direction_with_norm_0_70(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """FAILURES C06 and C07: the last two dims are the matrix, also where they are one."""
    X = torch.randn(shape)
    result = orthogonalize(X, dtype=dtype)
    norm = torch.linalg.matrix_norm(result)
    cosine = (result * X).sum((-2, -1)) / norm / torch.linalg.matrix_norm(X)
    torch.testing.assert_close(cosine, torch.ones_like(cosine), rtol=0, atol=1e-4)
    torch.testing.assert_close(norm, torch.full_like(norm, 0.70), rtol=0, atol=0.03)


@pytest.mark.parametrize("shape", [(16, 16), (24, 64), (64, 24), (1, 9), (128, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_agrees_with_torch_muon_up_to_its_norm_in_bfloat16(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    X = torch.randn(shape).to(dtype)
    expected = _zeropower_via_newtonschulz(X.clone(), JORDAN, 5, 1e-7)
    assert relative_error(orthogonalize(X), expected) < 4e-2


@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (128, 32)])
def test_has_the_bits_of_torch_muon_where_the_norm_is_a_power_of_two(
    shape: tuple[int, int],
) -> None:
    X = torch.randn(shape).sign().bfloat16()
    expected = _zeropower_via_newtonschulz(X.clone(), JORDAN, 5, 1e-7)
    assert torch.equal(orthogonalize(X), expected)


# --- Transposes and batches -----------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from([torch.bfloat16, torch.float64]))
def test_transpose_commutes(num_rows: int, num_columns: int, dtype: torch.dtype) -> None:
    X = torch.randn(num_rows, num_columns, dtype=torch.float64)
    result = orthogonalize(X, dtype=dtype)
    for transposed in (X.T, X.T.contiguous()):
        assert relative_error(orthogonalize(transposed, dtype=dtype).T, result) < RTOL[dtype]


# Large enough for a bfloat16 matrix to be iterated as its transpose, with one turn more or less.
@pytest.mark.parametrize("steps", [4, 5])
@pytest.mark.parametrize("shape", [(600, 520), (520, 600), (130, 260), (260, 130)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_replacing_a_matrix_gives_the_bits_of_a_new_one(
    shape: tuple[int, int], steps: int, dtype: torch.dtype
) -> None:
    schedule = resolve_coefficients(PRESETS["jordan"][0], steps)
    X = torch.randn(shape).to(dtype)
    for work_dtype in (torch.bfloat16, torch.float32):
        expected = orthogonalize_with_schedule(X, schedule, dtype=work_dtype)
        replaced = X.clone()
        assert (
            orthogonalize_with_schedule(replaced, schedule, dtype=work_dtype, out=replaced)
            is replaced
        )
        assert torch.equal(replaced, expected)
        exact_result = exact(X.double(), schedule)
        assert relative_error(replaced, exact_result) < max(RTOL[work_dtype], RTOL[dtype])


@pytest.mark.parametrize("shape", [(4, 3, 5), (8, 16, 16), (5, 64, 32), (3, 300, 100), (6, 1, 9)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["auto", "gram"])
def test_batch_equals_its_matrices_one_by_one(
    shape: tuple[int, ...], dtype: torch.dtype, method: str
) -> None:
    X = torch.randn(shape)
    alone = torch.stack([orthogonalize(matrix, method=method, dtype=dtype) for matrix in X])
    assert relative_error(orthogonalize(X, method=method, dtype=dtype), alone) < RTOL[dtype] + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batch_of_one_has_the_bits_of_the_matrix(dtype: torch.dtype) -> None:
    X = torch.randn(7, 11)
    expected = orthogonalize(X, dtype=dtype)
    assert torch.equal(orthogonalize(X[None], dtype=dtype)[0], expected)
    assert torch.equal(orthogonalize(X[None, None], dtype=dtype)[0, 0], expected)


@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (2, 3, 6, 4)])
def test_leading_dims_are_one_flat_batch(shape: tuple[int, ...]) -> None:
    X = torch.randn(shape)
    flat = orthogonalize(X.flatten(0, 1), dtype=torch.float32)
    assert torch.equal(orthogonalize(X, dtype=torch.float32), flat.reshape(shape))


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "every second": lambda base: base[:, :, ::2, ::3],
    "transposed": lambda base: base.mT,
    "leading dims permuted": lambda base: base.permute(1, 0, 2, 3),
    "batch dim innermost": lambda base: base.permute(2, 3, 0, 1),
    "expanded batch": lambda base: base[0, 0].expand(3, 10, 12),
    "expanded rows": lambda base: base[0, 0, :1].expand(10, 12),
    "offset": lambda base: base[1:3, 2, 1:, 3:],
}


@pytest.mark.parametrize("kind", STRIDED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_strides_do_not_matter(kind: str, dtype: torch.dtype) -> None:
    X = STRIDED[kind](torch.randn(4, 6, 10, 12).to(dtype))
    result = orthogonalize(X, dtype=dtype)
    assert result.shape == X.shape
    expected = orthogonalize(X.contiguous(), dtype=dtype)
    assert relative_error(result, expected) < RTOL[dtype]


# --- Scale and norm -------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [-120, -60, -1, 1, 60, 120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_power_of_two_does_not_change_a_bit(exponent: int, dtype: torch.dtype) -> None:
    X = torch.randn(8, 12).to(dtype)
    assert torch.equal(orthogonalize(X * 2.0**exponent), orthogonalize(X))


@pytest.mark.parametrize("scale", [1e-41, 1e-38, 1e-30, 1e-12, 1e12, 1e20, 1e30, 1e38])
@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (1, 5), (3, 6, 6)])
def test_scale_does_not_matter(scale: float, shape: tuple[int, ...]) -> None:
    """The expectation is made from the scaled entries, for 1e-41 keeps four digits of them."""
    X = torch.randn(shape)
    X = X / X.abs().max() * scale
    expected = exact(X.double() / scale, PRESETS["jordan"])
    assert relative_error(orthogonalize(X, dtype=torch.float32), expected) < 1e-5


@pytest.mark.parametrize("scale", [1e-41, 1e-30, 1.0, 1e38])
def test_negation_commutes_also_where_all_entries_have_one_sign(scale: float) -> None:
    X = torch.rand(4, 7) * scale
    result = orthogonalize(X)
    assert result.any()
    assert torch.equal(orthogonalize(-X), -result)


@pytest.mark.parametrize("scale", [1e-290, 1e290])
def test_scale_of_float64_is_not_squeezed_into_float32(scale: float) -> None:
    X = torch.randn(4, 6, dtype=torch.float64)
    assert relative_error(orthogonalize(X * scale), orthogonalize(X)) < 1e-2


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**14])
def test_float16_gradients_near_its_limits_are_ordinary(scale: float) -> None:
    X = torch.tensor([[1.0, -2.0, 3.0], [0.0, 1.0, 1.0]])
    result = orthogonalize((X * scale).half(), dtype=torch.float16)
    assert torch.equal(result, orthogonalize(X.half(), dtype=torch.float16))


def test_matrices_of_a_batch_have_scales_of_their_own() -> None:
    X = torch.randn(3, 5, 8)
    scales = torch.tensor([2.0**-100, 1.0, 2.0**100])[:, None, None]
    assert torch.equal(orthogonalize(X * scales), orthogonalize(X))


def test_norm_is_exact_on_ten_million_elements() -> None:
    """``torch.linalg.vector_norm`` is wrong by 3e-4 here on a CPU."""
    X = torch.rand(10_500_000)
    for shape in [(3000, 3500), (1, 10_500_000), (10_500_000, 1), (3, 1000, 3500)]:
        Y = X.view(shape)
        expected = torch.linalg.vector_norm(Y.double(), dim=(-2, -1))
        torch.testing.assert_close(_frobenius_norm(Y).double(), expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(_frobenius_norm(Y.mT).double(), expected, rtol=1e-6, atol=0)


def test_norm_is_taken_before_the_cast() -> None:
    """Rounding to bfloat16 first moves a norm by up to 2**-9, and all singular values with it."""
    X = torch.full((32, 32), 1 + 2.0**-8 + 2.0**-12)
    result = orthogonalize(X, coefficients=(1, 0, 0), steps=1, dtype=torch.float32)
    torch.testing.assert_close(result, torch.full((32, 32), 1 / 32))
    assert torch.equal(
        orthogonalize(X, coefficients=(1, 0, 0), steps=1), torch.full_like(X, 1 / 32)
    )


# --- Zero, empty, non-finite ----------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-7, 0.0, 1e-300, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["auto", "gram"])
def test_zero_stays_exactly_zero(dtype: torch.dtype, eps: float, method: str) -> None:
    """FAILURES A27."""
    for shape in [(4, 8), (1, 1), (3, 5, 2)]:
        X = torch.zeros(shape)
        assert torch.equal(orthogonalize(X, method=method, eps=eps, dtype=dtype), X)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_matrix_leaves_the_rest_of_its_batch_alone(dtype: torch.dtype) -> None:
    """FAILURES A27: one expert without a gradient."""
    X = torch.randn(3, 4, 8)
    expected = orthogonalize(X, dtype=dtype)
    X[1] = 0
    result = orthogonalize(X, dtype=dtype)
    assert torch.equal(result[1], torch.zeros(4, 8))
    assert torch.equal(result[[0, 2]], expected[[0, 2]])


def test_eps_is_a_floor_of_the_norm_after_scaling() -> None:
    X = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    linear = (1, 0, 0)
    floored = orthogonalize(X, coefficients=linear, steps=1, eps=10.0, dtype=torch.float32)
    torch.testing.assert_close(floored, X / 4 / 10)
    for eps in (0.0, 1e-7, 1.0):
        result = orthogonalize(X, coefficients=linear, steps=1, eps=eps, dtype=torch.float32)
        torch.testing.assert_close(result, X / 5)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (0, 3, 4), (2, 0, 4), (2, 3, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_empty_stays_empty(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """FAILURES C07."""
    result = orthogonalize(torch.empty(shape, dtype=dtype))
    assert result.shape == shape
    assert result.dtype == dtype


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 5, 8), (4, 8, 5), (2, 2, 6, 6)])
@pytest.mark.parametrize("method", ["auto", "gram"])
def test_non_finite_entry_poisons_its_own_matrix_only(
    shape: tuple[int, ...], dtype: torch.dtype, value: float, method: str
) -> None:
    X = torch.randn(shape)
    expected = orthogonalize(X, method=method, dtype=dtype).flatten(0, -3)
    X.view(4, *shape[-2:])[2, 3, 1] = value
    result = orthogonalize(X, method=method, dtype=dtype).flatten(0, -3)
    assert result[2].isnan().all()
    assert torch.equal(result[[0, 1, 3]], expected[[0, 1, 3]])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_entry_makes_a_lone_matrix_nan(value: float) -> None:
    X = torch.zeros(3, 4)
    X[0, 0] = value
    assert orthogonalize(X).isnan().all()


# --- A pure function ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["contiguous", "one", *STRIDED])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["auto", "gram"])
def test_input_is_never_written(kind: str, dtype: torch.dtype, method: str) -> None:
    """``torch.optim.Muon`` 2.13 divides a bfloat16 input in place."""
    base = torch.randn(4, 6, 10, 12).to(dtype)
    views = {"contiguous": lambda base: base, "one": lambda base: base[:1, :1], **STRIDED}
    X = views[kind](base)
    before, version, strides = bits(base), X._version, X.stride()
    for compute_dtype in DTYPES:
        result = orthogonalize(X, method=method, dtype=compute_dtype)
        assert bits(base) == before
        assert (X._version, X.stride()) == (version, strides)
        assert result.untyped_storage().data_ptr() != X.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_calls_are_independent(dtype: torch.dtype) -> None:
    """FAILURES E06: a first result must survive a second call."""
    X, Z = torch.randn(2, 6, 9, dtype=dtype)
    first = orthogonalize(X, dtype=dtype)
    before = first.clone()
    second = orthogonalize(Z, dtype=dtype)
    assert torch.equal(first, before)
    assert not torch.equal(first, second)
    assert torch.equal(orthogonalize(X, dtype=dtype), before)


def test_result_needs_no_gradient() -> None:
    X = torch.randn(4, 6, requires_grad=True)
    result = orthogonalize(X)
    assert not result.requires_grad
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("dtype", DTYPES)
def test_result_has_the_dtype_of_the_input(dtype: torch.dtype) -> None:
    X = torch.randn(5, 7).to(dtype)
    for compute_dtype in DTYPES:
        result = orthogonalize(X, dtype=compute_dtype)
        assert result.dtype == dtype
        rtol = max(RTOL[dtype], RTOL[compute_dtype])
        assert relative_error(result, exact(X, PRESETS["jordan"])) < rtol


def test_resolved_schedule_gives_the_same_bits() -> None:
    X = torch.randn(2, 5, 7)
    expected = orthogonalize(X, coefficients="you", steps=4, dtype=torch.float32)
    schedule = resolve_coefficients("you", 4)
    assert torch.equal(orthogonalize_with_schedule(X, schedule, dtype=torch.float32), expected)


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of storages made inside and alive at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen = weakref.WeakSet[torch.UntypedStorage]()

    @override
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        # Views and in-place results live in the storage of an argument.
        given = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        known = {x.untyped_storage().data_ptr() for x in given}
        for output in tree_leaves(outputs):
            storage = output.untyped_storage()
            if storage.data_ptr() not in known and storage not in self._seen:
                self._seen.add(storage)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, storage.nbytes())
        return outputs

    def _free(self, nbytes: int) -> None:
        self.live -= nbytes


@pytest.mark.parametrize("shape", [(64, 64), (64, 512), (512, 64), (4, 32, 128)])
@pytest.mark.parametrize(("method", "num_squares"), [("standard", 2), ("gram", 4)])
def test_one_more_matrix_and_the_gram_matrices_are_alive(
    shape: tuple[int, ...], method: str, num_squares: int
) -> None:
    X = torch.randn(shape)
    alpha = max(shape[-2:]) / min(shape[-2:])
    copies = 1 + num_squares / alpha
    with PeakMemory() as memory:
        orthogonalize(X, method=method, dtype=torch.float32)
    assert memory.peak <= (1 + copies) * X.nbytes + 4096  # the result
    schedule = resolve_coefficients("jordan", 5)
    with PeakMemory() as memory:
        orthogonalize_with_schedule(X, schedule, method=method, dtype=torch.float32, out=X)
    assert memory.peak <= copies * X.nbytes + 4096


def test_matrices_that_run_one_by_one_need_no_more_than_their_norms() -> None:
    """Two copies: the normalized batch, and its squares."""
    X = torch.randn(8, 65, 65)
    with PeakMemory() as memory:
        orthogonalize(X, dtype=torch.float32)
    assert memory.peak <= 2 * X.nbytes + 4096


# --- Refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"expected dtype .* got {dtype} with shape \(2, 2\)"):
        orthogonalize(torch.zeros(2, 2, dtype=dtype))


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match=r"got layout torch.sparse_coo .* pass X.to_dense\(\)"):
        orthogonalize(torch.eye(3).to_sparse())


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="expected a Tensor, got list"):
        orthogonalize([[1.0]])  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (4,), (0,)])
def test_vectors_and_scalars_are_refused(shape: tuple[int, ...]) -> None:
    """FAILURES C07."""
    with pytest.raises(ValueError, match=r"expected matrices of shape \(\.\.\., m, n\), got shape"):
        orthogonalize(torch.zeros(shape))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_computes_the_same_polynomial(method: str) -> None:
    for shape in SHAPES:
        X = torch.randn(shape, dtype=torch.float64)
        result = orthogonalize(X, method=method, dtype=torch.float64)
        assert relative_error(result, exact(X, PRESETS["jordan"])) < RTOL[torch.float64]


@pytest.mark.parametrize("method", ["gramm", "", "Standard"])
def test_unknown_method_is_refused(method: str) -> None:
    with pytest.raises(ValueError, match=rf"method: expected .*'auto', 'standard'.*got '{method}'"):
        orthogonalize(torch.zeros(2, 2), method=method)


@pytest.mark.parametrize("eps", [-1e-7, math.nan, math.inf])
def test_eps_must_be_finite_and_not_negative(eps: float) -> None:
    with pytest.raises(ValueError, match="eps: expected a finite number, at least 0"):
        orthogonalize(torch.zeros(2, 2), eps=eps)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn])
def test_dtype_of_the_products_must_be_a_common_float(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"dtype: expected .*torch.bfloat16.* got {dtype}"):
        orthogonalize(torch.zeros(2, 2), dtype=dtype)


def test_bad_coefficients_are_refused_on_empty_input_too() -> None:
    with pytest.raises(ValueError, match="ns_coefficients='aol' is refused"):
        orthogonalize(torch.zeros(0, 4), coefficients="aol")
