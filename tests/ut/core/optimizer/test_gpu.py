# SPDX-License-Identifier: Apache-2.0
"""The same steps on a CUDA device as on the CPU. Run by ``make gpu`` on a machine that has one."""

import pytest
import torch
from torch import nn

from hyper_parallel import Muon, orthogonalize
from hyper_parallel.core.optimizer.forms import QUACK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def stepped(device: str, ns_dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((16, 8), (8, 32), (3, 8, 6), (1, 7))
    params = [nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in shapes]
    bias = nn.Parameter(torch.randn(8, generator=generator).to(device))
    optimizer = Muon(
        [{"params": params}, {"params": [bias], "algorithm": "adamw"}], lr=0.05, ns_dtype=ns_dtype
    )
    for _ in range(3):
        for p in [*params, bias]:
            p.grad = torch.randn(p.shape, generator=generator).to(device)
        optimizer.step()
    return [p.detach().cpu() for p in [*params, bias]]


@pytest.mark.parametrize(
    ("ns_dtype", "tolerance"),
    [(torch.float64, 1e-5), (torch.float32, 1e-3), (torch.bfloat16, 3e-2)],
    ids=str,
)
def test_a_cuda_device_gives_what_the_cpu_gives(ns_dtype: torch.dtype, tolerance: float) -> None:
    for mine, due in zip(stepped("cuda", ns_dtype), stepped("cpu", ns_dtype), strict=True):
        torch.testing.assert_close(mine, due, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(512, 2048), (2048, 512), (4, 512, 512)])
def test_symmetric_kernels_give_what_products_of_torch_give(shape: tuple[int, ...]) -> None:
    pytest.importorskip("quack")
    X = torch.randn(shape, device="cuda").bfloat16()
    mine, due = orthogonalize(X, method=QUACK), orthogonalize(X, method="standard")
    torch.testing.assert_close(mine, due, rtol=0.05, atol=0.02)


def test_a_learning_rate_on_the_device_is_heard() -> None:
    weight = nn.Parameter(torch.ones(4, 8, device="cuda"))
    optimizer = Muon([weight], lr=torch.tensor(0.0, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert torch.equal(weight.cpu(), torch.ones(4, 8))
    optimizer.param_groups[0]["lr"].fill_(0.1)
    optimizer.step()
    assert not torch.equal(weight.cpu(), torch.ones(4, 8))
