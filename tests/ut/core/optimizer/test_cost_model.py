# SPDX-License-Identifier: Apache-2.0
"""Bytes of an element, and whether sharing pays."""

import pytest
import torch

from hyper_parallel.core.optimizer.cost_model import (
    ACCELERATOR,
    CPU,
    ITEMSIZE,
    Rates,
    sharing_pays,
)


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
