# SPDX-License-Identifier: Apache-2.0
"""Checkpoints when something is not as it was: frozen or added parameters, settings, copies."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from hyper_parallel import Muon, muon_param_groups
from hyper_parallel.core.optimizer import OlderCheckpointPlanner, import_state
from tests.checkpoint_runs import (
    LAYOUTS,
    Model,
    assert_state_is,
    build,
    named,
    train,
    whole,
    whole_state,
    whole_weights,
)
from tests.pool import Pools

pytestmark = pytest.mark.dist

OPTIONS = {
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "not flattened": StateDictOptions(),
}


def optimizer_dict(model: nn.Module, optimizer: Muon, form: str) -> dict[str, Any]:
    return dict(get_optimizer_state_dict(model, optimizer, options=OPTIONS[form]))


def save(folder: str, model: nn.Module, optimizer: Muon, form: str) -> None:
    state = {"model": get_model_state_dict(model), "optim": optimizer_dict(model, optimizer, form)}
    dcp_save(state, checkpoint_id=folder)


def load(
    folder: str,
    model: nn.Module,
    optimizer: Muon,
    form: str,
    planner: DefaultLoadPlanner | None = None,
) -> None:
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optim": optimizer_dict(model, optimizer, form),
    }
    dcp_load(state, checkpoint_id=folder, planner=planner)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"], options=OPTIONS[form])


# --- Frozen parameters ----------------------------------------------------------------------


def freeze_save_load_unfreeze(folder: str, layout: str, form: str) -> None:
    model, optimizer = build(LAYOUTS[layout])
    train(model, optimizer, range(3))
    for name in ("up.weight", "head.bias"):
        named(model)[name].requires_grad_(False)
    train(model, optimizer, range(3, 4))
    save(folder, model, optimizer, form)
    due = whole_state(model, optimizer)
    fresh, other = build(LAYOUTS[layout])
    for name in ("up.weight", "head.bias"):
        named(fresh)[name].requires_grad_(False)
    load(folder, fresh, other, form)
    assert due["up.weight"]["momentum_buffer"].any()
    assert_state_is(fresh, other, due)
    for owner, stepped in ((model, optimizer), (fresh, other)):
        train(owner, stepped, range(4, 5))
        for param in owner.parameters():
            param.requires_grad_(True)
        train(owner, stepped, range(5, 7))
    have, weights = whole_weights(fresh), whole_weights(model)
    assert all(torch.equal(have[name], weights[name]) for name in weights)


@pytest.mark.parametrize("form", OPTIONS)
@pytest.mark.parametrize("layout", ["FSDP 2", "TP 2", "HSDP 2x2, momentum once"])
def test_the_state_of_frozen_parameters_comes_back(
    ranks: Pools, tmp_path: Path, layout: str, form: str
) -> None:
    """D11: torch drops it from what it hands over; the state that was read in place stays."""
    ranks.run(LAYOUTS[layout].num_ranks, freeze_save_load_unfreeze, str(tmp_path), layout, form)


# --- Gradients that are missing -------------------------------------------------------------


def skip_a_head(folder: str, form: str) -> list[list[str]]:
    model, optimizer = build(LAYOUTS["FSDP 2"])
    keys = [sorted(optimizer_dict(model, optimizer, "flattened"))]
    train(model, optimizer, range(2))
    keys.append(sorted(optimizer_dict(model, optimizer, "flattened")))
    save(folder, model, optimizer, form)
    fresh, other = build(LAYOUTS["FSDP 2"])
    keys.append(sorted(optimizer_dict(fresh, other, "flattened")))
    load(folder, fresh, other, form)
    due, weights = whole_state(model, optimizer), whole_weights(model)
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    fresh(tokens).sum().backward()
    unused = ("up.weight", "down.weight", "head.bias")
    for name in unused:
        named(fresh)[name].grad = None
    other.step()
    have, state = whole_weights(fresh), whole_state(fresh, other)
    for name in weights:
        same = torch.equal(have[name], weights[name])
        assert same == (name in unused), name
        if name in unused:
            assert all(torch.equal(state[name][k], due[name][k]) for k in due[name]), name
    return keys


@pytest.mark.parametrize("form", OPTIONS)
def test_a_parameter_without_a_gradient_after_a_load_keeps_its_state(
    ranks: Pools, tmp_path: Path, form: str
) -> None:
    """D02, D06: and keys are the same on all ranks, before the first step and after."""
    keys = [key for rank in ranks.run(2, skip_a_head, str(tmp_path), form) for key in rank]
    assert all(key == keys[0] for key in keys)
    assert "state.up.weight.momentum_buffer" in keys[0]


# --- Settings -------------------------------------------------------------------------------


def load_without_a_key(folder: str, form: str, key: str) -> Any:
    model, optimizer = build(LAYOUTS["FSDP 2"])
    train(model, optimizer, range(2))
    due = whole_state(model, optimizer)
    state = {"model": get_model_state_dict(model), "optim": optimizer_dict(model, optimizer, form)}
    if form == "flattened":
        state["optim"] = {k: v for k, v in state["optim"].items() if not k.endswith(f".{key}")}
    else:
        for group in state["optim"]["param_groups"]:
            group.pop(key, None)
    dcp_save(state, checkpoint_id=folder)
    fresh, other = build(LAYOUTS["FSDP 2"], nesterov=False)
    with pytest.raises(CheckpointException, match=f"Missing key .*{key}"):
        load(folder, fresh, other, form)
    load(folder, fresh, other, form, OlderCheckpointPlanner())
    assert_state_is(fresh, other, due)
    return other.param_groups[0][key]


@pytest.mark.parametrize("form", OPTIONS)
def test_an_older_checkpoint_without_a_setting_loads_with_this_optimizers(
    ranks: Pools, tmp_path: Path, form: str
) -> None:
    """D10: torch itself wants every key, and the planner for older checkpoints lets settings be."""
    assert ranks.run(2, load_without_a_key, str(tmp_path), form, "nesterov") == [False] * 2


# --- Parameters that were added -------------------------------------------------------------


def load_with_more(folder: str) -> str:
    model, optimizer = build(LAYOUTS["FSDP 2"])
    train(model, optimizer, range(2))
    save(folder, model, optimizer, "not flattened")
    saved = copy.deepcopy(optimizer.state_dict())
    due = whole_state(model, optimizer)

    fresh, _ = build(LAYOUTS["FSDP 2"])
    added = nn.Linear(6, 6, bias=False)
    fresh.added = added
    other = Muon(
        muon_param_groups(
            fresh,
            adamw={"lr": 0.01},
            overrides={"experts": {"algorithm": "muon", "momentum_dtype": torch.bfloat16}},
        ),
        momentum_dtype=torch.float64,
    )
    before = whole_state(fresh, other)
    with pytest.raises(CheckpointException) as caught:
        load(folder, fresh, other, "not flattened", OlderCheckpointPlanner())
    with pytest.raises(ValueError, match=r"missing added\.weight, not here none.*import_state"):
        other.load_state_dict(saved)
    assert_state_is(fresh, other, before)
    other.load_state_dict(import_state(other.state_dict(), saved))
    due["added.weight"] = {"momentum_buffer": torch.zeros(6, 6, dtype=torch.float64)}
    assert_state_is(fresh, other, due)
    return str(caught.value)


def test_an_added_parameter_is_named_and_starts_at_zero_if_asked(
    ranks: Pools, tmp_path: Path
) -> None:
    """D03, D09: nothing is half loaded, and no momentum is reset without a word."""
    for message in ranks.run(2, load_with_more, str(tmp_path)):
        due = "the checkpoint has no model.added.weight, optim.state.added.weight.momentum_buffer;"
        assert due in message


# --- Copies ---------------------------------------------------------------------------------


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_pickle(state: Any) -> Any:
    return pickle.loads(pickle.dumps(state))


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "torch.save, weights_only": through_a_file,
}


def go_on_from_copies(layout: str) -> None:
    for way in WAYS.values():
        model, optimizer = build(LAYOUTS[layout])
        train(model, optimizer, range(2))
        state = way(optimizer.state_dict())
        weights = {name: p.detach().clone() for name, p in named(model).items()}
        due = whole_state(model, optimizer)
        train(model, optimizer, range(2, 4))
        fresh, other = build(LAYOUTS[layout], lr=7.0)
        with torch.no_grad():
            for name, p in named(fresh).items():
                p.copy_(weights[name])
        other.load_state_dict(state)
        assert_state_is(fresh, other, due)
        train(fresh, other, range(2, 4))
        assert_equal(whole_weights(fresh), whole_weights(model))


def assert_equal(have: dict[str, Tensor], due: dict[str, Tensor]) -> None:
    assert all(torch.equal(have[name], due[name]) for name in due)


@pytest.mark.parametrize("layout", ["FSDP 2", "HSDP 2x2, momentum once", "FSDP x TP 2x2", "DDP 2"])
def test_a_copied_state_dict_goes_on_bit_for_bit(ranks: Pools, layout: str) -> None:
    """D01, D13: on ranks, where state are DTensors; through memory, pickle and files."""
    ranks.run(LAYOUTS[layout].num_ranks, go_on_from_copies, layout)


def copy_the_optimizer() -> None:
    model, optimizer = build(LAYOUTS["FSDP 2"])
    train(model, optimizer, range(2))
    params = [p for group in optimizer.param_groups for p in group["params"]]
    due = [{k: whole(v) for k, v in optimizer.state[p].items()} for p in params]
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        others = [p for group in copied.param_groups for p in group["params"]]
        assert not {id(p) for p in others} & {id(p) for p in params}
        for p, state in zip(others, due, strict=True):
            assert isinstance(p, DTensor)
            assert all(torch.equal(whole(copied.state[p][k]), state[k]) for k in state)
            p.grad = p.detach().clone()
        copied.step()
        assert copied.plan == optimizer.plan


def test_an_optimizer_on_ranks_is_copied_with_deepcopy_and_pickle(ranks: Pools) -> None:
    """D13: no process group is in the way, and the copy steps."""
    ranks.run(2, copy_the_optimizer)


# --- Misfits --------------------------------------------------------------------------------


def load_state_of_another_mesh() -> str:
    model, optimizer = build(LAYOUTS["FSDP 4"])
    train(model, optimizer, range(1))
    fresh, other = build(LAYOUTS["FSDP x TP 2x2"])
    before = whole_state(fresh, other)
    settings = [dict(group) for group in other.param_groups]
    with pytest.raises(ValueError, match="lies on mesh") as caught:
        other.load_state_dict(optimizer.state_dict())
    assert_state_is(fresh, other, before)
    assert [dict(group) for group in other.param_groups] == settings
    train(fresh, other, range(1))
    dist.barrier()
    return str(caught.value)


def test_state_of_another_mesh_is_refused_and_nothing_is_changed(ranks: Pools) -> None:
    """D07: and the error says how it can move."""
    for message in ranks.run(4, load_state_of_another_mesh):
        assert message.startswith("experts: state 'momentum_buffer' lies on mesh [0, 1, 2, 3]")
        assert "torch.distributed.checkpoint" in message


def test_the_model_has_every_kind_of_state() -> None:
    """So that the tests here are about AdamW, float64 and bfloat16 momentum, and a stack."""
    model, optimizer = build(LAYOUTS["one process"])
    dtypes = {
        name: state["momentum_buffer"].dtype
        for name, state in whole_state(model, optimizer).items()
        if "momentum_buffer" in state
    }
    assert isinstance(model, Model)
    assert dtypes == {
        "up.weight": torch.float64,
        "down.weight": torch.float64,
        "experts": torch.bfloat16,
    }
