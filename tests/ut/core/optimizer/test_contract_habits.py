# SPDX-License-Identifier: Apache-2.0
"""What people do with any optimizer of PyTorch: hooks, groups, profiler, copies of parameters."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from hyper_parallel import Muon, muon_param_groups, orthogonalize


class Block(nn.Module):
    """A norm and two matrices, run again in the backward if asked."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8, bias=False)
        self.down = nn.Linear(8, 6, bias=False)
        self.recompute = recompute

    def inner(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(self.norm(x)).tanh())
        return result

    @override
    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            result: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return result
        return self.inner(x)


def made(**settings: Any) -> tuple[Block, Muon]:
    torch.manual_seed(0)
    model = Block()
    return model, Muon(muon_param_groups(model), lr=0.02, **settings)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 1) -> None:
    optimizer.zero_grad()
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# --- Hooks, names, subclasses ---------------------------------------------------------------


@pytest.fixture
def seen() -> Iterator[list[str]]:
    calls: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global post")),
    ]
    yield calls
    for handle in handles:
        handle.remove()


def test_all_hooks_run_in_torchs_order(seen: list[str]) -> None:
    model, optimizer = made()

    def note(word: str, *_: Any) -> None:
        seen.append(word)

    optimizer.register_step_pre_hook(functools.partial(note, "pre"))
    optimizer.register_step_post_hook(functools.partial(note, "post"))
    optimizer.register_state_dict_pre_hook(functools.partial(note, "save pre"))
    optimizer.register_state_dict_post_hook(functools.partial(note, "save post"))
    optimizer.register_load_state_dict_pre_hook(functools.partial(note, "load pre"))
    optimizer.register_load_state_dict_post_hook(functools.partial(note, "load post"))
    step(model, optimizer)
    assert seen == ["global pre", "pre", "post", "global post"]
    seen.clear()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["save pre", "save post", "load pre", "load post"]


def test_a_hook_may_change_what_is_saved_and_loaded() -> None:
    _, optimizer = made()
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "note": "mine"})
    saved = optimizer.state_dict()
    assert saved["note"] == "mine"

    def slower(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": 0.5} for group in loaded["param_groups"]]
        return {**loaded, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(slower)
    optimizer.load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_hooks_may_write_gradients_before_the_step() -> None:
    """A29: what a hook does to ``p.grad`` is what is stepped on."""
    model, optimizer = made()
    other, plain = made()

    def halve(*_: Any) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    step(model, optimizer)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    (0.5 * other(x).square().mean()).backward()
    plain.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_gradients_may_be_hooked_in_the_backward() -> None:
    """``register_post_accumulate_grad_hook`` and ``register_hook`` on parameters."""
    model, optimizer = made()
    order: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    step(model, optimizer)
    assert sorted(order) == sorted(name for name, _ in model.named_parameters())


def test_the_profiler_shows_the_step_under_its_name() -> None:
    model, optimizer = made()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(model, optimizer)
    names = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#Muon.step", "Optimizer.zero_grad#Muon.zero_grad"} <= names
    assert getattr(Muon.step, "hooked", False), "torch wraps step for hooks and profiler"


class Counting(Muon):
    """What people do to an optimizer: count its steps."""

    num_steps = 0

    @override
    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        return super().step(closure)


def test_a_subclass_steps_hooks_and_saves_as_muon_does(seen: list[str]) -> None:
    torch.manual_seed(0)
    model = Block()
    optimizer = Counting(muon_param_groups(model), lr=0.02)
    other, plain = made()
    step(model, optimizer)
    step(other, plain)
    assert optimizer.num_steps == 1
    assert same(weights(model), weights(other))
    assert "global pre" in seen
    optimizer.load_state_dict(plain.state_dict())
    assert repr(optimizer).startswith("Counting (")


def test_its_text_shows_every_group_with_its_settings() -> None:
    _, optimizer = made()
    text = repr(optimizer)
    assert text.startswith("Muon (")
    for number, group in enumerate(optimizer.param_groups):
        assert f"Parameter Group {number}" in text
        assert f"algorithm: {group['algorithm']}" in text
    assert "maximize: False" in text


def test_a_step_works_under_no_grad_and_in_inference_of_nothing() -> None:
    model, optimizer = made()
    other, plain = made()
    for m, o in ((model, optimizer), (other, plain)):
        o.zero_grad()
        m(torch.ones(2, 6)).sum().backward()
    with torch.no_grad():
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    plain.step()
    assert torch.is_grad_enabled()
    assert same(weights(model), weights(other))
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_zeros_as_gradients_decay_and_none_does_not() -> None:
    """``zero_grad(set_to_none=False)``: zeros are gradients, as for torch's optimizers."""
    model, optimizer = made(weight_decay=0.5)
    step(model, optimizer)
    optimizer.state.clear()
    optimizer.zero_grad(set_to_none=False)
    before = model.up.weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(model.up.weight.detach(), before * (1 - 0.02 * 0.5))


def test_a_group_that_is_added_follows_a_scheduler_from_then_on() -> None:
    model, optimizer = made()
    step(model, optimizer)
    late = nn.Parameter(torch.ones(4, 4))
    optimizer.add_param_group({"params": [("late", late)], "lr": 0.5, "maximize": True})
    late.grad = torch.eye(4)
    optimizer.step()
    assert late[0, 0] > 1 - 0.5 * 0.1
    assert optimizer.param_groups[-1]["weight_rounding"] == "nearest"


# --- Arguments of torch's other optimizers ---------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"foreach": None},
        {"foreach": True},
        {"foreach": False},
        {"fused": None, "capturable": False, "differentiable": False},
        {"fused": False, "decoupled_weight_decay": True},
    ],
    ids=str,
)
def test_arguments_that_change_nothing_are_taken(arguments: dict[str, Any]) -> None:
    """A wrapper that passes torch's defaults on need not know which optimizer it has."""
    model, optimizer = made(**arguments)
    other, plain = made()
    step(model, optimizer)
    step(other, plain)
    assert same(weights(model), weights(other))
    assert not set(arguments) & set(optimizer.defaults)
    grouped = Muon([{"params": [nn.Parameter(torch.ones(2, 2))], **arguments}])
    assert grouped.param_groups[0]["algorithm"] == "muon"


# --- Models that are compiled, recomputed, moved ---------------------------------------------


def test_a_model_that_recomputes_its_activations_trains_alike() -> None:
    model, optimizer = made()
    torch.manual_seed(0)
    other = Block(recompute=True)
    plain = Muon(muon_param_groups(other), lr=0.02)
    for seed in range(3):
        step(model, optimizer, seed)
        step(other, plain, seed)
    assert same(weights(model), weights(other))


@pytest.mark.parametrize("before", [True, False])
def test_a_compiled_model_trains_alike(before: bool) -> None:
    """Built from the compiled model or from its parts; names lose the wrapper's prefix."""
    torch._dynamo.reset()
    model, optimizer = made()
    torch.manual_seed(0)
    other = Block()
    compiled: Any = torch.compile(other, backend="eager")
    plain = Muon(muon_param_groups(compiled if before else other), lr=0.02)
    for seed in range(2):
        step(model, optimizer, seed)
        step(compiled, plain, seed)
    assert same(weights(model), weights(other))
    names = [name for group in plain.param_groups for name in group["param_names"]]
    roles = [len(group["params"]) for group in plain.param_groups]
    assert len(names) == 4
    assert roles == [len(group["params"]) for group in optimizer.param_groups]


def test_twelve_shapes_compile_nothing_and_change_no_setting_of_the_compiler() -> None:
    """E05: one graph per shape met the recompile limit, or a global limit was raised."""
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters
    counted.clear()
    params = [nn.Parameter(torch.ones(2 + i, 14 - i)) for i in range(12)]
    optimizer = Muon(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not counted["frames"]
    assert torch._dynamo.config.recompile_limit == limit


def test_orthogonalize_can_be_compiled_for_every_shape() -> None:
    """E05, E06: with the compiler on, every shape has its own result."""
    torch._dynamo.reset()
    compiled = torch.compile(orthogonalize, backend="eager")
    for i in range(2):
        X = torch.randn(2 + i, 14 - i)
        torch.testing.assert_close(compiled(X), orthogonalize(X))
    torch._dynamo.reset()


def test_weights_whose_storage_is_exchanged_are_the_ones_stepped_on() -> None:
    """``param.data = ...`` and ``load_state_dict``: the parameter is the same object."""
    model, optimizer = made()
    other, plain = made()
    step(model, optimizer)
    step(other, plain)
    for p in model.parameters():
        p.data = p.detach().clone()
    other.load_state_dict(other.state_dict())
    step(model, optimizer, 2)
    step(other, plain, 2)
    assert same(weights(model), weights(other))


def test_weights_of_another_shape_or_dtype_are_refused_by_name() -> None:
    """C25: a model that is cast after its optimizer was built."""
    model, optimizer = made()
    model(torch.ones(2, 6)).sum().backward()
    model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"up\.weight.*float32.*is torch\.bfloat16.*cast"):
        optimizer.step()


@pytest.mark.filterwarnings("default")
def test_parameters_that_were_exchanged_are_warned_of() -> None:
    """C23: ``load_state_dict(assign=True)`` makes parameters that the optimizer does not have."""
    model, optimizer = made()
    copied = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(copied, assign=True)
    optimizer.zero_grad()
    model(torch.ones(2, 6)).sum().backward()
    with pytest.warns(UserWarning, match=r"no gradient on any parameter.*assign=True"):
        optimizer.step()


def test_state_follows_a_model_that_is_moved_in_place() -> None:
    """C20: momentum stayed on the device that the model had left."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Block()
    optimizer = Muon(muon_param_groups(model), lr=0.02)
    assert all(s["momentum_buffer"].is_meta for s in optimizer.state.values() if len(s) == 1)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device="cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    other, plain = made()
    model.load_state_dict(other.state_dict())
    step(model, optimizer)
    step(other, plain)
    assert same(weights(model), weights(other))
    assert all(t.device.type == "cpu" for s in optimizer.state.values() for t in s.values())
