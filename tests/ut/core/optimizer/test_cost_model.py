# SPDX-License-Identifier: Apache-2.0
"""Bytes of an element, whether sharing pays, and seconds of Newton-Schulz."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.optimizer.cost_model import (
    ACCELERATOR,
    CPU,
    ITEMSIZE,
    Rates,
    orthogonalize_seconds,
    products_of,
    sharing_pays,
)
from hyper_parallel.core.optimizer.forms import Form, form_flops
from hyper_parallel.core.optimizer.hardware import Hardware
from hyper_parallel.core.optimizer.hardware_presets import PRESETS


@pytest.mark.parametrize("name", sorted(ITEMSIZE))
def test_itemsize_is_torchs(name: str) -> None:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    assert ITEMSIZE[name] == dtype.itemsize


@pytest.mark.parametrize("rates", [CPU, ACCELERATOR])
def test_sharing_pays_wherever_the_parameter_is_sharded(rates: Rates) -> None:
    """Each rank receives its part of the update either way."""
    assert sharing_pays(1, 1 << 40, 2, rates)


def test_sharing_pays_when_computing_takes_longer_than_sending() -> None:
    rates = Rates(matmul_flops_per_s=100.0, link_bytes_per_s=10.0)
    assert sharing_pays(101, 10, 1, rates)
    assert not sharing_pays(99, 10, 1, rates)


@pytest.mark.parametrize("rates", [CPU, ACCELERATOR])
def test_sharing_pays_from_some_size_on(rates: Rates) -> None:
    """Work grows with the cube of the width, the message with its square."""
    verdicts = [sharing_pays(30 * d**3, 2 * d * d, 1, rates) for d in (2**i for i in range(14))]
    assert verdicts == sorted(verdicts)
    assert set(verdicts) == {False, True}


@given(
    rows=st.integers(1, 300),
    cols=st.integers(1, 300),
    num_steps=st.integers(1, 8),
    form=st.sampled_from(
        [
            Form(),
            Form(num_panels=4),
            Form(kind="gram", chain_dtype="float32"),
            Form(kind="gram", chain_dtype="float32", restarts=(1,), num_panels=2),
        ]
    ),
)
def test_products_are_all_the_work_of_a_form(
    rows: int, cols: int, num_steps: int, form: Form
) -> None:
    num_steps = max(num_steps, len(form.restarts) + 1)
    products = products_of(form, rows, cols, num_steps=num_steps, dtype="bfloat16")
    assert sum(p.flops for p in products) == form_flops(form, rows, cols, num_steps)


def seconds(rows: int, cols: int, *, count: int = 1, hardware: Hardware = PRESETS["h100"]) -> float:
    return orthogonalize_seconds(
        Form(), (rows, cols), hardware, num_steps=5, dtype="bfloat16", count=count
    )


def test_large_matrices_come_near_the_peak_and_small_ones_do_not() -> None:
    peak = PRESETS["h100"].matrix_rates["bfloat16"].peak_flops_per_s
    shares = [form_flops(Form(), n, n, 5) / seconds(n, n) / peak for n in (64, 512, 4096, 32768)]
    assert shares == sorted(shares)
    assert shares[0] < 0.02
    assert 0.5 < shares[2] < 0.9
    assert 0.9 < shares[3] < 1


def test_a_batch_is_faster_than_its_matrices_on_a_device_but_not_on_a_core() -> None:
    assert seconds(256, 256, count=64) < 0.3 * 64 * seconds(256, 256)
    cpu = PRESETS["cpu"]
    assert seconds(256, 256, count=64, hardware=cpu) > 0.9 * 64 * seconds(256, 256, hardware=cpu)


def test_nothing_takes_no_time() -> None:
    assert seconds(0, 64) == seconds(64, 64, count=0) == 0
