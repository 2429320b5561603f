# SPDX-License-Identifier: Apache-2.0
"""Every scheduler of PyTorch, weight averaging included, on one optimizer with two algorithms."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

from hyper_parallel import Muon

Scheduler = Any
LRS = (0.02, 3e-4)

# How each class is built; those of ``_PARTS`` are made of others.
SWALR: Any = swa_utils.SWALR  # says that it takes one rate, and takes one per group, too
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Scheduler]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, milestones=[1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.5, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.8),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, T_max=4)],
        milestones=[2],
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, base_lr=[1e-3, 1e-5], max_lr=list(LRS), step_size_up=3
    ),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=list(LRS), total_steps=9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=6, power=2.0),
    "SWALR": lambda o: SWALR(o, swa_lr=[0.001, 1e-5], anneal_epochs=4),
}
CYCLES_MOMENTUM = ("CyclicLR", "OneCycleLR")


def model_of(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(6, 4)


def mixed(model: nn.Linear, kind: type = float) -> Muon:
    rates: list[Any] = [torch.tensor(lr) if kind is Tensor else lr for lr in LRS]
    return Muon(
        [
            {"params": [model.weight], "lr": rates[0]},
            {"params": [model.bias], "algorithm": "adamw", "lr": rates[1]},
        ]
    )


def advance(scheduler: Scheduler) -> None:
    scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


def train(model: nn.Linear, optimizer: Muon, scheduler: Scheduler, steps: range) -> list[Any]:
    history = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(3, 6, generator=generator)).square().mean().backward()
        history.append(
            [
                (float(g["lr"]), float(g["momentum"]) if g["algorithm"] == "muon" else 0.0)
                for g in optimizer.param_groups
            ]
        )
        optimizer.step()
        if scheduler is not None:
            advance(scheduler)
    return history


def test_every_class_of_torch_is_tried() -> None:
    """A30: a class that is new in torch is noticed here."""
    offered = {
        name
        for name in lr_scheduler.__all__
        if inspect.isclass(getattr(lr_scheduler, name)) and name != "LRScheduler"
    }
    assert offered <= set(SCHEDULERS)


@pytest.mark.parametrize("kind", [float, Tensor])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_drives_both_algorithms_as_torchs_own(name: str, kind: type) -> None:
    """A30, C27: rates and momentum are those that SGD would have, and are used."""
    model = model_of()
    optimizer = mixed(model, kind)
    scheduler = SCHEDULERS[name](optimizer)
    history = train(model, optimizer, scheduler, range(6))
    other = model_of()
    theirs = torch.optim.SGD(
        [{"params": [other.weight], "lr": LRS[0]}, {"params": [other.bias], "lr": LRS[1]}],
        momentum=0.95,
    )
    their_scheduler = SCHEDULERS[name](theirs)
    by_hand = model_of()
    plain = mixed(by_hand)
    for step in range(6):
        for group, due, (lr, momentum) in zip(
            plain.param_groups, theirs.param_groups, history[step], strict=True
        ):
            assert lr == pytest.approx(due["lr"], rel=1e-6)
            group["lr"] = lr
            if group["algorithm"] == "muon":
                assert momentum == pytest.approx(due["momentum"], rel=1e-6)
                group["momentum"] = momentum
        train(by_hand, plain, None, range(step, step + 1))
        theirs.step()
        advance(their_scheduler)
    torch.testing.assert_close(model.weight, by_hand.weight, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(model.bias, by_hand.bias, rtol=1e-5, atol=1e-7)
    moved = [len({step[group] for step in history}) for group in range(2)]
    assert min(moved) > 1, "a group stood still"


@pytest.mark.parametrize("kind", [float, Tensor])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_goes_on_after_its_state_is_loaded(name: str, kind: type) -> None:
    """A30: the scheduler's and the optimizer's state, three steps before and three after."""
    model = model_of()
    optimizer = mixed(model, kind)
    scheduler = SCHEDULERS[name](optimizer)
    train(model, optimizer, scheduler, range(3))
    copied = model_of()
    other = mixed(copied, kind)
    other_scheduler = SCHEDULERS[name](other)
    copied.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    other_scheduler.load_state_dict(scheduler.state_dict())
    goes_on = train(model, optimizer, scheduler, range(3, 6))
    assert train(copied, other, other_scheduler, range(3, 6)) == goes_on
    assert torch.equal(model.weight, copied.weight)
    assert torch.equal(model.bias, copied.bias)


@pytest.mark.parametrize("name", CYCLES_MOMENTUM)
def test_a_cycle_moves_muons_momentum_and_leaves_the_betas_of_adamw(name: str) -> None:
    """torch writes ``momentum`` into all groups of an optimizer whose defaults have it."""
    model = model_of()
    optimizer = mixed(model)
    history = train(model, optimizer, SCHEDULERS[name](optimizer), range(4))
    assert len({momentum for (_, momentum), _ in history}) == 4
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)
    Muon([dict(group) for group in optimizer.param_groups])  # such groups can be used again


# --- Averages of weights --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["swa", "ema", "swa_foreach", "ema_foreach"])
def test_averages_of_the_weights_are_those_of_the_history(how: str) -> None:
    """``torch.optim.swa_utils``: stochastic weight averaging and moving averages."""
    decay = 0.75
    functions: dict[str, dict[str, Any]] = {
        "swa": {},
        "ema": {"avg_fn": swa_utils.get_ema_avg_fn(decay)},
        "swa_foreach": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
        "ema_foreach": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(decay)},
    }
    model = model_of()
    optimizer = mixed(model)
    averaged: Any = swa_utils.AveragedModel(model, **functions[how])
    due = model.weight.detach().clone()
    for step in range(4):
        train(model, optimizer, None, range(step, step + 1))
        averaged.update_parameters(model)
        new = model.weight.detach()
        if step == 0:
            due = new.clone()
        elif how.startswith("swa"):
            due += (new - due) / (step + 1)
        else:
            due = decay * due + (1 - decay) * new
    torch.testing.assert_close(averaged.module.weight, due)
    assert not torch.equal(averaged.module.weight, model.weight)
