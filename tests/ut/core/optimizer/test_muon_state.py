# SPDX-License-Identifier: Apache-2.0
"""Saving, loading and copying: whatever the way, the run goes on as if nothing had happened."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import lr_scheduler

from hyper_parallel import Muon

Settings = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Matrices of a few rows gain nothing from threads, and wait for them on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Model(nn.Module):
    """One parameter of each kind that an optimizer meets."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(7, 6))
        self.fused = nn.Parameter(torch.randn(12, 6))
        self.stack = nn.Parameter(torch.randn(3, 6, 4))
        self.bias = nn.Parameter(torch.randn(4))
        self.unused = nn.Parameter(torch.randn(5, 5))
        self.to(dtype)

    def groups(self, *, named: bool = True) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = [
            {"params": ["stack", "unused"], "lr": 0.02},
            {"params": ["fused"], "matrix_view": ("split", (4, 2, 6)), "momentum": 0.8},
            {"params": ["embedding", "bias"], "algorithm": "adamw", "amsgrad": True},
        ]
        for group in groups:
            pairs = [(name, getattr(self, name)) for name in group["params"]]
            group["params"] = pairs if named else [param for _, param in pairs]
        return groups


def make(*, named: bool = True, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A model and its optimizer, after three steps."""
    model = Model(dtype)
    optimizer = Muon(model.groups(named=named), **{"lr": 0.1, **settings})
    train(model, optimizer, range(3))
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps whose gradients depend on nothing but their number; one parameter gets none."""
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        for name, param in model.named_parameters():
            random = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = None if name == "unused" else random
        optimizer.step()


def same_bits(left: Tensor, right: Tensor) -> bool:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.itemsize]
    a, b = left.detach(), right.detach()
    return a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))


def assert_continues_equally(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    copied: nn.Module,
    copied_optimizer: torch.optim.Optimizer,
) -> None:
    """Weights and state are equal now and after further steps."""
    for steps in (range(0), range(3, 6)):
        train(model, optimizer, steps)
        train(copied, copied_optimizer, steps)
        for (name, p), q in zip(model.named_parameters(), copied.parameters(), strict=True):
            assert same_bits(p, q), name
            assert optimizer.state[p].keys() == copied_optimizer.state[q].keys(), name
            for key, value in optimizer.state[p].items():
                assert same_bits(value, copied_optimizer.state[q][key]), (name, key)


def group_settings(optimizer: torch.optim.Optimizer) -> list[Settings]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


# --- State dicts ----------------------------------------------------------------------------


def through_memory(state: Settings) -> Settings:
    return copy.deepcopy(state)


def through_pickle(state: Settings) -> Settings:
    loaded: Settings = pickle.loads(pickle.dumps(state))
    return loaded


def through_a_file(state: Settings) -> Settings:
    """D13: and the file holds nothing but plain values."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: Settings = torch.load(file, weights_only=True)
    return loaded


WAYS = [through_memory, through_pickle, through_a_file]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_continues_from_a_state_dict(
    way: Callable[[Settings], Settings], named: bool, dtype: torch.dtype
) -> None:
    """Into a fresh optimizer whose settings are others: those of the state count, as in torch."""
    model, optimizer = make(named=named, dtype=dtype, adjust_lr_fn="spectral")
    copied = copy.deepcopy(model)
    fresh = Muon(copied.groups(named=named), lr=7.0, nesterov=False)
    fresh.load_state_dict(way(optimizer.state_dict()))
    assert group_settings(fresh) == group_settings(optimizer)
    assert_continues_equally(model, optimizer, copied, fresh)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum_dtype", [torch.float32, torch.bfloat16, torch.float64, None])
def test_momentum_dtype_survives_loading(
    way: Callable[[Settings], Settings], dtype: torch.dtype, momentum_dtype: torch.dtype | None
) -> None:
    """D08: torch casts all state to the dtype of the parameter, and bits are lost."""
    model, optimizer = make(dtype=dtype, momentum_dtype=momentum_dtype)
    copied = copy.deepcopy(model)
    fresh = Muon(copied.groups(), lr=0.1, momentum_dtype=momentum_dtype)
    fresh.load_state_dict(way(optimizer.state_dict()))
    assert fresh.state[copied.stack]["momentum_buffer"].dtype == (momentum_dtype or dtype)
    assert_continues_equally(model, optimizer, copied, fresh)


def test_a_state_dict_can_be_loaded_twice_and_into_its_own_optimizer() -> None:
    model, optimizer = make(dtype=torch.bfloat16, momentum_dtype=torch.float32)
    copied, fresh = copy.deepcopy((model, optimizer))
    for _ in range(2):
        fresh.load_state_dict(copy.deepcopy(fresh.state_dict()))
        fresh.load_state_dict(fresh.state_dict())
    assert_continues_equally(model, optimizer, copied, fresh)


def test_a_state_dict_holds_all_parameters_from_the_start() -> None:
    """D02: the same keys whatever had a gradient, before the first step and after."""
    model = Model()
    optimizer = Muon(model.groups())
    keys = [{i: list(s) for i, s in optimizer.state_dict()["state"].items()}]
    train(model, optimizer, range(2))
    keys.append({i: list(s) for i, s in optimizer.state_dict()["state"].items()})
    adamw = ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    muon = ["momentum_buffer"]
    assert keys == [{0: muon, 1: muon, 2: muon, 3: adamw, 4: adamw}] * 2
    assert not optimizer.state[model.unused]["momentum_buffer"].any()


def test_state_of_a_parameter_that_was_saved_without_is_zero() -> None:
    """D06: what others save has no state for a parameter that had no gradient."""
    model, optimizer = make()
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][1], state["state"][3]
    _, fresh = make()
    fresh.load_state_dict(state)
    unused, embedding = (fresh.param_groups[i]["params"][j] for i, j in ((0, 1), (2, 0)))
    assert not fresh.state[unused]["momentum_buffer"].any()
    assert not any(value.any() for value in fresh.state[embedding].values())
    fresh.step()
    assert model.unused is not unused


def test_a_state_dict_has_plain_values_only() -> None:
    """D12, D13: tensors in the state; numbers, strings, dtypes and tuples of them beside it."""
    _, optimizer = make(momentum_dtype=torch.float32, ns_coefficients="you")

    def is_plain(value: object) -> bool:
        if isinstance(value, list | tuple):
            return all(map(is_plain, value))
        return value is None or isinstance(value, bool | int | float | str | torch.dtype)

    state = optimizer.state_dict()
    assert set(state) == {"state", "param_groups"}
    assert all(type(v) is Tensor for s in state["state"].values() for v in s.values())
    assert all(is_plain(v) for g in state["param_groups"] for v in g.values())


def test_a_copied_state_dict_is_not_touched_by_later_steps() -> None:
    model, optimizer = make()
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    fresh_model, fresh = make()
    fresh.load_state_dict(copy.deepcopy(saved))
    train(model, optimizer, range(2))
    train(fresh_model, fresh, range(2))
    for index, state in kept["state"].items():
        for key, value in state.items():
            assert same_bits(value, saved["state"][index][key])
    assert saved["param_groups"] == kept["param_groups"]


def test_loading_does_not_change_the_state_dict_that_is_loaded() -> None:
    _, optimizer = make(dtype=torch.bfloat16, momentum_dtype=torch.float32)
    saved = copy.deepcopy(optimizer.state_dict())
    _, fresh = make(dtype=torch.bfloat16)
    fresh.load_state_dict(saved)
    assert saved["param_groups"] == optimizer.state_dict()["param_groups"]
    assert [s.keys() for s in saved["state"].values()] == [
        s.keys() for s in optimizer.state_dict()["state"].values()
    ]


def test_learning_rates_set_after_loading_are_heard() -> None:
    """Groups are new objects after a load; what steps must read those."""
    model, optimizer = make()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    start = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, range(1))
    assert all(same_bits(p, s) for p, s in zip(model.parameters(), start, strict=True))


def test_a_group_can_be_added_after_loading() -> None:
    model, optimizer = make(named=False)
    copied, other = copy.deepcopy((model, optimizer))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for owner, stepped in ((model, optimizer), (copied, other)):
        owner.later = nn.Parameter(torch.ones(4, 6))
        stepped.add_param_group({"params": [owner.later], "lr": 0.5})
    assert_continues_equally(model, optimizer, copied, other)


def test_the_plan_is_made_for_the_settings_that_were_loaded() -> None:
    _, optimizer = make(ns_steps=3, ns_dtype=torch.float32)
    _, fresh = make()
    assert fresh.plan != optimizer.plan
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.plan == optimizer.plan


def test_load_hooks_run() -> None:
    _, optimizer = make()
    calls = []
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("after"))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert calls == ["before", "after"]


# --- Copies of the optimizer ----------------------------------------------------------------


def copied_with_deepcopy(pair: Any) -> Any:
    return copy.deepcopy(pair)


def copied_with_pickle(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


def copied_through_a_file(pair: Any) -> Any:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate", [copied_with_deepcopy, copied_with_pickle, copied_through_a_file]
)
@pytest.mark.parametrize("stepped", [True, False])
def test_a_copied_optimizer_continues(duplicate: Callable[[Any], Any], stepped: bool) -> None:
    """D13: process groups, plans and caches are made again, not copied."""
    settings: Settings = {"momentum_dtype": torch.float64, "bucket_bytes": 100}
    if stepped:
        model, optimizer = make(**settings)
    else:
        model = Model()
        optimizer = Muon(model.groups(), **settings)
    copied, other = duplicate((model, optimizer))
    assert other.plan == optimizer.plan
    assert other.plan.bucket_bytes == 100
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in model.parameters()}
    assert_continues_equally(model, optimizer, copied, other)


def test_a_copy_steps_on_its_own_parameters_only() -> None:
    model, optimizer = make()
    start = [p.detach().clone() for p in model.parameters()]
    copied, other = copy.deepcopy((model, optimizer))
    train(copied, other, range(1))
    assert all(same_bits(p, s) for p, s in zip(model.parameters(), start, strict=True))


def test_hooks_and_schedulers_work_on_a_copy() -> None:
    model, optimizer = make()
    copied, other = copy.deepcopy((model, optimizer))
    calls: list[int] = []
    other.register_step_post_hook(lambda *_: calls.append(1))
    scheduler = lr_scheduler.StepLR(other, step_size=1, gamma=0.5)
    train(copied, other, range(1))
    scheduler.step()
    assert calls == [1]
    assert [group["lr"] for group in other.param_groups] == [0.01, 0.05, 0.05]


def test_an_idle_step_of_a_copy_is_no_error() -> None:
    optimizer = Muon(Model().groups())
    with pytest.warns(UserWarning, match="no gradient"):
        optimizer.step()
    copied = pickle.loads(pickle.dumps(optimizer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        copied.step()


# --- Schedulers -----------------------------------------------------------------------------


def cosine(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)


def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)


def warmup_then_cosine(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    warmup = lr_scheduler.LinearLR(optimizer, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warmup, cosine(optimizer)], milestones=[2])


@pytest.mark.parametrize("schedule", [cosine, one_cycle, warmup_then_cosine])
@pytest.mark.parametrize("way", WAYS)
def test_a_run_with_a_schedule_continues(
    schedule: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler],
    way: Callable[[Settings], Settings],
) -> None:
    """A30: both groups' rates, and OneCycle's momentum, come back."""
    model = Model()
    optimizer = Muon(model.groups(), lr=0.1)
    scheduler = schedule(optimizer)
    for number in range(3):
        train(model, optimizer, range(number, number + 1))
        scheduler.step()
    copied = copy.deepcopy(model)
    fresh = Muon(copied.groups(), lr=0.1)
    fresh_scheduler = schedule(fresh)
    fresh_scheduler.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    fresh.load_state_dict(way(optimizer.state_dict()))
    for number in range(3, 6):
        for owner, stepped, scheduled in (
            (model, optimizer, scheduler),
            (copied, fresh, fresh_scheduler),
        ):
            train(owner, stepped, range(number, number + 1))
            scheduled.step()
    assert group_settings(fresh) == group_settings(optimizer)
    assert_continues_equally(model, optimizer, copied, fresh)


# --- torch.distributed.checkpoint -----------------------------------------------------------


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_continues_from_the_state_dict_of_distributed_checkpoint(
    flatten: bool, named: bool, dtype: torch.dtype
) -> None:
    """D10: every group keeps its settings, whatever those of the fresh optimizer are."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    settings: Settings = {"momentum_dtype": torch.float32}
    model, optimizer = make(named=named, dtype=dtype, **settings)
    before = group_settings(optimizer)
    saved = through_a_file(get_optimizer_state_dict(model, optimizer, options=options))
    copied = copy.deepcopy(model)
    fresh = Muon(copied.groups(named=named), lr=7.0, nesterov=False, **settings)
    set_optimizer_state_dict(copied, fresh, saved, options=options)
    assert group_settings(optimizer) == before
    for restored, group in zip(group_settings(fresh), before, strict=True):
        assert {k: v for k, v in restored.items() if k != "param_names"} == {
            k: v for k, v in group.items() if k != "param_names"
        }
    assert_continues_equally(model, optimizer, copied, fresh)


@pytest.mark.parametrize("flatten", [True, False])
def test_distributed_checkpoint_names_state_by_the_model(flatten: bool) -> None:
    """D09: by name, so that the order of parameters and groups is nothing to rely on."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = make(named=False)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    copied = copy.deepcopy(model)
    groups = copied.groups(named=False)
    for group in groups:
        group["params"].reverse()
    fresh = Muon(groups, lr=0.1)
    set_optimizer_state_dict(copied, fresh, copy.deepcopy(saved), options=options)
    assert_continues_equally(model, optimizer, copied, fresh)


def test_asking_for_a_state_dict_does_not_step() -> None:
    """torch makes missing state by a step with ``lr=0``; ours is there from the start."""
    model = Model()
    optimizer = Muon(model.groups())
    start = [p.detach().clone() for p in model.parameters()]
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    get_optimizer_state_dict(model, optimizer)
    assert not calls
    assert all(same_bits(p, s) for p, s in zip(model.parameters(), start, strict=True))


# --- What does not fit ----------------------------------------------------------------------


def saved_by(*groups: dict[str, Any]) -> Settings:
    return Muon(list(groups)).state_dict()


def ones(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        pytest.param(
            lambda: saved_by({"params": [ones(8, 4), ones(4, 8)]}),
            r"parameter 0 of group 0 \(shape \(4, 8\)\).*momentum_buffer.*\(8, 4\)",
            id="another shape",
        ),
        pytest.param(
            lambda: saved_by({"params": [ones(4, 8)]}, {"params": [ones(4, 8)]}),
            "the saved state has 2 parameter groups, this optimizer 1",
            id="another number of groups",
        ),
        pytest.param(
            lambda: saved_by({"params": [ones(4, 8)]}),
            "saved with 1 parameters, but here it has 2",
            id="another number of parameters",
        ),
    ],
)
def test_state_that_does_not_fit_is_refused(state: Callable[[], Settings], message: str) -> None:
    optimizer = Muon([ones(4, 8), ones(4, 8)])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state())


def test_state_of_another_shape_is_refused_by_name() -> None:
    optimizer = Muon([("layer.weight", ones(4, 8))])
    with pytest.raises(
        ValueError, match=r"^layer\.weight: state 'momentum_buffer' was saved with shape"
    ):
        optimizer.load_state_dict(Muon([("layer.weight", ones(2, 2))]).state_dict())
