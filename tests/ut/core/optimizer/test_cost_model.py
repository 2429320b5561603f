# SPDX-License-Identifier: Apache-2.0
"""Operations and bytes, against torch's own count of them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hyper_parallel.core.optimizer.cost_model import (
    ACCELERATOR,
    CPU,
    ITEMSIZE,
    Hardware,
    newton_schulz_flops,
    sharing_pays,
)


@pytest.mark.parametrize("num_steps", [0, 1, 5])
@pytest.mark.parametrize("shape", [(8, 8), (4, 12), (12, 4), (1, 7)])
def test_newton_schulz_flops_are_what_torch_counts(shape: tuple[int, int], num_steps: int) -> None:
    X = torch.randn(shape)
    X = X.mT if shape[0] > shape[1] else X
    with FlopCounterMode(display=False) as counter:
        for _ in range(num_steps):
            A = X @ X.mT
            X = X + (A + A @ A) @ X
    assert newton_schulz_flops(*shape, num_steps) == counter.get_total_flops()


def test_newton_schulz_flops_do_not_depend_on_orientation() -> None:
    assert newton_schulz_flops(64, 256, 5) == newton_schulz_flops(256, 64, 5)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_newton_schulz_flops_of_nothing_are_none(shape: tuple[int, int]) -> None:
    assert newton_schulz_flops(*shape, 5) == 0


@pytest.mark.parametrize("name", sorted(ITEMSIZE))
def test_itemsize_is_torchs(name: str) -> None:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    assert ITEMSIZE[name] == dtype.itemsize


@pytest.mark.parametrize("hardware", [CPU, ACCELERATOR])
def test_sharing_pays_wherever_the_parameter_is_sharded(hardware: Hardware) -> None:
    """Each rank receives its part of the update either way."""
    assert sharing_pays(1, 1 << 40, 2, hardware)


def test_sharing_pays_when_computing_takes_longer_than_sending() -> None:
    hardware = Hardware(matmul_flops_per_s=100.0, link_bytes_per_s=10.0)
    assert sharing_pays(101, 10, 1, hardware)
    assert not sharing_pays(99, 10, 1, hardware)


@pytest.mark.parametrize("hardware", [CPU, ACCELERATOR])
def test_sharing_pays_from_some_size_on(hardware: Hardware) -> None:
    """Work grows with the cube of the width, the message with its square."""
    verdicts = [
        sharing_pays(newton_schulz_flops(d, d, 5), 2 * d * d, 1, hardware)
        for d in (2**i for i in range(14))
    ]
    assert verdicts == sorted(verdicts)
    assert set(verdicts) == {False, True}
