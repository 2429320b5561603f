# SPDX-License-Identifier: Apache-2.0
"""The groups as an optimizer takes them, the report and the warnings."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hyper_parallel.core.optimizer.param_groups import muon_param_groups
from tests.fake_group import fake_process_group
from tests.ut.core.optimizer.sorted_models import MUON, Model, names, reasons


@pytest.fixture
def ranks() -> Iterator[None]:
    with fake_process_group(4):
        yield


def test_every_trainable_parameter_is_in_exactly_one_group() -> None:
    """A22: no parameter lost or in two groups."""
    model = Model()
    model.stem.weight.requires_grad_(False)
    groups = muon_param_groups(model, overrides={"layers.0.*.weight": {"lr": 0.5}})
    listed = [id(param) for group in groups for _, param in group["params"]]
    trainable = {id(param) for param in model.parameters() if param.requires_grad}
    assert len(listed) == len(set(listed))
    assert set(listed) == trainable
    assert all(group["params"] for group in groups)
    assert [record.fqn for record in groups.report] == [n for n, _ in model.named_parameters()]


def test_an_optimizer_takes_the_groups_and_keeps_the_names() -> None:
    model = Model()
    optimizer = torch.optim.SGD(muon_param_groups(model), lr=0.1)
    kept = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(kept) == sorted(name for name, _ in model.named_parameters())


def test_groups_are_made_of_names_and_plain_values() -> None:
    groups = muon_param_groups(Model())
    assert isinstance(groups, list)
    assert all(type(group) is dict for group in groups)
    keys = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    assert keys == [
        {"algorithm": "adamw"},
        {"algorithm": "muon", "matrix_view": "flatten"},
        {"algorithm": "muon"},
    ]


def test_global_shapes_decide_for_distributed_parameters(ranks: None) -> None:
    """A21: an embedding of 12 rows holds 3 here, and a matrix of 8 rows holds 2."""
    expected = [(n, tuple(p.shape)) for n, p in Model().named_parameters()]
    model = Model()
    mesh = init_device_mesh("cpu", (4,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    temperature = model.temperature  # fully_shard takes no 0-D parameters
    fully_shard(model, mesh=mesh, ignored_params={temperature})
    groups = muon_param_groups(model)
    assert [(r.fqn, r.shape) for r in groups.report] == expected
    assert set(names(groups, "muon")) == MUON
    params = dict(pair for group in groups for pair in group["params"])
    assert all(isinstance(params[name], DTensor) for name in MUON)
    assert {r.fqn for r in groups.report if not r.is_distributed} == {"temperature"}


def test_plain_tensors_on_several_ranks_are_warned_of(ranks: None) -> None:
    """C23: an optimizer built before fully_shard moves nothing."""
    with pytest.warns(UserWarning, match=r"2 of 2 .*after parallelize_module.*replicate_mesh="):
        muon_param_groups(nn.Linear(4, 4))


def test_parameters_left_unsharded_by_a_forward_are_warned_of(ranks: None) -> None:
    """C24: after a forward the root shows plain parameters, the blocks do not."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    muon_param_groups(model)
    model(torch.zeros(2, 4))
    with pytest.warns(UserWarning, match=r"1 of 2 .* '1.weight', on 4 ranks.* before the first"):
        muon_param_groups(model)


def test_plain_parameters_outside_of_fully_shard_may_be_meant(ranks: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (4,)))
    assert names(muon_param_groups(model), "muon") == ["0.weight", "1.weight"]


def test_ddp_says_for_itself_that_plain_tensors_are_replicas(ranks: None) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    assert names(muon_param_groups(model), "muon") == ["module.weight"]


def test_finding_no_matrix_is_warned_of() -> None:
    """A21: FSDP1 shows one flat vector, which an ndim test sends to AdamW without a word."""
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(model.weight.detach().flatten())
    with pytest.warns(UserWarning, match="none of 2 .*fully_shard"):
        groups = muon_param_groups(model)
    assert "flattened by FSDP1 or ZeRO-3" in reasons(groups)["weight"]


def test_sending_all_matrices_to_adamw_on_purpose_warns_of_nothing() -> None:
    groups = muon_param_groups(Model(), overrides={"*": "adamw"})
    assert names(groups, "muon") == []


def test_frozen_parameters_are_reported_and_in_no_group() -> None:
    """C22: fine-tuning with most weights frozen made a group of frozen parameters only."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    model.requires_grad_(False)
    model[1].weight.requires_grad_(True)
    groups = muon_param_groups(model)
    assert [(g["algorithm"], [n for n, _ in g["params"]]) for g in groups] == [
        ("muon", ["1.weight"])
    ]
    assert [r.algorithm for r in groups.report] == ["frozen"] * 2 + ["muon"] + ["frozen"] * 3


def test_the_report_reads_as_a_table() -> None:
    model = nn.ModuleDict({"conv": nn.Conv1d(2, 3, 2), "attn": nn.MultiheadAttention(4, 2)})
    model["attn"].out_proj.requires_grad_(False)
    groups = muon_param_groups(model)
    assert str(groups) == groups.report_table()
    assert groups.report_table().splitlines() == [
        "parameter             shape  algorithm  matrix view  reason",
        "conv.weight           3x2x2  muon       flatten      Conv1d, one row per output channel",
        "conv.bias             3      adamw                   1-D (bias of Conv1d)",
        "attn.in_proj_weight   12x4   muon       split 4+4+4  fused matrices of MultiheadAttention",
        "attn.in_proj_bias     12     adamw                   "
        "1-D (in_proj_bias of MultiheadAttention)",
        "attn.out_proj.weight  4x4    frozen                  requires_grad is False",
        "attn.out_proj.bias    4      frozen                  requires_grad is False",
        "",
        "muon: 2 parameters, 60 elements, 2 of them plain tensors",
        "adamw: 2 parameters, 15 elements, 2 of them plain tensors",
        "frozen: 2 parameters, 20 elements, 2 of them plain tensors",
    ]
    assert repr(groups) == "MuonParamGroups(muon: 1, adamw: 2, muon: 1)"
