# SPDX-License-Identifier: Apache-2.0
"""A state dict that does not fit: what it says, and that the optimizer is as it was."""

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hyper_parallel import Muon
from hyper_parallel.core.optimizer import muon

StateDict = dict[str, Any]


def make() -> Muon:
    generator = torch.Generator().manual_seed(0)
    matrix = nn.Parameter(torch.randn(4, 6, generator=generator))
    other = nn.Parameter(torch.randn(6, 4, generator=generator))
    bias = nn.Parameter(torch.randn(6, generator=generator))
    optimizer = Muon(
        [
            {"params": [("up", matrix), ("down", other)]},
            {"params": [("bias", bias)], "algorithm": "adamw", "lr": 0.01},
        ],
        momentum_dtype=torch.float64,
    )
    for p in (matrix, other, bias):
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()
    return optimizer


def edited(edit: Callable[[StateDict], object]) -> StateDict:
    state = copy.deepcopy(make().state_dict())
    edit(state)
    return state


def in_group(key: str, value: Any, number: int = 0) -> StateDict:
    return edited(lambda state: state["param_groups"][number].update({key: value}))


def with_state(number: int, **kinds: Any) -> StateDict:
    return edited(lambda state: state["state"].update({number: kinds}))


def everything(optimizer: Muon) -> Any:
    state = copy.deepcopy(optimizer.state_dict())
    return state["param_groups"], {
        (key, kind): value.clone() for key, s in state["state"].items() for kind, value in s.items()
    }


MISFITS: dict[str, tuple[Callable[[], StateDict], str]] = {
    "a whole checkpoint": (
        lambda: {"model": {}, "optimizer": make().state_dict()},
        r"expected what an optimizer's state_dict\(\) returns.*got keys model, optimizer; load the",
    ),
    "a flattened one": (
        lambda: {"state.up.momentum_buffer": torch.zeros(4, 6)},
        r"got keys state\.up\.momentum_buffer; .* a flattened one with set_optimizer_state_dict",
    ),
    "a key of a newer version": (
        lambda: in_group("second_moment", value=True),
        r"saved parameter group 0: unknown key 'second_moment'.*If a newer version wrote it, load",
    ),
    "a key of the other algorithm": (
        lambda: in_group("nesterov", value=True, number=1),
        "saved parameter group 1: unknown key 'nesterov' .*groups with algorithm='muon'",
    ),
    "a misspelt key": (
        lambda: in_group("nestrov", value=True),
        "saved parameter group 0: unknown key 'nestrov'.*did you mean 'nesterov'",
    ),
    "coupled weight decay": (
        lambda: in_group("decoupled_weight_decay", value=False, number=1),
        "saved parameter group 1: decoupled_weight_decay=False is not offered",
    ),
    "an unknown dtype": (
        lambda: in_group("ns_dtype", "float7"),
        "saved parameter group 0: ns_dtype must be one of .*, got 'float7'",
    ),
    "state of AdamW for Muon": (
        lambda: with_state(0, step=torch.tensor(1.0), exp_avg=torch.ones(4, 6)),
        "up: algorithm 'muon' needs state momentum_buffer, but it was saved with step, exp_avg; st",
    ),
    "state of Muon for AdamW": (
        lambda: with_state(2, momentum_buffer=torch.ones(6)),
        "bias: algorithm 'adamw' needs state step, exp_avg, exp_avg_sq, but it was saved with mom",
    ),
    "state that torch could not find": (
        lambda: with_state(0, momentum_buffer={}),
        "up: algorithm 'muon' needs state momentum_buffer",
    ),
    "state of another shape": (
        lambda: with_state(1, momentum_buffer=torch.ones(4, 6)),
        r"down: state 'momentum_buffer' was saved with shape \(4, 6\), but the parameter has",
    ),
    "other names": (
        lambda: in_group("param_names", ["up", "gate"]),
        "missing down, not here gate; build the optimizer with .*import_state",
    ),
    "a group too few": (
        lambda: edited(lambda state: state["param_groups"].pop()),
        "the saved state has 1 parameter groups, this optimizer 2; .*import_state",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(misfit: str) -> None:
    """D03, D09: the error names parameter or setting, and the way out."""
    state, message = MISFITS[misfit]
    optimizer = make()
    groups, tensors = everything(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state())
    now = everything(optimizer)
    assert now[0] == groups
    assert all(torch.equal(now[1][key], tensors[key]) for key in tensors)
    assert now[1].keys() == tensors.keys()


def test_an_error_after_the_state_was_written_takes_it_back() -> None:
    """Whatever fails: plan and state are those from before, and the optimizer steps."""
    optimizer, saved = make(), make().state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    plan = optimizer.plan
    groups, tensors = everything(optimizer)
    with (
        mock.patch.object(muon, "build_engine", side_effect=RuntimeError("a rank is gone")),
        pytest.raises(RuntimeError, match="a rank is gone"),
    ):
        optimizer.load_state_dict(saved)
    assert everything(optimizer)[0] == groups
    assert all(torch.equal(everything(optimizer)[1][key], tensors[key]) for key in tensors)
    assert optimizer.plan is plan
    optimizer.step()


def test_loaded_state_is_shared_with_nobody() -> None:
    """Two optimizers in one process would step on the same moments."""
    optimizer, other = make(), make()
    other.load_state_dict(optimizer.state_dict())
    mine = {v.data_ptr() for s in optimizer.state.values() for v in s.values()}
    assert not mine & {v.data_ptr() for s in other.state.values() for v in s.values()}


@pytest.mark.parametrize("key", ["share_replicas", "shard_momentum"])
def test_settings_of_the_layout_stay_those_of_the_ranks_that_run(key: str) -> None:
    optimizer = make()
    saved = in_group(key, value=True)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0][key] != True  # noqa: E712 -- "auto" is true, too


@pytest.mark.parametrize("key", ["foreach", "fused", "capturable", "differentiable"])
def test_how_torchs_adamw_ran_says_nothing(key: str) -> None:
    optimizer = make()
    optimizer.load_state_dict(in_group(key, value=True, number=1))
    assert key not in optimizer.param_groups[1]


def test_a_saved_state_without_a_setting_gets_this_optimizers() -> None:
    """D10: older checkpoints."""
    optimizer = make()
    saved = edited(lambda state: [group.pop("eps") for group in state["param_groups"]])
    optimizer.load_state_dict(saved)
    assert [group["eps"] for group in optimizer.param_groups] == [1e-7, 1e-8]


def test_dtypes_are_saved_by_name_and_older_ones_are_read() -> None:
    """torch's ``full_state_dict`` can gather no dtype."""
    saved = make().state_dict()
    assert saved["param_groups"][0]["ns_dtype"] == "bfloat16"
    assert saved["param_groups"][0]["momentum_dtype"] == "float64"
    for value in ("float64", torch.float64):
        optimizer = make()
        optimizer.load_state_dict(in_group("momentum_dtype", value))
        assert optimizer.param_groups[0]["momentum_dtype"] is torch.float64


def test_a_frozen_parameter_keeps_its_state_if_the_saved_one_has_none() -> None:
    """D11: torch hands over no state of frozen parameters."""
    optimizer = make()
    up, down = optimizer.param_groups[0]["params"]
    due = optimizer.state[up]["momentum_buffer"].clone()
    up.requires_grad_(False)
    saved = edited(lambda state: [state["state"].pop(number) for number in (0, 1)])
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[up]["momentum_buffer"], due)
    assert not optimizer.state[down]["momentum_buffer"].any()
