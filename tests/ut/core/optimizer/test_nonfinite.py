# SPDX-License-Identifier: Apache-2.0
"""Gradients with inf or NaN: what is found, and what the policies make of it in one process."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn

from hyper_parallel import Muon
from hyper_parallel.core.optimizer.nonfinite import obstacle_of

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
BAD = [math.inf, -math.inf, math.nan]


def model() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    shapes = {"a": (4, 6), "b": (6, 4), "norm": (6,), "c": (4, 6)}
    params = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    for p in params.values():
        p.grad = torch.randn_like(p)
    return params


def build(params: dict[str, nn.Parameter], **options: object) -> Muon:
    matrices = [(name, p) for name, p in params.items() if p.ndim > 1]
    others = [(name, p) for name, p in params.items() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": others, "algorithm": "adamw"}]
    return Muon(groups, ns_dtype=torch.float32, **options)  # type: ignore[arg-type]


def contents(params: dict[str, nn.Parameter], optimizer: Muon) -> list[Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [t.detach().clone() for t in [*params.values(), *states]]


def spoil(params: dict[str, nn.Parameter], name: str, value: float = math.nan) -> None:
    gradient = params[name].grad
    assert gradient is not None
    gradient.view(-1)[1] = value


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_entry_is_found_in_every_dtype(dtype: torch.dtype, value: float) -> None:
    grads = [torch.randn(3, 5).to(dtype) for _ in range(3)]
    assert obstacle_of("abc", grads, "raise") is None
    grads[1][2, 4] = value
    obstacle = obstacle_of("abc", grads, "raise")
    assert obstacle is not None
    assert obstacle.is_fatal
    assert "the gradient of b has" in obstacle.reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_the_smallest_numbers_are_finite(dtype: torch.dtype) -> None:
    """Though the norm of such a gradient overflows."""
    grads = [torch.full((8, 8), v, dtype=dtype) for v in (torch.finfo(dtype).max, 1e-40, 0.0)]
    assert obstacle_of("abc", grads, "raise") is None


def test_gradients_that_are_missing_or_empty_are_no_obstacle() -> None:
    assert obstacle_of("ab", [None, torch.zeros(0, 4)], "raise") is None
    assert obstacle_of("", [], "raise") is None


def test_many_bad_gradients_are_counted_after_the_first_three() -> None:
    obstacle = obstacle_of("abcde", [torch.full((2, 2), math.nan)] * 5, "skip")
    assert obstacle is not None
    assert not obstacle.is_fatal
    assert "a, b, c and 2 more" in obstacle.reason


@pytest.mark.parametrize("name", ["b", "norm"])
def test_raise_names_the_parameter_and_writes_nothing(name: str) -> None:
    params = model()
    optimizer = build(params)
    optimizer.step()
    before = contents(params, optimizer)
    spoil(params, name)
    with pytest.raises(RuntimeError, match=rf"gradient of {name} has inf or NaN") as caught:
        optimizer.step()
    assert "No weight and no optimizer state was changed" in str(caught.value)
    assert "nonfinite='skip'" in str(caught.value)
    assert all(map(torch.equal, contents(params, optimizer), before))


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", ["b", "norm"])
def test_skip_leaves_the_step_out_and_says_so(name: str, value: float) -> None:
    params, twins = model(), model()
    optimizer, expected = build(params, nonfinite="skip"), build(twins)
    optimizer.step()
    expected.step()
    before = contents(params, optimizer)
    good = {key: p.grad for key, p in params.items()}
    params[name].grad = torch.full_like(params[name], value)
    with pytest.warns(UserWarning, match=rf"left out on all ranks: .*gradient of {name} has inf"):
        optimizer.step()
    assert all(map(torch.equal, contents(params, optimizer), before))
    params[name].grad = good[name]
    optimizer.step()  # and goes on as if the step had never been
    expected.step()
    assert all(map(torch.equal, contents(params, optimizer), contents(twins, expected)))


def test_the_warning_points_at_the_line_that_stepped() -> None:
    params = model()
    optimizer = build(params, nonfinite="skip")
    spoil(params, "a")
    with pytest.warns(UserWarning, match="left out") as caught:
        optimizer.step()
    assert caught[0].filename == __file__


def test_propagate_spoils_one_matrix_and_no_other() -> None:
    """Same shape, same batch: the others must have the bits that they have without it."""
    params, twins = model(), model()
    optimizer, expected = build(params, nonfinite="propagate"), build(twins)
    spoil(params, "a", math.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    expected.step()
    assert params["a"].isnan().all()
    for name in ("b", "norm", "c"):
        assert torch.equal(params[name], twins[name])


def test_loss_of_a_closure_comes_back_from_a_step_that_is_left_out() -> None:
    params = model()
    optimizer = build(params, nonfinite="skip")
    spoil(params, "a")
    with pytest.warns(UserWarning, match="left out"):
        assert optimizer.step(lambda: 3.0) == 3.0


def test_the_policy_survives_copies() -> None:
    params = model()
    optimizer = build(params, nonfinite="skip")
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        twin.param_groups[0]["params"][0].grad = torch.full((4, 6), math.nan)
        with pytest.warns(UserWarning, match="left out"):
            twin.step()
