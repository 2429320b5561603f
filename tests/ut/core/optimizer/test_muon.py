# SPDX-License-Identifier: Apache-2.0
"""Muon on one process: what a step does to weights, momentum and gradients."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from hyper_parallel import Muon
from tests.reference import ReferenceMuon, matrices

SHAPES = [(16, 16), (24, 8), (8, 24), (1, 9), (9, 1)]
HALVES = (torch.bfloat16, torch.float32)
# Newton-Schulz in bfloat16, relative to the norm of all that the weights moved.
BF16 = 3e-2


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Matrices of a few rows gain nothing from threads, and wait for them on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def parameter(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> nn.Parameter:
    return nn.Parameter((scale * torch.randn(shape)).to(dtype))


def clones(params: Sequence[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


def values(params: Sequence[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def randn_like(params: Sequence[Tensor]) -> list[Tensor]:
    return [torch.randn_like(p) for p in params]


def give(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()


def grouped(params: Sequence[Tensor], **settings: Any) -> dict[str, Any]:
    return {"params": list(params), **settings}


def momentum_of(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    buffer: Tensor = optimizer.state[param]["momentum_buffer"]
    return buffer


def same_bits(left: Tensor, right: Tensor) -> bool:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.itemsize]
    a, b = left.detach().contiguous(), right.detach().contiguous()
    return a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))


def all_same_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(left, right, strict=True))


def error(actual: Tensor, expected: Tensor, start: Tensor) -> float:
    """How far a weight is from where it should be, relative to the way it should have gone."""
    a, e, s = (tensor.detach().double() for tensor in (actual, expected, start))
    return float((a - e).norm() / (e - s).norm().clamp(min=1e-30))


def step_with(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], *grads: Tensor) -> None:
    give(params, grads)
    optimizer.step()


# --- The same as torch.optim.Muon -----------------------------------------------------------


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("momentum", [0.0, 0.95])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_step_equals_torch_muon(
    nesterov: bool, adjust_lr_fn: str | None, momentum: float, weight_decay: float
) -> None:
    """A18: weights within bfloat16, momentum bit for bit."""
    settings: dict[str, Any] = {
        "lr": 0.02,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "nesterov": nesterov,
        "adjust_lr_fn": adjust_lr_fn,
    }
    ours = [parameter(*shape) for shape in SHAPES]
    theirs, start = clones(ours), values(ours)
    optimizers = Muon(ours, **settings), torch.optim.Muon(theirs, **settings)
    for _ in range(3):
        grads = randn_like(ours)
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            step_with(optimizer, params, *grads)
        for p, q in zip(ours, theirs, strict=True):
            assert same_bits(momentum_of(optimizers[0], p), momentum_of(optimizers[1], q))
    for p, q, s in zip(ours, theirs, start, strict=True):
        assert error(p, q, s) < BF16


@pytest.mark.parametrize("steps", [1, 7])
def test_step_equals_torch_muon_with_other_coefficients(steps: int) -> None:
    settings: dict[str, Any] = {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": steps}
    p = parameter(8, 16)
    (q,), start = clones([p]), p.detach().clone()
    grad = torch.randn(8, 16)
    step_with(Muon([p], lr=0.1, **settings), [p], grad)
    step_with(torch.optim.Muon([q], lr=0.1, **settings), [q], grad)
    assert error(p, q, start) < BF16


def test_momentum_of_bf16_is_not_overwritten_without_nesterov() -> None:
    """torch 2.13 with bf16 and no Nesterov: the buffer becomes its own normalised self.

    ``.bfloat16()`` of a bfloat16 tensor is the tensor, and ``div_`` then works in place. Seen as a
    buffer of norm 1. No oracle, so: the formula for momentum, the oracle for weights.
    """
    p = parameter(8, 16, dtype=torch.bfloat16, scale=0.01)
    reference = ReferenceMuon([p.detach().float()], lr=0.1, weight_decay=0.0, nesterov=False)
    optimizer = Muon([p], lr=0.1, weight_decay=0.0, nesterov=False)
    start, expected = p.detach().clone(), torch.zeros_like(p)
    for _ in range(3):
        grad = 20 * torch.randn_like(p)
        step_with(optimizer, [p], grad)
        reference.step([grad.float()])
        expected.lerp_(grad, 1 - 0.95)
        assert same_bits(momentum_of(optimizer, p), expected)
    assert float(expected.detach().norm()) > 5
    assert error(p, reference.params[0], start) < 2 * BF16


# --- The same as the oracle -----------------------------------------------------------------

VIEWED: list[tuple[tuple[int, ...], object]] = [
    ((16, 16), None),
    ((24, 8), None),
    ((8, 24), None),
    ((1, 9), None),
    ((9, 1), None),
    ((1, 1), None),
    ((3, 8, 6), None),
    ((2, 2, 5, 7), None),
    ((8, 1, 1), None),
    ((1, 8, 1), None),
    ((6, 4, 3, 3), "flatten"),
    ((4, 3, 2, 2, 2), "flatten"),
    ((12, 6), ("split", (4, 2, 6))),
    ((12, 6), ("heads", 3)),
    ((2, 12, 6), ("split", (9, 3))),
    ((2, 12, 6), ("heads", 4)),
]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw", "spectral"])
def test_step_equals_the_oracle(
    dtype: torch.dtype, bound: float, nesterov: bool, adjust_lr_fn: str | None
) -> None:
    """A14, A18, C06, C07: views, stacks, vectors and convolutions; scale by the matrix."""
    params = [parameter(*shape, dtype=dtype, scale=0.1) for shape, _ in VIEWED]
    start = values(params)
    groups = [{"params": [p], "matrix_view": v} for p, (_, v) in zip(params, VIEWED, strict=True)]
    settings: dict[str, Any] = {
        "lr": 0.1,
        "weight_decay": 0.3,
        "momentum": 0.9,
        "nesterov": nesterov,
        "adjust_lr_fn": adjust_lr_fn,
    }
    optimizer = Muon(groups, ns_dtype=dtype, **settings)
    reference = ReferenceMuon(values(params), views=[view for _, view in VIEWED], **settings)
    for _ in range(3):
        grads = randn_like(params)
        step_with(optimizer, params, *grads)
        reference.step(grads)
    for p, expected, m, s in zip(params, reference.params, reference.momenta, start, strict=True):
        assert error(p, expected, s) < bound, tuple(p.shape)
        torch.testing.assert_close(momentum_of(optimizer, p), m, rtol=1e-5, atol=1e-6)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    return (*batch, draw(st.integers(0, 7)), draw(st.integers(0, 7)))


@settings(max_examples=60)
@given(
    sizes=st.lists(shapes(), min_size=1, max_size=4),
    nesterov=st.booleans(),
    momentum=st.floats(0, 1),
    weight_decay=st.floats(0, 2),
    adjust_lr_fn=st.sampled_from([None, "original", "match_rms_adamw", "spectral"]),
    bucket_bytes=st.sampled_from([1, 100, 2**20]),
    missing=st.integers(0, 15),
)
def test_step_equals_the_oracle_for_any_parameters(
    sizes: list[tuple[int, ...]],
    nesterov: bool,
    momentum: float,
    weight_decay: float,
    adjust_lr_fn: str | None,
    bucket_bytes: int,
    missing: int,
) -> None:
    torch.manual_seed(0)
    params = [parameter(*shape, dtype=torch.float64) for shape in sizes]
    start = values(params)
    settings: dict[str, Any] = {
        "lr": 0.1,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "nesterov": nesterov,
        "adjust_lr_fn": adjust_lr_fn,
    }
    optimizer = Muon(params, ns_dtype=torch.float64, bucket_bytes=bucket_bytes, **settings)
    reference = ReferenceMuon(values(params), **settings)
    for number in range(2):
        grads: list[Tensor | None] = list(randn_like(params))
        if number:
            grads = [None if missing >> i & 1 else g for i, g in enumerate(grads)]
        give(params, grads)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        reference.step(grads)
    for p, expected, s in zip(params, reference.params, start, strict=True):
        if p.numel():
            assert error(p, expected, s) < 1e-9


def test_update_has_the_singular_values_of_an_orthogonalized_matrix() -> None:
    """A20: Muon was chosen and plain SGD ran, with a falling loss and no warning."""
    params = [parameter(*shape) for shape in [(12, 12), (8, 24), (24, 8), (3, 6, 10)]]
    start = values(params)
    optimizer = Muon(params, lr=1.0, weight_decay=0.0, adjust_lr_fn="original")
    for p, grad in zip(params, randn_like(params), strict=True):
        U, S, Vh = torch.linalg.svd(grad, full_matrices=False)
        p.grad = U @ torch.diag_embed(S.clamp(min=1)) @ Vh
    optimizer.step()
    for p, s in zip(params, start, strict=True):
        moved = (s - p.detach()) / math.sqrt(max(1, p.shape[-2] / p.shape[-1]))
        singular = torch.linalg.svdvals(moved)
        assert singular.min() > 0.6
        assert singular.max() < 1.3


@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (1, 1), (8, 1, 1), (1, 8, 1)])
def test_vectors_move_along_their_momentum(shape: tuple[int, ...]) -> None:
    """C06, C07: an update of norm 0.70, before the scale, in the direction of the momentum."""
    p = parameter(*shape)
    start, grad = p.detach().clone(), torch.randn(shape)
    optimizer = Muon([p], lr=1.0, weight_decay=0.0, ns_dtype=torch.float32)
    step_with(optimizer, [p], grad)
    scale = math.sqrt(max(1, shape[-2] / shape[-1]))
    for moved, g in zip(matrices((start - p.detach()) / scale), matrices(grad), strict=True):
        assert float(moved.norm()) == pytest.approx(0.70, abs=0.02)
        cosine = torch.nn.functional.cosine_similarity(moved.flatten(), g.flatten(), dim=0)
        assert float(cosine) == pytest.approx(1, abs=1e-5)


def test_scale_of_the_gradient_does_not_change_the_update() -> None:
    """A29: clipping the gradients changes momentum, and leaves Muon's step as it was."""
    p = parameter(8, 16)
    (q,) = clones([p])
    grad = torch.randn(8, 16)
    optimizers = [Muon([x], lr=0.1, ns_dtype=torch.float32) for x in (p, q)]
    give([p, q], [grad, grad])
    nn.utils.clip_grad_norm_([q], 1e-3)
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
    ratio = momentum_of(optimizers[1], q).norm() / momentum_of(optimizers[0], p).norm()
    assert float(ratio * grad.norm()) == pytest.approx(1e-3, rel=1e-3)


# --- What a matrix is -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "sizes"),
    [
        (("heads", 3), (4, 4, 4)),
        (("split", (6, 2, 4)), (6, 2, 4)),
        (["split", [1, 11]], (1, 11)),
        (("heads", 1), (12,)),
    ],
)
def test_blocks_of_rows_are_as_good_as_parameters_of_their_own(
    view: object, sizes: tuple[int, ...]
) -> None:
    fused = parameter(12, 5)
    blocks = [nn.Parameter(b.clone()) for b in fused.detach().split(sizes)]
    settings: dict[str, Any] = {"lr": 0.1, "adjust_lr_fn": "spectral", "ns_dtype": torch.float64}
    optimizers = Muon([fused], matrix_view=view, **settings), Muon(blocks, **settings)
    for _ in range(2):
        grad = torch.randn(12, 5)
        step_with(optimizers[0], [fused], grad)
        step_with(optimizers[1], blocks, *grad.split(sizes))
    torch.testing.assert_close(fused.detach(), torch.cat(values(blocks)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 6, 8), (2, 3, 8, 6), (5, 1, 4)])
def test_stacks_are_as_good_as_separate_matrices(shape: tuple[int, ...]) -> None:
    stack = parameter(*shape)
    parts = [nn.Parameter(m.clone()) for m in matrices(stack.detach())]
    settings: dict[str, Any] = {"lr": 0.1, "ns_dtype": torch.float64}
    optimizers = Muon([stack], **settings), Muon(parts, **settings)
    for _ in range(2):
        grad = torch.randn(shape)
        step_with(optimizers[0], [stack], grad)
        step_with(optimizers[1], parts, *matrices(grad))
    together = torch.stack(values(parts)).reshape(shape)
    torch.testing.assert_close(stack.detach(), together, rtol=0, atol=1e-6)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_is_one_flat_matrix_if_it_is_said(memory_format: torch.memory_format) -> None:
    """A14, C07: orthogonalization and scale both follow ``out x (in * kh * kw)``."""
    conv = nn.Conv2d(3, 6, 3, bias=False).to(memory_format=memory_format)  # type: ignore[call-overload]
    flat = nn.Parameter(conv.weight.detach().reshape(6, -1).clone())
    settings: dict[str, Any] = {"lr": 0.1, "adjust_lr_fn": "spectral", "ns_dtype": torch.float64}
    optimizers = Muon([conv.weight], matrix_view="flatten", **settings), Muon([flat], **settings)
    for _ in range(2):
        conv.zero_grad()
        conv(torch.randn(2, 3, 8, 8)).square().mean().backward()
        assert conv.weight.grad is not None
        flat.grad = conv.weight.grad.reshape(6, -1).clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(conv.weight.reshape(6, -1), flat, rtol=0, atol=1e-6)


def test_matrices_may_have_any_strides() -> None:
    p = nn.Parameter(torch.randn(6, 4).T)
    q = nn.Parameter(p.detach().contiguous())
    grad = torch.randn(4, 6)
    optimizers = Muon([p], lr=0.1), Muon([q], lr=0.1)
    for _ in range(2):
        step_with(optimizers[0], [p], grad.T.contiguous().T)
        step_with(optimizers[1], [q], grad)
    assert not p.is_contiguous()
    torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (0, 3, 4), (2, 0, 4)])
@pytest.mark.parametrize("view", [None, "flatten"])
def test_zero_size_parameters_do_nothing(shape: tuple[int, ...], view: str | None) -> None:
    """C07: they are stepped on, beside others, without a trace."""
    empty, full = parameter(*shape), parameter(4, 4)
    start = full.detach().clone()
    optimizer = Muon([empty, full], matrix_view=view)
    step_with(optimizer, [empty, full], torch.zeros(shape), torch.ones(4, 4))
    assert momentum_of(optimizer, empty).shape == shape
    assert not torch.equal(full, start)


# --- AdamW groups ---------------------------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01), torch.tensor([0.01])])
def test_adamw_groups_equal_torch_adamw_bit_for_bit(
    amsgrad: bool, maximize: bool, lr: float | Tensor
) -> None:
    settings: dict[str, Any] = {
        "lr": lr,
        "betas": (0.8, 0.95),
        "eps": 1e-6,
        "weight_decay": 0.2,
        "amsgrad": amsgrad,
        "maximize": maximize,
    }
    ours = [parameter(*shape) for shape in [(), (5,), (4, 8), (2, 3, 4), (0,)]]
    ours.append(parameter(5, dtype=torch.bfloat16))
    theirs = clones(ours)
    optimizer = Muon([{"params": ours, "algorithm": "adamw", **settings}])
    expected = torch.optim.AdamW(theirs, **settings)
    for number in range(4):
        grads: list[Tensor | None] = list(randn_like(ours))
        if number == 1:
            grads[1] = None
        for params, stepped in ((ours, optimizer), (theirs, expected)):
            give(params, grads)
            stepped.step()
    assert all_same_bits(ours, theirs)
    for p, q in zip(ours, theirs, strict=True):
        assert list(optimizer.state[p]) == list(expected.state[q])
        for key, value in expected.state[q].items():
            assert same_bits(optimizer.state[p][key], value), key


def test_adamw_groups_have_the_defaults_of_adamw() -> None:
    """``eps`` and ``weight_decay`` of the constructor: the first is Muon's, the second is all's."""
    p = parameter(4)
    group = Muon([{"params": [p], "algorithm": "adamw"}], lr=0.3, weight_decay=0.7).param_groups[0]
    expected = torch.optim.AdamW([p]).param_groups[0]
    for key in ("betas", "eps", "amsgrad", "maximize"):
        assert group[key] == expected[key], key
    assert (group["lr"], group["weight_decay"]) == (0.3, 0.7)


def test_mixed_groups_step_as_two_optimizers_would() -> None:
    """D14: one optimizer for matrices and for the rest."""
    matrix, vector = parameter(8, 4), parameter(4)
    p, q = clones([matrix, vector])
    both = Muon([grouped([matrix]), grouped([vector], algorithm="adamw")], lr=0.1)
    apart = [Muon([p], lr=0.1), torch.optim.AdamW([q], lr=0.1, weight_decay=0.1)]
    for _ in range(3):
        grads = randn_like([matrix, vector])
        step_with(both, [matrix, vector], *grads)
        give([p, q], grads)
        for optimizer in apart:
            optimizer.step()
    assert all_same_bits([matrix, vector], [p, q])


def test_state_has_the_documented_keys_and_nothing_else() -> None:
    """D02, D12: made at construction, whatever gradients come, tensors only."""
    matrix, vector, frozen = parameter(8, 4), parameter(4), parameter(4, 4)
    frozen.requires_grad_(False)
    adamw = grouped([vector], algorithm="adamw", amsgrad=True)
    optimizer = Muon([grouped([matrix, frozen]), adamw])
    for _ in range(2):
        assert [list(optimizer.state[p]) for p in (matrix, frozen)] == [["momentum_buffer"]] * 2
        keys = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
        assert set(optimizer.state[vector]) == keys
        assert len(optimizer.state) == 3
        for state in optimizer.state.values():
            assert all(type(value) is Tensor for value in state.values())
        matrix.grad = torch.ones(8, 4)
        optimizer.step()


# --- Groups and hyperparameters -------------------------------------------------------------


def test_a_groups_own_values_are_kept_and_used() -> None:
    """A31: zeros replaced by defaults, groups flattened, keys lost."""
    params = [parameter(4, 8) for _ in range(2)]
    optimizer = Muon(
        [
            {"params": params[:1], "lr": 1e-3, "weight_decay": 0.0, "momentum": 0.0, "eps": 0.0},
            {"params": params[1:], "lr": 0.0, "weight_decay": 0.3, "nesterov": False},
        ],
        lr=0.5,
        weight_decay=0.9,
        momentum=0.7,
        eps=1e-5,
    )
    kept = [
        [group[key] for key in ("lr", "weight_decay", "momentum", "eps", "nesterov")]
        for group in optimizer.param_groups
    ]
    assert kept == [[1e-3, 0.0, 0.0, 0.0, True], [0.0, 0.3, 0.7, 1e-5, False]]
    start, grads = values(params), randn_like(params)
    step_with(optimizer, params, *grads)
    assert same_bits(params[1], start[1])
    assert same_bits(momentum_of(optimizer, params[0]), grads[0])


def test_every_group_is_stepped_with_its_own_settings() -> None:
    """A31: all hyperparameters may differ per group."""
    per_group: list[dict[str, Any]] = [
        {"lr": 0.1, "adjust_lr_fn": "spectral", "weight_decay": 0.5},
        {"lr": 0.2, "nesterov": False, "momentum": 0.5, "ns_coefficients": "you"},
        {"lr": 0.3, "ns_steps": 3, "ns_dtype": torch.float32, "momentum_dtype": torch.float64},
        {"lr": 0.4, "ns_coefficients": [(2.0, -1.5, 0.5)] * 2, "ns_steps": None},
        {"lr": 0.5, "ns_method": "standard", "eps": 1e-3},
    ]
    together = [parameter(4, 8) for _ in per_group]
    apart = clones(together)
    optimizers = [
        Muon([{"params": [p], **s} for p, s in zip(together, per_group, strict=True)]),
        *(Muon([p], **s) for p, s in zip(apart, per_group, strict=True)),
    ]
    for _ in range(2):
        grads = randn_like(together)
        give(together, grads)
        give(apart, grads)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(together, apart, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-2)
    assert len(set(map(float, (p.detach().sum() for p in together)))) == len(together)


def test_the_callers_groups_are_left_as_they_are() -> None:
    p, q = parameter(4, 8), parameter(4)
    groups: list[dict[str, Any]] = [
        {"params": (("p", p),), "matrix_view": ["heads", 2]},
        {"params": [("q", q)], "algorithm": "adamw"},
    ]
    kept = [dict(group) for group in groups]
    optimizer = Muon(groups)
    optimizer.param_groups[0]["lr"] = 7.0
    assert groups == kept


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("form", [list, tuple, iter])
def test_parameters_come_in_any_ordered_form(named: bool, form: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False))
    source = model.named_parameters() if named else model.parameters()
    for optimizer in (Muon(form(source)), Muon([{"params": form(list(model.parameters()))}])):
        assert [tuple(p.shape) for p in optimizer.param_groups[0]["params"]] == [(8, 4), (2, 8)]
    assert Muon([{"params": model[0].weight}]).param_groups[0]["params"] == [model[0].weight]


def test_names_are_kept_and_used() -> None:
    model = nn.Linear(4, 8, bias=False)
    optimizer = Muon(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight"]
    assert [param.name for param in optimizer.plan.params] == ["weight"]
    assert [p.name for p in Muon(model.parameters()).plan.params] == [
        "parameter 0 of group 0 (shape (8, 4))"
    ]


@pytest.mark.parametrize("key", ["name", "initial_lr", "max_lr", "min_lr", "swa_lr"])
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_keys_of_schedulers_are_kept(key: str, algorithm: str) -> None:
    """A31: a group that was saved with a scheduler's keys is a group again."""
    optimizer = Muon([{"params": [parameter(4, 8)], "algorithm": algorithm, key: 0.25}])
    assert optimizer.param_groups[0][key] == 0.25


def test_an_optimizer_can_be_made_again_from_its_defaults() -> None:
    """D14: trainers call ``type(optimizer)(params, **optimizer.defaults)``."""
    p = parameter(4, 8)
    (q,) = clones([p])
    optimizer = Muon([p], lr=0.2, momentum=0.5, adjust_lr_fn="spectral", matrix_view=("heads", 2))
    again = optimizer.__class__([q], **optimizer.defaults)
    assert again.defaults == optimizer.defaults
    grad = torch.randn(4, 8)
    step_with(optimizer, [p], grad)
    step_with(again, [q], grad)
    assert same_bits(p, q)


def test_a_group_can_be_added_later() -> None:
    """D10: with state, and with the settings that the constructor would have given it."""
    params = [parameter(4, 8), parameter(8, 4), parameter(3)]
    once = clones(params)
    groups: list[dict[str, Any]] = [
        {},
        {"lr": 0.2, "matrix_view": ("heads", 2)},
        {"algorithm": "adamw", "betas": (0.5, 0.6)},
    ]
    expected = Muon([{"params": [p], **g} for p, g in zip(once, groups, strict=True)], lr=0.1)
    optimizer = Muon([{"params": params[:1], **groups[0]}], lr=0.1)
    for param, group in zip(params[1:], groups[1:], strict=True):
        optimizer.add_param_group({"params": [param], **group})
    assert len(optimizer.plan.params) == 2
    for _ in range(2):
        grads = randn_like(params)
        step_with(optimizer, params, *grads)
        step_with(expected, once, *grads)
    assert all_same_bits(params, once)
    without = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert without == [{k: v for k, v in g.items() if k != "params"} for g in expected.param_groups]


def test_a_group_can_be_added_between_steps() -> None:
    first, later = parameter(4, 8), parameter(4, 8)
    (once,) = clones([first])
    optimizer, expected = Muon([first]), Muon([once])
    for number in range(3):
        grad = torch.randn(4, 8)
        step_with(expected, [once], grad)
        if number == 1:
            optimizer.add_param_group({"params": [later], "lr": 0.0})
        give([first, later], [grad, grad])
        optimizer.step()
    torch.testing.assert_close(first, once, rtol=0, atol=1e-4)
    assert momentum_of(optimizer, later).any()


# --- Learning rates -------------------------------------------------------------------------


def mixed() -> tuple[list[nn.Parameter], Muon]:
    params = [parameter(4, 8), parameter(4)]
    adamw = grouped(params[1:], lr=3e-4, algorithm="adamw")
    return params, Muon([grouped(params[:1], lr=0.02), adamw])


def sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    return lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[2])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "sequential": sequential,
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(
        o, max_lr=[0.2, 0.003], total_steps=6, cycle_momentum=False
    ),
    "one_cycle_momentum": lambda o: lr_scheduler.OneCycleLR(
        o, max_lr=[0.2, 0.003], total_steps=6, cycle_momentum=True
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_every_group(name: str) -> None:
    """A30: the schedule drove one half only. Each group moves as if set by hand."""
    params, optimizer = mixed()
    by_hand = clones(params)
    plain = Muon([grouped(by_hand[:1]), grouped(by_hand[1:], algorithm="adamw")])
    scheduler = SCHEDULERS[name](optimizer)
    rates = set()
    for _ in range(4):
        for group, source in zip(plain.param_groups, optimizer.param_groups, strict=True):
            group["lr"] = source["lr"]
            if "momentum" in group:
                group["momentum"] = source["momentum"]
        rates.add(tuple(group["lr"] for group in optimizer.param_groups))
        grads = randn_like(params)
        step_with(optimizer, params, *grads)
        step_with(plain, by_hand, *grads)
        scheduler.step()
        assert all_same_bits(params, by_hand)
    assert len({rate for rate, _ in rates}) == len({rate for _, rate in rates}) > 2


@pytest.mark.parametrize("name", ["lambda", "cosine", "sequential"])
def test_schedulers_keep_the_ratio_of_the_groups(name: str) -> None:
    """A30."""
    params, optimizer = mixed()
    scheduler = SCHEDULERS[name](optimizer)
    for _ in range(4):
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert first / second == pytest.approx(0.02 / 3e-4)
        step_with(optimizer, params, *randn_like(params))
        scheduler.step()
    assert [g["initial_lr"] for g in optimizer.param_groups] == [0.02, 3e-4]


def test_reduce_on_plateau_drives_every_group() -> None:
    """A30."""
    params, optimizer = mixed()
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    start = values(params)
    for _ in range(3):
        step_with(optimizer, params, *randn_like(params))
        scheduler.step(1.0)
    assert [g["lr"] for g in optimizer.param_groups] == [0.02 / 4, 3e-4 / 4]
    assert not any(same_bits(p, s) for p, s in zip(params, start, strict=True))


def test_one_cycle_moves_the_momentum_of_muon() -> None:
    _, optimizer = mixed()
    lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4, max_momentum=0.91)
    assert optimizer.param_groups[0]["momentum"] == 0.91


def test_a_scheduler_works_with_the_learning_rate_as_a_tensor() -> None:
    """C27: both forms of one element."""
    for lr in (torch.tensor(0.5), torch.tensor([0.5])):
        params = [parameter(4, 8), parameter(4)]
        groups = [grouped(params[:1]), grouped(params[1:], algorithm="adamw")]
        optimizer = Muon(groups, lr=lr)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        for _ in range(2):
            step_with(optimizer, params, *randn_like(params))
            scheduler.step()
        assert all(float(group["lr"]) == 0.125 for group in optimizer.param_groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("param_dtype", HALVES)
def test_learning_rate_as_a_tensor_equals_the_number(
    dtype: torch.dtype, shape: tuple[int, ...], param_dtype: torch.dtype
) -> None:
    """C27: the same up to the rounding of one product."""
    params = [parameter(4, 8, dtype=param_dtype), parameter(8, 2, dtype=param_dtype)]
    others = clones(params)
    settings: dict[str, Any] = {"weight_decay": 0.5, "adjust_lr_fn": "spectral"}
    lr = torch.full(shape, 0.125, dtype=dtype)
    optimizers = Muon(params, lr=0.125, **settings), Muon(others, lr=lr, **settings)
    for _ in range(2):
        grads = randn_like(params)
        step_with(optimizers[0], params, *grads)
        step_with(optimizers[1], others, *grads)
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert float(lr) == 0.125


@pytest.mark.parametrize("lr", [0.0, 0, torch.tensor(0.0)])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_no_learning_rate_leaves_the_bits(
    lr: float | Tensor, dtype: torch.dtype, algorithm: str
) -> None:
    """C27: and momentum advances nevertheless."""
    p = parameter(8, 8, dtype=dtype)
    start = p.detach().clone()
    optimizer = Muon([{"params": [p], "algorithm": algorithm}], lr=lr, weight_decay=0.0)
    for _ in range(2):
        step_with(optimizer, [p], torch.randn_like(p))
    assert same_bits(p, start)
    assert all(value.any() for value in optimizer.state[p].values())


# --- Weight decay ---------------------------------------------------------------------------


@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw", "spectral"])
@pytest.mark.parametrize("dtype", HALVES)
def test_decay_of_half_is_exactly_half(adjust_lr_fn: str | None, dtype: torch.dtype) -> None:
    """A19: the plain learning rate, before the update, and every parameter of every group."""
    params = [nn.Parameter(torch.ones(4, 8, dtype=dtype)) for _ in range(3)]
    undecayed = nn.Parameter(torch.ones(4, 8, dtype=dtype))
    groups = [grouped([undecayed], weight_decay=0.0), grouped(params)]
    optimizer = Muon(groups, lr=0.1, weight_decay=5.0, adjust_lr_fn=adjust_lr_fn)
    step_with(optimizer, [undecayed, *params], *[torch.zeros(4, 8, dtype=dtype)] * 4)
    assert torch.equal(undecayed, torch.ones(4, 8, dtype=dtype))
    for p in params:
        assert torch.equal(p, torch.full((4, 8), 0.5, dtype=dtype))


def test_decay_is_not_applied_to_what_has_no_gradient() -> None:
    """A19: as in torch."""
    params = [nn.Parameter(torch.ones(4, 8)) for _ in range(2)]
    optimizer = Muon(params, lr=0.1, weight_decay=5.0)
    give(params, [None, torch.zeros(4, 8)])
    optimizer.step()
    assert torch.equal(params[0], torch.ones(4, 8))
    assert torch.equal(params[1], torch.full((4, 8), 0.5))


# --- Gradients ------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradients_are_not_modified(nesterov: bool, dtype: torch.dtype, momentum: float) -> None:
    """Neither their bits nor which tensor they are."""
    params = [parameter(*shape, dtype=dtype) for shape in [*SHAPES, (3, 4, 5), (4,)]]
    groups = [grouped(params[:-1]), grouped(params[-1:], algorithm="adamw")]
    optimizer = Muon(groups, nesterov=nesterov, momentum=momentum)
    grads = randn_like(params)
    give(params, grads)
    before = [p.grad for p in params]
    for _ in range(2):
        optimizer.step()
        for p, tensor, grad in zip(params, before, grads, strict=True):
            assert p.grad is tensor
            assert tensor is not None
            assert same_bits(tensor, grad)


@pytest.mark.parametrize("missing", range(3))
def test_a_missing_gradient_leaves_its_parameter_alone(missing: int) -> None:
    """B01: weight and momentum keep their bits, the others are stepped on as ever."""
    params = [parameter(4, 8) for _ in range(3)]
    optimizer = Muon(params)
    step_with(optimizer, params, *randn_like(params))
    start, momenta = values(params), [momentum_of(optimizer, p).clone() for p in params]
    grads: list[Tensor | None] = list(randn_like(params))
    grads[missing] = None
    give(params, grads)
    optimizer.step()
    for i, (p, s, m) in enumerate(zip(params, start, momenta, strict=True)):
        assert same_bits(p, s) == (i == missing)
        assert same_bits(momentum_of(optimizer, p), m) == (i == missing)


def test_a_step_without_any_gradient_warns_once_and_changes_nothing() -> None:
    """B01: the sign that the model was sharded after the optimizer was built."""
    params, optimizer = mixed()
    start, state = values(params), copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.warns(UserWarning, match="no gradient on any parameter.*after fully_shard"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert all_same_bits(params, start)
    assert str(state) == str(optimizer.state_dict()["state"])


def test_frozen_parameters_stay_and_can_be_unfrozen() -> None:
    """C22: a group of frozen parameters only is no error, and costs no step."""
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.requires_grad_(False)
    start = second.weight.detach().clone()
    optimizer = Muon([{"params": list(m.parameters())} for m in (first, second)])
    for number in range(4):
        assert same_bits(second.weight, start) == (number < 3)
        if number == 2:
            second.requires_grad_(True)
        optimizer.zero_grad()
        second(first(torch.randn(3, 4))).sum().backward()
        optimizer.step()
    assert momentum_of(optimizer, second.weight).any()


def test_a_parameter_can_be_exchanged_for_another() -> None:
    """Sharding and adapters swap tensors in ``param_groups``; a step takes them as they are."""
    p, q = parameter(4, 8), parameter(8, 2)
    optimizer = Muon([p], lr=0.1)
    step_with(optimizer, [p], torch.randn(4, 8))
    start = p.detach().clone()
    optimizer.param_groups[0]["params"][0] = q
    (expected,) = clones([q])
    grad = torch.randn(8, 2)
    step_with(optimizer, [q], grad)
    step_with(Muon([expected], lr=0.1), [expected], grad)
    assert same_bits(q, expected)
    assert same_bits(p, start)
    assert [param.layout.shape for param in optimizer.plan.params] == [(8, 2)]


def test_nan_in_one_matrix_poisons_no_other() -> None:
    """One parameter, one expert of a stack, one block of rows: each by itself."""
    params = [parameter(4, 8), parameter(4, 8), parameter(3, 4, 8), parameter(8, 8)]
    clean = clones(params)
    groups = [grouped(params[:3]), grouped(params[3:], matrix_view=("heads", 2))]
    others = [grouped(clean[:3]), grouped(clean[3:], matrix_view=("heads", 2))]
    optimizer, expected = Muon(groups, nonfinite="propagate"), Muon(others)
    grads = randn_like(params)
    step_with(expected, clean, *grads)
    grads[0][1, 2] = math.nan
    grads[2][1, 0, 0] = math.inf
    grads[3][4:, 0] = math.nan
    step_with(optimizer, params, *grads)
    assert params[0].isnan().all()
    assert params[2][1].isnan().all()
    assert params[3][4:].isnan().all()
    assert same_bits(params[1], clean[1])
    assert same_bits(params[2][::2], clean[2][::2])
    assert same_bits(params[3][:4], clean[3][:4])


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_gradients_of_any_size_give_the_same_update(scale: float) -> None:
    p = parameter(4, 8)
    (q,) = clones([p])
    grad = torch.randn(4, 8)
    for x, g in ((p, grad), (q, grad * scale)):
        step_with(Muon([x], lr=0.1, ns_dtype=torch.float32), [x], g)
    torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


# --- Dtypes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("param_dtype", HALVES)
@pytest.mark.parametrize("grad_dtype", HALVES)
@pytest.mark.parametrize("momentum_dtype", [*HALVES, None])
@pytest.mark.parametrize("nesterov", [True, False])
def test_every_combination_of_dtypes_steps(
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    momentum_dtype: torch.dtype | None,
    nesterov: bool,
) -> None:
    """C18: ``lerp_`` refuses mixed dtypes; a resumed fp32 momentum met bf16 gradients."""
    p = parameter(8, 16, dtype=param_dtype, scale=0.01)
    p.grad_dtype = None
    start = p.detach().clone()
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.0, "nesterov": nesterov}
    optimizer = Muon([p], momentum_dtype=momentum_dtype, **settings)
    reference = ReferenceMuon([start.float().clone()], **settings)
    for _ in range(3):
        grad = torch.randn(8, 16).to(grad_dtype)
        p.grad = grad.clone()
        optimizer.step()
        reference.step([grad.float()])
        assert p.dtype == param_dtype
        assert p.grad.dtype == grad_dtype
        assert momentum_of(optimizer, p).dtype == (momentum_dtype or param_dtype)
    assert error(p, reference.params[0], start) < 2 * BF16


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("ns_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_floating_dtype_steps(dtype: torch.dtype, ns_dtype: torch.dtype) -> None:
    p = parameter(8, 16, dtype=dtype, scale=0.01)
    start = p.detach().clone()
    reference = ReferenceMuon([start.float().clone()], lr=0.1)
    grad = torch.randn(8, 16).to(dtype)
    step_with(Muon([p], lr=0.1, ns_dtype=ns_dtype), [p], grad)
    reference.step([grad.float()])
    assert p.dtype == dtype
    assert error(p, reference.params[0], start) < BF16


def test_bf16_weights_are_rounded_once() -> None:
    """A32: decay and update in fp32, then one rounding: at most half a spacing from the truth."""
    p = parameter(64, 64, dtype=torch.bfloat16)
    wide = nn.Parameter(p.detach().float())
    grad = torch.randn(64, 64, dtype=torch.bfloat16)
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    step_with(Muon([p], **settings), [p], grad)
    step_with(Muon([wide], **settings), [wide], grad.float())
    assert (p.detach() != wide.detach().bfloat16()).float().mean() < 5e-3
    spacing = 2.0 ** (wide.detach().abs().log2().floor() - 7)
    assert ((p.detach().float() - wide.detach()).abs() <= 0.55 * spacing).all()


def test_momentum_dtype_is_the_parameters_unless_said() -> None:
    params = [parameter(4, 4, dtype=torch.bfloat16), parameter(4, 4, dtype=torch.bfloat16)]
    optimizer = Muon([grouped(params[:1]), grouped(params[1:], momentum_dtype=torch.float32)])
    assert [momentum_of(optimizer, p).dtype for p in params] == [torch.bfloat16, torch.float32]


def test_fp32_momentum_of_bf16_weights_gathers_what_bf16_would_lose() -> None:
    """A32: a small part of each gradient, below the spacing of bf16, adds up."""
    p = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    optimizer = Muon([p], lr=0.0, momentum=0.999, momentum_dtype=torch.float32)
    for _ in range(100):
        step_with(optimizer, [p], torch.ones(4, 4, dtype=torch.bfloat16))
    expected = torch.full((4, 4), 1 - 0.999**100)
    torch.testing.assert_close(momentum_of(optimizer, p), expected, rtol=1e-4, atol=0)


# --- The optimizer protocol -----------------------------------------------------------------


def test_a_closure_is_called_once_with_gradients_and_its_loss_comes_back() -> None:
    """C26: not called, called twice, or called without gradients."""
    model = nn.Linear(4, 8, bias=False)
    optimizer = Muon(model.parameters())
    start, calls = model.weight.detach().clone(), []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
        assert not torch.is_grad_enabled()
    assert calls == [True]
    assert isinstance(loss, Tensor)
    assert loss.requires_grad
    assert not torch.equal(model.weight, start)
    assert optimizer.step(lambda: 3.0) == 3.0
    assert optimizer.step() is None


def test_step_hooks_run_around_the_step() -> None:
    p = parameter(4, 8)
    optimizer = Muon([p])
    start, seen = p.detach().clone(), []
    before = optimizer.register_step_pre_hook(lambda *_: seen.append(same_bits(p, start)))
    after = optimizer.register_step_post_hook(lambda *_: seen.append(same_bits(p, start)))
    step_with(optimizer, [p], torch.ones(4, 8))
    assert seen == [True, False]
    before.remove()
    after.remove()
    optimizer.step()
    assert len(seen) == 2


def test_zero_grad_clears_every_group() -> None:
    params, optimizer = mixed()
    give(params, randn_like(params))
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in params)
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


def test_a_grad_scaler_can_drive_it() -> None:
    params, optimizer = mixed()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    start = values(params)
    give(params, [torch.full_like(p, math.inf) for p in params])
    scaler.scale(torch.tensor(1.0))
    scaler.step(optimizer)
    scaler.update()
    assert all_same_bits(params, start)
    give(params, randn_like(params))
    scaler.step(optimizer)
    assert not any(same_bits(p, s) for p, s in zip(params, start, strict=True))


def test_weights_are_updated_in_place_and_stay_leaves() -> None:
    params, optimizer = mixed()
    addresses = [p.data_ptr() for p in params]
    step_with(optimizer, params, *randn_like(params))
    assert [p.data_ptr() for p in params] == addresses
    assert all(p.is_leaf and p.requires_grad and p.grad_fn is None for p in params)


def test_training_lowers_the_loss() -> None:
    """With everything that is usual: a model, both algorithms, a schedule."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    weights = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = Muon([grouped(weights), grouped(rest, algorithm="adamw")], lr=0.05)
    x, y = torch.randn(64, 8), torch.randn(64, 4)
    losses = []
    for _ in range(30):
        loss = nn.functional.mse_loss(model(x), y)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


# --- Buckets, the plan and cost -------------------------------------------------------------


def many() -> list[nn.Parameter]:
    shapes = [(8, 8), (8, 8), (4, 12), (12, 4), (3, 8, 8), (8, 8)]
    return [parameter(*shape) for shape in shapes]


@pytest.mark.parametrize("bucket_bytes", [1, 200, 500, 2**30])
def test_bucket_bytes_does_not_change_the_bits(bucket_bytes: int) -> None:
    """A35: what is orthogonalized together must not change what comes out."""
    params = many()
    others = clones(params)
    optimizer, expected = Muon(params, bucket_bytes=bucket_bytes), Muon(others)
    for _ in range(2):
        grads = randn_like(params)
        step_with(optimizer, params, *grads)
        step_with(expected, others, *grads)
    assert all_same_bits(params, others)


def test_order_and_grouping_of_parameters_does_not_change_the_bits() -> None:
    params = many()
    others = clones(params)
    optimizer = Muon(params)
    expected = Muon([{"params": others[:1:-1]}, {"params": others[:2]}])
    for _ in range(2):
        grads = randn_like(params)
        step_with(optimizer, params, *grads)
        step_with(expected, others, *grads)
    assert all_same_bits(params, others)


def test_the_plan_of_one_process_has_no_collectives() -> None:
    optimizer = Muon([*many(), parameter(0, 4)])
    assert optimizer.plan.num_collectives == 0
    assert optimizer.plan.domains == ()
    matrices_ = [m for bucket in optimizer.plan.buckets for m in bucket.matrices]
    assert len(matrices_) == 8
    assert {m.owner for m in matrices_} == {0}
    assert not torch.distributed.is_initialized()


def test_the_plan_is_a_table_that_tells_what_there_is() -> None:
    model = nn.Linear(16, 8, bias=False)
    optimizer = Muon(model.named_parameters(), ns_dtype=torch.float32, ns_steps=3)
    text = str(optimizer.plan)
    for words in ("rank 0", "1 matri", "0 collectives a step", "whole", "3 steps, float32"):
        assert words in text
    lines = text.splitlines()
    assert all(len(line) <= 120 for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_the_plan_stays_the_same_object_until_parameters_change() -> None:
    params = many()
    optimizer = Muon(params)
    plan = optimizer.plan
    step_with(optimizer, params, *randn_like(params))
    assert optimizer.plan is plan
    optimizer.add_param_group({"params": [parameter(4, 4)]})
    assert optimizer.plan is not plan


class Counter(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def test_a_step_never_waits_for_the_device() -> None:
    """E08: no ``.item()``, which would stall a stream."""
    params = many()
    optimizer = Muon(params)
    give(params, randn_like(params))
    with Counter() as counter:
        optimizer.step()
    assert counter.calls
    assert not [name for name in counter.calls if "_local_scalar_dense" in name]
    assert not [name for name in counter.calls if "nonzero" in name]


def test_equal_matrices_are_orthogonalized_together() -> None:
    """E08: the number of products does not grow with the number of matrices of one shape."""
    counts = []
    for number in (1, 40):
        params = [parameter(8, 8) for _ in range(number)]
        optimizer = Muon(params)
        give(params, randn_like(params))
        with Counter() as counter:
            optimizer.step()
        products = ("mm", "bmm", "addmm", "baddbmm")
        names = {f"aten.{name}.default" for name in products}
        counts.append(sum(n for name, n in counter.calls.items() if name in names))
    assert counts[0] == counts[1]
