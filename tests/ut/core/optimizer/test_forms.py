# SPDX-License-Identifier: Apache-2.0
"""Forms of the iteration: what they cost, where they are chosen, and that none loses accuracy."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hyper_parallel.core.optimizer.bucket import Orthogonalization
from hyper_parallel.core.optimizer.coefficients import PRESETS, Schedule
from hyper_parallel.core.optimizer.forms import (
    METHODS,
    Form,
    choose_form,
    form_flops,
    panel_bounds,
    restart_steps,
)
from hyper_parallel.core.optimizer.matrix_view import MatrixBox
from hyper_parallel.core.optimizer.polar import orthogonalize, orthogonalize_with_schedule
from tests.ut.core.optimizer.test_polar import (
    exact,
    matrix_with_singular_values,
    relative_error,
)

JORDAN = PRESETS["jordan"]
GRAM = Form(kind="gram", chain_dtype="float32", restarts=(2,))
FORMS = [
    Form(),
    Form(num_panels=4),
    Form(num_panels=3, batched=False),
    GRAM,
    replace(GRAM, restarts=(1, 3), num_panels=4),
    replace(GRAM, restarts=(), batched=False),
    replace(GRAM, restarts=(1, 2, 3, 4), chain_dtype="float64"),
]
SHAPES = [(16, 16), (12, 40), (40, 12), (1, 9), (3, 8, 20), (2, 2, 20, 8)]
NUM_ROWS, NUM_COLUMNS = 24, 96


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def spectra() -> dict[str, Tensor]:
    """Singular values that are hard on one form or another."""
    n = NUM_ROWS
    return {
        "condition 1e3": torch.logspace(0, -3, n, dtype=torch.float64),
        "condition 1e6": torch.logspace(0, -6, n, dtype=torch.float64),
        "spike": torch.tensor([1.0] + [1e-4] * (n - 1), dtype=torch.float64),
        "rank 10": torch.ones(10, dtype=torch.float64),
        "rank 1": torch.ones(1, dtype=torch.float64),
    }


def hard_matrices() -> dict[str, Tensor]:
    made = {
        name: matrix_with_singular_values(S, NUM_ROWS, NUM_COLUMNS) for name, S in spectra().items()
    }
    square = matrix_with_singular_values(spectra()["condition 1e3"], NUM_ROWS, NUM_ROWS)
    return {"gaussian": torch.randn(NUM_ROWS, NUM_COLUMNS).double(), "square": square, **made}


def slope(schedule: Schedule) -> float:
    """By how much the smallest singular values grow, and rounding errors among them."""
    return math.prod(a for a, _, _ in schedule)


def chosen(shape: tuple[int, int], dtype: str, device_type: str = "cpu", **changes: str) -> Form:
    options = {"method": "auto", "dtype": dtype, "device_type": device_type, **changes}
    return choose_form(*shape, JORDAN, **options)


# --- What they compute ----------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_form_computes_the_polynomial(form: Form, shape: tuple[int, ...]) -> None:
    X = torch.randn(shape, dtype=torch.float64)
    form = form if form.chain_dtype is None else replace(form, chain_dtype="float64")
    result = orthogonalize_with_schedule(X, JORDAN, method=form, dtype=torch.float64)
    assert result.shape == X.shape
    assert relative_error(result, exact(X, JORDAN)) < 1e-10


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("method", METHODS)
def test_float64_is_exact_to_eight_digits_on_anything(method: str, name: str) -> None:
    for kind, X in hard_matrices().items():
        result = orthogonalize(X, coefficients=name, method=method, dtype=torch.float64)
        assert relative_error(result, exact(X, PRESETS[name])) < 1e-8, kind


@pytest.mark.parametrize("name", PRESETS)
def test_gram_form_in_float32_is_right_to_three_digits_on_anything(name: str) -> None:
    """Ten steps take rounding to 1 wherever the matrix has no singular value, in either form."""
    for kind, X in hard_matrices().items():
        result = orthogonalize(X, coefficients=name, method="gram", dtype=torch.float32)
        standard = orthogonalize(X, coefficients=name, method="standard", dtype=torch.float32)
        error = relative_error(result, exact(X, PRESETS[name]))
        assert error < 3e-4 + 2 * relative_error(standard, exact(X, PRESETS[name])), kind


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_restarts_keep_the_gram_form_bounded(name: str, dtype: torch.dtype) -> None:
    for kind, X in hard_matrices().items():
        result = orthogonalize(X, coefficients=name, method="gram", dtype=dtype)
        assert torch.linalg.matrix_norm(result, 2) < 1.3, kind


def test_gram_form_without_a_restart_is_not_bounded() -> None:
    """What the restarts are for."""
    X = matrix_with_singular_values(spectra()["rank 1"], NUM_ROWS, NUM_COLUMNS).float()
    form = replace(GRAM, restarts=())
    result = orthogonalize_with_schedule(
        X, PRESETS["deepseek_v4"], method=form, dtype=torch.float32
    )
    assert not torch.linalg.matrix_norm(result) < 1e3


@pytest.mark.parametrize("name", PRESETS)
def test_gram_form_of_a_bfloat16_matrix_is_as_accurate_as_the_standard_form(name: str) -> None:
    for kind, X in hard_matrices().items():
        expected = exact(X, PRESETS[name])
        gram, standard = (
            relative_error(orthogonalize(X, coefficients=name, method=method), expected)
            for method in ("gram", "standard")
        )
        assert gram < 1.5 * standard, kind


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_restarts_of_auto_make_the_gram_form_as_accurate_as_the_standard_form(
    name: str, dtype: torch.dtype
) -> None:
    """In the spectral norm, up to the rounding of the input: one ulp, times the slope."""
    schedule, dtype_name = PRESETS[name], str(dtype).removeprefix("torch.")
    options = {"method": "auto", "dtype": dtype_name, "device_type": "cuda"}
    form = choose_form(1024, 8192, schedule, **options)
    assert (form.kind, form.chain_dtype) == ("gram", dtype_name)
    rounding = slope(schedule) * torch.finfo(dtype).eps
    for kind, X in hard_matrices().items():
        expected = exact(X, schedule)
        gram, standard = (
            orthogonalize_with_schedule(X, schedule, method=method, dtype=dtype)
            for method in (form, "standard")
        )
        error, allowed = (torch.linalg.matrix_norm(Y - expected, 2) for Y in (gram, standard))
        assert error <= allowed + rounding, kind


@settings(max_examples=25)
@given(
    st.sampled_from([(128, 512), (130, 700), (700, 130), (200, 200)]),
    st.sampled_from(sorted(PRESETS)),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    st.floats(-6, 0),
    st.integers(1, 128),
)
def test_auto_is_as_accurate_as_the_standard_form(
    shape: tuple[int, int], name: str, dtype: torch.dtype, decades: float, rank: int
) -> None:
    X = matrix_with_singular_values(torch.logspace(0, decades, rank, dtype=torch.float64), *shape)
    expected = exact(X, PRESETS[name])
    auto, standard = (
        torch.linalg.matrix_norm(
            orthogonalize(X, coefficients=name, method=method, dtype=dtype) - expected, 2
        )
        for method in ("auto", "standard")
    )
    assert auto <= standard + 2 * slope(PRESETS[name]) * torch.finfo(dtype).eps


def test_float32_chain_survives_products_that_round_to_bfloat16() -> None:
    X = matrix_with_singular_values(spectra()["rank 1"], NUM_ROWS, NUM_COLUMNS).float()
    expected = exact(X, JORDAN)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        result = orthogonalize(X, method="gram", dtype=torch.float32)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.linalg.matrix_norm(result, 2) < 1.2
    assert relative_error(result, expected) < 2


@pytest.mark.parametrize("method", METHODS)
def test_big_matrices_do_not_depend_on_their_batch(method: str) -> None:
    """They run one by one on a CPU, which is faster, too."""
    X = torch.randn(5, 130, 300)
    for dtype in (torch.bfloat16, torch.float32):
        whole = orthogonalize(X, method=method, dtype=dtype)
        part = orthogonalize(X[[3, 1]], method=method, dtype=dtype)
        alone = orthogonalize(X[3], method=method, dtype=dtype)
        assert torch.equal(whole[[3, 1]], part)
        assert torch.equal(whole[3], alone)


@pytest.mark.parametrize(
    ("shape", "dtype", "method", "steps"),
    [((24, 40), torch.bfloat16, "auto", 2), ((3, 16, 8), torch.float32, "gram", 4)],
)
def test_compiles_into_one_graph(
    shape: tuple[int, ...], dtype: torch.dtype, method: str, steps: int
) -> None:
    """Tracing is what can fail; a backend that generates code would take long."""
    X = torch.randn(shape)
    compute = partial(orthogonalize, method=method, dtype=dtype, steps=steps)
    compiled = torch.compile(compute, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), compute(X), rtol=1e-4, atol=1e-5)


# --- What they cost -------------------------------------------------------------------------


def counted(X: Tensor, form: Form, schedule: Schedule = JORDAN) -> int:
    with FlopCounterMode(display=False) as counter:
        orthogonalize_with_schedule(X, schedule, method=form, dtype=torch.float32)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", [(8, 8), (6, 22), (22, 6), (1, 7), (0, 4)])
def test_flops_are_what_torch_counts(form: Form, shape: tuple[int, int]) -> None:
    flops = form_flops(form, *shape, len(JORDAN))
    assert flops == form_flops(form, *shape[::-1], len(JORDAN))
    assert flops == counted(torch.randn(shape), form)
    assert 3 * flops == counted(torch.randn(3, *shape), form)


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_flops_of_few_steps_are_what_torch_counts(num_steps: int) -> None:
    for form in (Form(), replace(GRAM, restarts=()), replace(GRAM, restarts=(1,))):
        if all(step < num_steps for step in form.restarts):
            flops = form_flops(form, 4, 9, num_steps)
            assert flops == counted(torch.randn(4, 9), form, JORDAN[:num_steps])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(128, 640), (640, 128), (96, 96), (512, 512)])
def test_plan_counts_the_flops_of_the_step(shape: tuple[int, int], dtype: str, method: str) -> None:
    work = Orthogonalization(
        coefficients=JORDAN, method=method, eps=1e-7, dtype=dtype, device_type="cpu"
    )
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(shape), method=method, dtype=getattr(torch, dtype))
    box = tuple((0, length) for length in shape)
    assert work.flops(MatrixBox(box, *shape)) == counter.get_total_flops()


@given(st.integers(0, 50), st.integers(1, 9))
def test_panels_cover_all_columns_evenly(n: int, num_panels: int) -> None:
    bounds = panel_bounds(n, num_panels)
    assert [column for a, b in bounds for column in range(a, b)] == list(range(n))
    assert len(bounds) == min(n, num_panels)
    widths = [b - a for a, b in bounds]
    assert max(widths, default=0) - min(widths, default=0) <= 1


# --- Where they are chosen ------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4096, 4096), (512, 4096), (16, 999), (1, 1), (1024, 4096)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_auto_takes_the_standard_form_in_half_precision_on_a_cpu(
    shape: tuple[int, int], dtype: str
) -> None:
    num_panels = 2 if shape == (1024, 4096) and dtype == "bfloat16" else 1
    assert replace(chosen(shape, dtype), batched=True) == Form(num_panels=num_panels)


def test_auto_takes_the_gram_form_of_wide_and_tall_float32_matrices() -> None:
    for shape in [(1024, 4096), (4096, 1024), (512, 4096)]:
        form = chosen(shape, "float32")
        assert str(form) == "gram[2,4] in float32, 4 panels"
        assert form == chosen(shape[::-1], "float32")
    assert str(chosen((1024, 1024), "float32")) == "standard, 4 panels"
    assert str(chosen((64, 1024), "float32")) == "standard"


def test_auto_on_a_gpu_has_no_chain_in_bfloat16_or_in_another_dtype() -> None:
    shapes = [(n, ratio * n) for n in (16, 128, 1024, 8192) for ratio in (1, 2, 4, 16)]
    for shape, dtype in itertools.product(shapes, ("bfloat16", "float16", "float32", "float64")):
        form = chosen(shape, dtype, "cuda")
        assert form.num_panels == 1
        assert form.batched
        assert form.chain_dtype in (None, dtype)
        assert form.chain_dtype != "bfloat16"
        if shape[1] < 2 * shape[0]:
            assert form.kind == "standard"
    assert str(chosen((1024, 4096), "float16", "cuda")) == "gram[2,4] in float16"


def test_auto_takes_the_gram_form_only_where_it_saves_work() -> None:
    for name, schedule in PRESETS.items():
        for n, ratio in itertools.product((128, 512, 1000), (1, 1.5, 2, 3, 4, 8, 32)):
            shape = (n, int(ratio * n))
            options = {"dtype": "float32", "device_type": "cpu"}
            auto, standard = (
                form_flops(
                    choose_form(*shape, schedule, method=method, **options), *shape, len(schedule)
                )
                for method in ("auto", "standard")
            )
            assert auto <= standard, name


@pytest.mark.parametrize(
    ("dtype", "device_type", "chain_dtype"),
    [
        ("bfloat16", "cpu", "float32"),
        ("float16", "cpu", "float32"),
        ("float32", "cpu", "float32"),
        ("float64", "cpu", "float64"),
        ("bfloat16", "cuda", "float32"),
        ("float16", "cuda", "float16"),
    ],
)
def test_chain_of_an_explicit_gram_form(dtype: str, device_type: str, chain_dtype: str) -> None:
    form = chosen((256, 256), dtype, device_type, method="gram")
    assert (form.kind, form.chain_dtype) == ("gram", chain_dtype)


def test_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="method: expected one of 'auto', 'standard', 'gram'"):
        chosen((4, 4), "float32", method="fast")


# --- Restarts -------------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=8), st.floats(5, 20))
def test_restarts_are_as_few_and_as_even_as_the_bound_allows(
    growth: list[float], bound: float
) -> None:
    schedule = tuple((math.exp(number / 2), 0.0, 0.0) for number in growth)
    largest = {
        cuts: max(sum(growth[a:b]) for a, b in itertools.pairwise([0, *cuts, len(growth)]))
        for num_cuts in range(len(growth))
        for cuts in itertools.combinations(range(1, len(growth)), num_cuts)
    }
    cuts = restart_steps(schedule, bound + 1e-6)
    assert largest[cuts] <= bound + 1e-5
    for other in largest:
        assert len(other) >= len(cuts) or largest[other] > bound
        assert len(other) != len(cuts) or largest[other] > largest[cuts] - 1e-6


def test_a_step_too_steep_for_the_bound_restarts_at_every_step() -> None:
    assert restart_steps(((100.0, 1.0, 1.0),) * 4, 1.0) == (1, 2, 3)
    assert restart_steps(((0.5, 1.0, 1.0),) * 4, 1.0) == ()
