# SPDX-License-Identifier: Apache-2.0
"""What happens when groups, settings or state change after construction."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hyper_parallel import Muon
from tests.fake_group import fake_process_group


def ones(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape))


def stepped(optimizer: Muon) -> Muon:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    optimizer.step()
    return optimizer


def momentum(optimizer: Muon, p: Tensor) -> Tensor:
    buffer: Tensor = optimizer.state[p]["momentum_buffer"]
    return buffer


def test_a_refused_group_leaves_the_optimizer_as_it_was() -> None:
    a, b = ones(4, 8), ones(4, 8)
    optimizer = Muon([a])
    with pytest.raises(ValueError, match="lr must be at least 0"):
        optimizer.add_param_group({"params": [b], "lr": -1.0})
    assert len(optimizer.param_groups) == 1
    assert b not in optimizer.state


def test_a_copy_keeps_the_mesh_that_replicas_share() -> None:
    with fake_process_group(4, 0):
        mesh = init_device_mesh("cpu", (4,))
        optimizer = Muon([ones(8, 8)], replicate_mesh=mesh, share_replicas=True)
        assert copy.deepcopy(optimizer).plan.num_collectives == optimizer.plan.num_collectives == 1


def test_load_hooks_have_their_say_about_momentum() -> None:
    a = ones(4, 8)
    saved = stepped(Muon([a])).state_dict()
    b = ones(4, 8)
    optimizer = Muon([b])
    optimizer.register_load_state_dict_pre_hook(lambda _, state: state["wrapped"])
    optimizer.load_state_dict({"wrapped": saved})
    assert torch.equal(momentum(optimizer, b), saved["state"][0]["momentum_buffer"])


def test_parameters_are_matched_by_name() -> None:
    """D09: positions shift, names do not."""
    a, b = ones(4, 8), ones(4, 8)
    optimizer = Muon([("a", a), ("b", b)])
    a.grad, b.grad = torch.full((4, 8), 1.0), torch.full((4, 8), 2.0)
    optimizer.step()
    c, d = ones(4, 8), ones(4, 8)
    loaded = Muon([("b", d), ("a", c)])
    loaded.load_state_dict(optimizer.state_dict())
    assert torch.equal(momentum(loaded, c), momentum(optimizer, a))
    assert torch.equal(momentum(loaded, d), momentum(optimizer, b))
    assert loaded.param_groups[0]["param_names"] == ["b", "a"]


def test_other_names_are_refused_with_the_list() -> None:
    optimizer = Muon([("a", ones(4, 8)), ("x", ones(2, 2))])
    with pytest.raises(ValueError, match="missing x, not here b"):
        optimizer.load_state_dict(Muon([("a", ones(4, 8)), ("b", ones(2, 2))]).state_dict())


def test_a_refused_load_changes_nothing() -> None:
    p = ones(4, 8)
    optimizer = stepped(Muon([("p", p)], lr=0.5))
    before = momentum(optimizer, p).clone()
    saved = Muon([("p", ones(2, 2))], lr=0.1).state_dict()
    with pytest.raises(ValueError, match="saved with shape"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert torch.equal(momentum(optimizer, p), before)


@pytest.mark.parametrize(("key", "value"), [("lr", -1.0), ("algorithm", "sgd"), ("ns_steps", 0)])
def test_a_saved_setting_that_makes_no_sense_is_refused(key: str, value: Any) -> None:
    optimizer = Muon([ones(4, 8)])
    saved = optimizer.state_dict()
    saved["param_groups"][0][key] = value
    with pytest.raises(ValueError, match=f"{key}"):
        optimizer.load_state_dict(saved)


def test_groups_in_another_order_are_refused() -> None:
    groups: list[dict[str, Any]] = [
        {"params": [ones(4, 8)]},
        {"params": [ones(8)], "algorithm": "adamw"},
    ]
    optimizer = Muon(groups)
    with pytest.raises(ValueError, match="saved with algorithm 'adamw'"):
        optimizer.load_state_dict(Muon(list(reversed(groups))).state_dict())


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_state_of_torch_optimizers_loads(kind: str) -> None:
    p = ones(4, 8)
    theirs = torch.optim.Muon([p]) if kind == "muon" else torch.optim.AdamW([p])
    p.grad = torch.randn(4, 8)
    theirs.step()
    q = ones(4, 8)
    ours = Muon([{"params": [q], "algorithm": kind}])
    ours.load_state_dict(theirs.state_dict())
    for key, value in theirs.state[p].items():
        assert torch.equal(ours.state[q][key], value)
    Muon([{**ours.param_groups[0], "params": [ones(4, 8)]}])  # the group can be used again
    stepped(ours)


def test_a_loaded_buffer_is_a_copy() -> None:
    p = ones(4, 8)
    saved = stepped(Muon([p])).state_dict()
    kept = saved["state"][0]["momentum_buffer"].clone()
    q = ones(4, 8)
    loaded = Muon([q])
    loaded.load_state_dict(saved)
    stepped(loaded)
    assert torch.equal(saved["state"][0]["momentum_buffer"], kept)


def test_a_group_dict_that_is_replaced_is_read() -> None:
    p = ones(4, 8)
    optimizer = stepped(Muon([p], weight_decay=0.0))
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    optimizer.param_groups[0]["lr"] = 0.0
    before = p.detach().clone()
    stepped(optimizer)
    assert torch.equal(p, before)


@pytest.mark.parametrize(
    ("key", "value"),
    [("ns_steps", 1), ("ns_coefficients", "you"), ("matrix_view", ("heads", 2))],
)
def test_a_setting_that_is_changed_later_counts(key: str, value: Any) -> None:
    changed, fresh = ones(4, 8), ones(4, 8)
    optimizer = Muon([changed])
    optimizer.param_groups[0][key] = value
    stepped(optimizer)
    stepped(Muon([{"params": [fresh], key: value}]))
    assert torch.equal(changed, fresh)


def test_a_bad_gradient_of_an_adamw_parameter_stops_the_whole_step() -> None:
    w, b = ones(4, 8), ones(8)
    optimizer = Muon([{"params": [w]}, {"params": [b], "algorithm": "adamw"}])
    w.grad, b.grad = torch.randn(4, 8), torch.ones(8).to_sparse()
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 1.*make it dense"):
        optimizer.step()
    assert torch.equal(w, torch.ones(4, 8))


def test_state_that_is_gone_is_made_again() -> None:
    w, b = ones(4, 8), ones(8)
    optimizer = Muon([{"params": [w]}, {"params": [b], "algorithm": "adamw"}])
    optimizer.state.clear()
    stepped(optimizer)
    optimizer.param_groups[1]["amsgrad"] = True
    stepped(optimizer)
    assert set(optimizer.state[b]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


def test_defaults_build_another_optimizer_after_a_load() -> None:
    """D14: ``defaults`` are arguments of the constructor, and nothing else, also after a load."""
    optimizer = Muon([ones(4, 8)])
    optimizer.load_state_dict(optimizer.state_dict())
    type(optimizer)([ones(4, 8)], **optimizer.defaults)


def test_a_group_that_a_scheduler_wrote_to_can_be_used_again() -> None:
    optimizer = Muon([{"params": [ones(4, 8)]}, {"params": [ones(8)], "algorithm": "adamw"}])
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    Muon([{**group, "params": [ones(4, 8)]} for group in optimizer.param_groups])


def test_exchanged_parameters_have_state_before_the_first_step() -> None:
    """C25: accelerate builds the optimizer, shards, exchanges the parameters and loads."""
    a, b = ones(4, 8), ones(3)
    optimizer = Muon([{"params": [a]}, {"params": [b], "algorithm": "adamw", "lr": 0.1}])
    c, d = ones(2, 8), ones(2)
    optimizer.param_groups[0]["params"] = [c]
    optimizer.param_groups[1]["params"] = [d]
    saved = optimizer.state_dict()
    assert saved["state"][0]["momentum_buffer"].shape == (2, 8)
    assert saved["state"][1]["exp_avg"].shape == (2,)
    assert set(optimizer.state) == {c, d}
