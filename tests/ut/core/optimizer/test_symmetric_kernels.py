# SPDX-License-Identifier: Apache-2.0
"""Kernels of a package: asked for, seen in the plan, refused where they cannot run.

The package itself needs a GPU, so here a product of torch's takes the place of its kernel; the real
one runs in ``test_gpu.py``.
"""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from hyper_parallel import Muon, orthogonalize
from hyper_parallel.core.optimizer import symmetric_kernels
from hyper_parallel.core.optimizer.coefficients import PRESETS
from hyper_parallel.core.optimizer.forms import QUACK, Form, choose_form, form_flops
from hyper_parallel.core.optimizer.polar import orthogonalize_with_schedule
from hyper_parallel.core.optimizer.symmetric_kernels import check_kernels

JORDAN = PRESETS["jordan"]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Shapes that the kernel was called with; it refuses what the real one does."""
    called: list[tuple[int, ...]] = []

    def gemm_symmetric(
        A: Tensor, B: Tensor, C: Tensor | None, out: Tensor, alpha: float, beta: float
    ) -> None:
        assert A.dtype == B.dtype == out.dtype == torch.bfloat16
        assert A.is_contiguous()
        called.append(tuple(A.shape))
        whole = alpha * (A.float() @ B.float())
        whole = whole if C is None else whole + beta * C.float()
        out.copy_(whole.tril() + whole.tril(-1).mT)

    module = ModuleType("quack.gemm_interface")
    module.gemm_symmetric = gemm_symmetric  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", module)
    symmetric_kernels._kernel.cache_clear()
    yield called
    symmetric_kernels._kernel.cache_clear()


def form_of(*shape: int, method: str = QUACK) -> Form:
    return choose_form(*shape, JORDAN, method=method, dtype="bfloat16", device_type="cuda")


@pytest.mark.parametrize("shape", [(256, 320), (320, 256), (2, 256, 264)])
def test_both_symmetric_products_of_a_step_are_the_kernels(
    shape: tuple[int, ...], products: list[tuple[int, ...]]
) -> None:
    X = torch.randn(shape).bfloat16()
    form = form_of(*shape[-2:])
    result = orthogonalize_with_schedule(X, JORDAN, method=form)
    n, m = min(shape[-2:]), max(shape[-2:])
    assert products == [(*shape[:-2], n, m), (*shape[:-2], n, n)] * len(JORDAN)
    torch.testing.assert_close(result, orthogonalize(X), rtol=0.05, atol=0.02)


def test_kernels_are_taken_only_if_asked_for_and_where_they_fit() -> None:
    assert form_of(512, 2048).kernels == "quack"
    assert str(form_of(512, 2048)) == "standard, kernels of quack"
    for method in ("auto", "standard", "gram"):
        assert form_of(512, 2048, method=method).kernels is None
    for shape in ((128, 2048), (512, 2044), (516, 2048)):  # few rows, or rows that are not aligned
        assert form_of(*shape) == form_of(*shape, method="standard")
    assert form_flops(form_of(512, 2048), 512, 2048, 5) == form_flops(Form(), 512, 2048, 5)


@pytest.mark.parametrize(
    ("dtype", "device_type", "message"),
    [
        ("float32", "cuda", "needs an iteration in bfloat16 or float16, got float32"),
        ("bfloat16", "cpu", "needs matrices on a CUDA device, got cpu"),
    ],
)
def test_kernels_that_cannot_run_are_refused(dtype: str, device_type: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_kernels(QUACK, dtype=dtype, device_type=device_type)


@pytest.mark.parametrize(
    ("capability", "message"),
    [
        ((8, 0), r"compute capability 9 or 10 \(Hopper, Blackwell\), got 8.0"),
        ((9, 0), r"the package quack-kernels: pip install 'hyper-parallel\[kernels\]'"),
    ],
)
def test_a_device_or_a_package_that_is_not_there_is_named(
    capability: tuple[int, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(symmetric_kernels, "find_spec", lambda _name: None)
    with pytest.raises(ValueError, match=message):
        check_kernels(QUACK, dtype="bfloat16", device_type="cuda")


def test_an_optimizer_and_the_function_refuse_them_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="needs matrices on a CUDA device, got cpu"):
        Muon([nn.Parameter(torch.randn(8, 8))], ns_method=QUACK)
    with pytest.raises(ValueError, match="needs matrices on a CUDA device, got cpu"):
        orthogonalize(torch.randn(8, 8), method=QUACK)
