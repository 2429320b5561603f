# SPDX-License-Identifier: Apache-2.0
"""Momentum, learning-rate scale, decay and update against their formulas, on local tensors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hyper_parallel.core.optimizer.update_rule import (
    ADJUST_LR_FNS,
    commit_momentum,
    commit_update,
    directions,
    lr_ratio,
)

HALF = [torch.bfloat16, torch.float16]
DTYPES = [*HALF, torch.float32, torch.float64]
PAIRS = [(g, m) for g in (torch.bfloat16, torch.float32) for m in (torch.bfloat16, torch.float32)]


def same_bits(left: Tensor, right: Tensor) -> bool:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.itemsize]
    return left.dtype == right.dtype and torch.equal(left.view(integer), right.view(integer))


# --- Learning-rate scale --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adjust_lr_fn", "rows", "cols", "expected"),
    [
        (None, 4, 16, 1.0),
        (None, 16, 4, 2.0),
        (None, 8, 8, 1.0),
        ("original", 4, 16, 1.0),
        ("original", 16, 4, 2.0),
        ("original", 8, 8, 1.0),
        ("match_rms_adamw", 4, 16, 0.8),
        ("match_rms_adamw", 16, 4, 0.8),
        ("match_rms_adamw", 8, 8, 0.2 * math.sqrt(8)),
        ("spectral", 4, 16, 0.5),
        ("spectral", 16, 4, 2.0),
        ("spectral", 8, 8, 1.0),
        ("original", 1, 9, 1.0),
        ("original", 9, 1, 3.0),
        ("spectral", 1, 9, 1 / 3),
        ("match_rms_adamw", 1, 1, 0.2),
    ],
)
def test_lr_ratio_is_exactly_one_rule(
    adjust_lr_fn: str | None, rows: int, cols: int, expected: float
) -> None:
    """A18: two scales were multiplied, or rows and columns were exchanged."""
    assert lr_ratio(adjust_lr_fn, rows, cols) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(4, 16), (16, 4), (8, 8), (1, 9), (9, 1)])
def test_lr_ratio_is_that_of_torch(adjust_lr_fn: str | None, shape: tuple[int, int]) -> None:
    """Measured, not read: what torch's step moves a weight by, over its own update."""
    gradient = torch.randn(shape)
    moved = []
    for fn in (adjust_lr_fn, "original"):
        weight = torch.nn.Parameter(torch.zeros(shape))
        optimizer = torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, adjust_lr_fn=fn)
        weight.grad = gradient
        optimizer.step()
        moved.append(weight.detach().norm())
    expected = lr_ratio(adjust_lr_fn, *shape) / lr_ratio("original", *shape)
    assert float(moved[0] / moved[1]) == pytest.approx(expected, rel=1e-3)


def test_lr_ratio_has_a_rule_for_every_name() -> None:
    values = {name: lr_ratio(name, 3, 12) for name in ADJUST_LR_FNS}
    assert len(set(values.values())) == len(ADJUST_LR_FNS)


# --- Directions -----------------------------------------------------------------------------


@given(
    momentum=st.floats(0, 1),
    nesterov=st.booleans(),
    grad=st.floats(-10, 10),
    buffer=st.floats(-10, 10),
)
def test_directions_follow_the_two_step_formula(
    momentum: float, nesterov: bool, grad: float, buffer: float
) -> None:
    """[Note: a step is pure until it commits]: one interpolation of the old momentum."""
    g, m = (torch.tensor([[value]], dtype=torch.float64) for value in (grad, buffer))
    after = m + (1 - momentum) * (g - m)
    expected = g + momentum * (after - g) if nesterov else after
    (direction,) = directions([g], [m], momentum=momentum, nesterov=nesterov)
    torch.testing.assert_close(direction, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nesterov", [True, False])
def test_directions_of_no_momentum_is_the_gradient(nesterov: bool) -> None:
    g, m = torch.randn(4, 8), torch.randn(4, 8)
    (direction,) = directions([g], [m], momentum=0.0, nesterov=nesterov)
    assert same_bits(direction, g)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9, 1.0])
@pytest.mark.parametrize(("grad_dtype", "buffer_dtype"), PAIRS)
def test_directions_are_new_tensors_in_the_wider_dtype(
    grad_dtype: torch.dtype, buffer_dtype: torch.dtype, momentum: float, nesterov: bool
) -> None:
    """C18, E06: neither the gradient nor the momentum is written to, or aliased."""
    g = torch.randn(4, 8).to(grad_dtype)
    m = torch.randn(4, 8).to(buffer_dtype)
    kept = g.clone(), m.clone()
    (direction,) = directions([g], [m], momentum=momentum, nesterov=nesterov)
    assert direction.dtype == torch.promote_types(grad_dtype, buffer_dtype)
    direction.fill_(7)
    assert same_bits(g, kept[0])
    assert same_bits(m, kept[1])


def test_directions_are_independent_of_what_stands_beside_them() -> None:
    grads = [torch.randn(4, 8), torch.full((2, 3), math.nan), torch.randn(8, 4)]
    buffers = [torch.randn(4, 8), torch.zeros(2, 3), torch.randn(8, 4)]
    together = directions(grads, buffers, momentum=0.9, nesterov=True)
    for i, direction in enumerate(together):
        (alone,) = directions([grads[i]], [buffers[i]], momentum=0.9, nesterov=True)
        assert same_bits(direction, alone)


def test_directions_of_nothing_are_nothing() -> None:
    assert directions([], [], momentum=0.9, nesterov=True) == []


def test_directions_take_views_and_zero_sizes() -> None:
    whole = torch.randn(4, 8)
    (direction,) = directions([whole[:, 2:5]], [torch.zeros(4, 3)], momentum=0.5, nesterov=False)
    torch.testing.assert_close(direction, whole[:, 2:5] * 0.5)
    (empty,) = directions([whole[:0]], [whole[:0]], momentum=0.5, nesterov=True)
    assert empty.shape == (0, 8)


# --- Momentum -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.95, 1.0])
def test_commit_momentum_is_lerp_bit_for_bit(dtype: torch.dtype, momentum: float) -> None:
    """The buffer of ``torch.optim.Muon`` is ``lerp(g, 1 - momentum)``; ours has its bits."""
    g, m = torch.randn(16, 40).to(dtype), torch.randn(16, 40).to(dtype)
    kept, expected = g.clone(), torch.lerp(m, g, 1 - momentum)
    commit_momentum([g], [m], momentum=momentum)
    assert same_bits(m, expected)
    assert same_bits(g, kept)


@pytest.mark.parametrize(("grad_dtype", "buffer_dtype"), PAIRS)
def test_commit_momentum_keeps_the_dtype_of_the_buffer(
    grad_dtype: torch.dtype, buffer_dtype: torch.dtype
) -> None:
    """C18: ``lerp_`` refuses mixed dtypes."""
    g = torch.randn(4, 8).to(grad_dtype)
    m = torch.randn(4, 8).to(buffer_dtype)
    wide = torch.promote_types(grad_dtype, buffer_dtype)
    expected = torch.lerp(m.to(wide), g.to(wide), 1 - 0.9).to(buffer_dtype)
    commit_momentum([g], [m], momentum=0.9)
    assert same_bits(m, expected)


def test_commit_momentum_takes_mixed_lists_and_views() -> None:
    grads = [torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2)]
    whole = torch.zeros(4, 4)
    buffers = [whole[:2, 1:3], torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bfloat16)]
    commit_momentum(grads, buffers, momentum=0.5)
    assert all(torch.equal(b.float(), torch.full((2, 2), 0.5)) for b in buffers)
    assert whole.sum() == 2.0
    commit_momentum([], [], momentum=0.5)


@pytest.mark.parametrize("nesterov", [True, False])
def test_directions_come_from_the_momentum_that_commit_will_write(nesterov: bool) -> None:
    g, m = torch.randn(6, 7, dtype=torch.float64), torch.randn(6, 7, dtype=torch.float64)
    (direction,) = directions([g], [m], momentum=0.8, nesterov=nesterov)
    commit_momentum([g], [m], momentum=0.8)
    expected = torch.lerp(g, m, 0.8) if nesterov else m
    torch.testing.assert_close(direction, expected, rtol=1e-13, atol=1e-13)


# --- Decay and update -----------------------------------------------------------------------


def test_commit_update_decays_and_steps() -> None:
    p, u = torch.ones(2, 3), torch.full((2, 3), 4.0)
    commit_update([p], [u], decay=0.5, steps=[0.25])
    assert torch.equal(p, torch.full((2, 3), -0.5))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("update_dtype", [torch.bfloat16, torch.float32])
def test_commit_update_computes_half_precision_in_float32_and_rounds_once(
    dtype: torch.dtype, update_dtype: torch.dtype
) -> None:
    """A32: decay and update rounded one after the other differ in many entries."""
    p = torch.randn(64, 64).to(dtype)
    u = torch.randn(64, 64).to(update_dtype)
    exact = p.double() * 0.99 - 0.013 * u.double()
    twice = p.clone().mul_(0.99).sub_(0.013 * u)
    commit_update([p], [u], decay=0.99, steps=[0.013])
    assert p.dtype == dtype
    assert (p != exact.to(dtype)).float().mean() < 1e-3  # a float32 tie can round either way
    assert (twice != p).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("update_dtype", DTYPES)
def test_commit_update_takes_any_dtype_of_update(
    dtype: torch.dtype, update_dtype: torch.dtype
) -> None:
    p, u = torch.randn(5, 6, dtype=dtype), torch.randn(5, 6).to(update_dtype)
    expected = p.double() * 0.9 - 0.1 * u.double()
    commit_update([p], [u], decay=0.9, steps=[0.1])
    assert p.dtype == dtype
    torch.testing.assert_close(p.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_commit_update_takes_the_learning_rate_as_a_tensor(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """C27: what is exact in float32 is the same as a number and as a tensor."""
    p, u = torch.randn(5, 6).to(dtype), torch.randn(5, 6).to(torch.bfloat16)
    q = p.clone()
    commit_update([p], [u], decay=0.75, steps=[0.125])
    commit_update([q], [u], decay=torch.full(shape, 0.75), steps=[torch.full(shape, 0.125)])
    assert same_bits(p, q)


@pytest.mark.parametrize("dtype", DTYPES)
def test_commit_update_of_nothing_leaves_the_bits(dtype: torch.dtype) -> None:
    """C27: no learning rate, or no update, is a step that changes nothing."""
    p = torch.tensor([[1.5, 0.0, -3e-5, 3e4]]).to(dtype)
    kept = p.clone()
    commit_update([p], [torch.randn(1, 4)], decay=1.0, steps=[0.0])
    assert same_bits(p, kept)
    p[0, 1] = -0.0
    kept = p.clone()
    commit_update([p], [torch.zeros(1, 4)], decay=1.0, steps=[0.1])
    assert same_bits(p, kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_commit_update_writes_in_place_and_never_to_the_update(dtype: torch.dtype) -> None:
    whole = torch.ones(4, 6).to(dtype)
    u = torch.ones(2, 3).to(dtype)
    address = whole.data_ptr()
    commit_update([whole[1:3, 2:5]], [u], decay=1.0, steps=[1.0])
    assert whole.data_ptr() == address
    assert whole.sum() == 18
    assert u.sum() == 6


def test_commit_update_gives_every_piece_its_own_step() -> None:
    params = [torch.zeros(1, 2), torch.zeros(1, 2)]
    updates = [torch.full((1, 2), math.nan), torch.ones(1, 2)]
    commit_update(params, updates, decay=1.0, steps=[1.0, 2.0])
    assert params[0].isnan().all()
    assert torch.equal(params[1], torch.full((1, 2), -2.0))
    commit_update([], [], decay=1.0, steps=[])
