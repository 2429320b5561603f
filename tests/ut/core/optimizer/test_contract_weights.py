# SPDX-License-Identifier: Apache-2.0
"""Which way weights go (``maximize``), and how they are rounded (``weight_rounding``)."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from hyper_parallel import Muon
from hyper_parallel.core.optimizer import export_state, import_state
from hyper_parallel.core.optimizer.weight_rounding import RESIDUAL, unrounded

SMALL_LR = 1e-5
"""Updates of it are below half the spacing of bfloat16 weights near 1, many times over."""


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    matrix = torch.rand(8, 6) + 0.5
    return [nn.Parameter(t.to(dtype)) for t in (matrix, torch.ones(6))]


def mixed(params: list[nn.Parameter], **settings: Any) -> Muon:
    adamw: dict[str, Any] = {"params": params[1:], "algorithm": "adamw"}
    groups: list[dict[str, Any]] = [{"params": params[:1]}, adamw]
    return Muon(groups, **{"lr": SMALL_LR, "weight_decay": 0.0, **settings})


def step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        # Half of each gradient stays the same, so that weights go somewhere.
        noise = torch.randn(p.shape, generator=generator)
        p.grad = (torch.linspace(-1, 1, p.numel()).view(p.shape) + 0.5 * noise).to(p.dtype)
    optimizer.step()


# --- Maximize -------------------------------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adamw_groups_maximize_as_torch_does(amsgrad: bool) -> None:
    ours, theirs = parameters(), parameters()
    given: ParamsT = theirs
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    group = {"params": ours, "algorithm": "adamw", "amsgrad": amsgrad}
    optimizer = Muon([group], maximize=True, **settings)
    other = torch.optim.AdamW(given, maximize=True, amsgrad=amsgrad, **settings)
    for seed in range(3):
        step(optimizer, ours, seed)
        step(other, theirs, seed)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_maximizes_what_it_would_minimize_with_the_other_sign(nesterov: bool) -> None:
    """Newton-Schulz is odd: up along ``g`` is down along ``-g``, momentum included."""
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "nesterov": nesterov}
    p, q = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(6, 4))
    up, down = Muon([{"params": [p], "maximize": True}], **settings), Muon([q], **settings)
    for _ in range(3):
        grad = torch.randn(6, 4)
        p.grad, q.grad = grad.clone(), -grad
        up.step()
        down.step()
        assert torch.equal(p.grad, grad), "the gradient was modified"
    assert torch.equal(p, q)
    assert torch.equal(up.state[p]["momentum_buffer"], down.state[q]["momentum_buffer"])


def test_maximize_raises_and_minimize_lowers() -> None:
    target = torch.randn(6, 4)
    for maximize in (False, True):
        params = [nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(4))]
        optimizer = mixed(params, lr=0.01, maximize=maximize)
        values = []
        for _ in range(5):
            optimizer.zero_grad()
            value = (params[0] * target).sum() + params[1].sum()
            value.backward()
            values.append(value.item())
            optimizer.step()
        assert values == sorted(values, reverse=not maximize)
        assert values[0] != values[-1]


def test_a_groups_own_direction_has_the_last_word() -> None:
    p, q = parameters()
    optimizer = Muon(
        [{"params": [p], "maximize": False}, {"params": [q], "algorithm": "adamw"}], maximize=True
    )
    assert [group["maximize"] for group in optimizer.param_groups] == [False, True]


# --- Rounding -------------------------------------------------------------------------------


def followed(dtype: torch.dtype, steps: int, **settings: Any) -> tuple[list[float], list[Tensor]]:
    """How far each weight is from a float32 run, relative to that run's way."""
    wide, params = parameters(), parameters(dtype)
    for p, w in zip(params, wide, strict=True):
        w.data.copy_(p)  # the same start
    start = [w.detach().clone() for w in wide]
    reference = mixed(wide, ns_dtype=torch.float32)
    optimizer = mixed(params, ns_dtype=torch.float32, momentum_dtype=torch.float32, **settings)
    for seed in range(steps):
        step(optimizer, params, seed)
        for p, w in zip(params, wide, strict=True):
            assert p.grad is not None
            w.grad = p.grad.float()
        reference.step()
    wholes = [
        p.detach().float() + optimizer.state[p].get(RESIDUAL, torch.zeros_like(p)).float()
        for p in params
    ]
    errors = [
        ((whole - w).norm() / (w - s).norm()).item()
        for whole, w, s in zip(wholes, wide, start, strict=True)
    ]
    return errors, [p.detach() for p in params]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compensated_weights_follow_the_float32_run_where_plain_ones_stand_still(
    dtype: torch.dtype,
) -> None:
    """A32: 100 updates below half a spacing, Muon's and AdamW's."""
    start = [p.detach() for p in parameters(dtype)]
    lost, still = followed(dtype, 100)
    kept, moved = followed(dtype, 100, weight_rounding="compensated")
    if dtype == torch.bfloat16:
        assert all(torch.equal(a, b) for a, b in zip(still, start, strict=True))
        assert lost == pytest.approx([1.0, 1.0])
    assert max(kept) < 0.05, kept
    assert max(kept) < 0.1 * min(lost)
    del moved


def test_compensated_weights_cross_to_the_next_number() -> None:
    """A32: the residual is worth something in the end: the weights themselves move."""
    _, moved = followed(torch.bfloat16, 60, weight_rounding="compensated", lr=3e-4)
    _, still = followed(torch.bfloat16, 60, lr=3e-5)
    start = parameters(torch.bfloat16)
    assert not torch.equal(moved[0], start[0])
    assert not torch.equal(moved[1], start[1])
    del still


def test_wide_weights_keep_no_residual_and_no_other_bits() -> None:
    wide, plain = parameters(), parameters()
    optimizer = mixed(wide, weight_rounding="compensated")
    other = mixed(plain)
    for seed in range(3):
        step(optimizer, wide, seed)
        step(other, plain, seed)
    assert all(torch.equal(p, q) for p, q in zip(wide, plain, strict=True))
    assert not any(RESIDUAL in state for state in optimizer.state.values())


def test_weights_that_somebody_else_writes_are_not_overwritten() -> None:
    """A master copy would bring the old weights back after a model checkpoint is loaded."""
    params = parameters(torch.bfloat16)
    optimizer = mixed(params, weight_rounding="compensated", lr=1e-3)
    for seed in range(3):
        step(optimizer, params, seed)
    tiny = [torch.full_like(p, 1e-6) for p in params]
    for p, value in zip(params, tiny, strict=True):
        p.data.copy_(value)
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert all(torch.equal(p, t) for p, t in zip(params, tiny, strict=True))


def test_a_residual_is_within_half_a_spacing_of_its_weight() -> None:
    weight = torch.tensor([1.0, -3.0, 1e-3, 0.0]).bfloat16()
    residual = torch.zeros_like(weight)
    due = weight.double()
    for step_size in torch.linspace(-3e-3, 3e-3, 64):
        with unrounded([weight], [residual]) as wide:
            wide[0].add_(step_size)
        due += step_size.double()
        assert (residual.float().abs() <= weight.float().abs() * 2.0**-8).all()
    torch.testing.assert_close((weight.double() + residual.double()), due, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("late", [False, True])
def test_state_of_compensated_weights_survives_a_load(late: bool) -> None:
    """D03: residuals keep their dtype, AdamW's moments float32, and the run goes on."""
    params = parameters(torch.bfloat16)
    optimizer = mixed(params, weight_rounding="nearest" if late else "compensated")
    for group in optimizer.param_groups:
        group["weight_rounding"] = "compensated"
    for seed in range(3):
        step(optimizer, params, seed)
    copied = [nn.Parameter(p.detach().clone()) for p in params]
    other = mixed(copied)
    saved = copy.deepcopy(optimizer.state_dict())
    assert {key for state in saved["state"].values() for key in state} == {
        "momentum_buffer",
        "exp_avg",
        "exp_avg_sq",
        "step",
        RESIDUAL,
    }
    other.load_state_dict(saved)
    for p, q in zip(params, copied, strict=True):
        for key, value in optimizer.state[p].items():
            assert other.state[q][key].dtype == value.dtype
            assert torch.equal(other.state[q][key], value)
    assert optimizer.state[params[1]]["exp_avg_sq"].dtype == torch.float32
    for seed in range(3, 6):
        step(optimizer, params, seed)
        step(other, copied, seed)
    assert all(torch.equal(p, q) for p, q in zip(params, copied, strict=True))


def test_residuals_go_to_another_muon_and_not_to_torch() -> None:
    """D12: torch's optimizers round to the nearest, and know no such state."""
    matrix, vector = parameters(torch.bfloat16)
    groups: list[dict[str, Any]] = [
        {"params": [("matrix", matrix)]},
        {"params": [("vector", vector)], "algorithm": "adamw"},
    ]
    optimizer = Muon(groups, lr=SMALL_LR, weight_rounding="compensated")
    step(optimizer, [matrix, vector], 0)
    saved = optimizer.state_dict()
    imported = import_state(saved, saved)
    for key, state in saved["state"].items():
        assert torch.equal(imported["state"][key][RESIDUAL], state[RESIDUAL])
    for algorithm in ("muon", "adamw"):
        exported = export_state(saved, algorithm)
        assert not any(RESIDUAL in state for state in exported["state"].values())


def test_a_residual_is_dropped_when_it_is_no_longer_wanted() -> None:
    params = parameters(torch.bfloat16)
    optimizer = mixed(params, weight_rounding="compensated")
    step(optimizer, params, 0)
    for group in optimizer.param_groups:
        group["weight_rounding"] = "nearest"
    step(optimizer, params, 1)
    assert not any(RESIDUAL in state for state in optimizer.state.values())
