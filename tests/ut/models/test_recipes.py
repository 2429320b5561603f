# SPDX-License-Identifier: Apache-2.0
"""Recipes put parameters where torch itself puts them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hyper_parallel.core.optimizer.dtensor_layout import LayoutReader
from hyper_parallel.models.errors import InputError
from hyper_parallel.models.mesh_axes import parse_mesh
from hyper_parallel.models.model_param import Model, ModelParam
from hyper_parallel.models.module_source import module_params
from hyper_parallel.models.overrides import override
from hyper_parallel.models.planning import PlanSettings, placed_params, plan_model
from hyper_parallel.models.recipes import check_heads, parse_placements, stage_params
from tests.fake_group import fake_process_group


class Block(nn.Module):
    """The projections of a transformer block; it is never run."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 32, bias=False)
        self.o_proj = nn.Linear(32, 16, bias=False)
        self.gate_proj = nn.Linear(16, 24)
        self.down_proj = nn.Linear(24, 16, bias=False)
        self.router = nn.Linear(16, 6, bias=False)


class Experts(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(number, 16, 8))
        self.down_proj = nn.Parameter(torch.empty(number, 8, 8))


class Mixture(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.gate = nn.Linear(8, number, bias=False)
        self.experts = Experts(number)


TP_PLAN = {
    "q_proj": ColwiseParallel(),
    "gate_proj": ColwiseParallel(),
    "o_proj": RowwiseParallel(),
    "down_proj": RowwiseParallel(),
}


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.children():
        parallelize_module(block, mesh, TP_PLAN)
        # What no style cuts is on every rank of the axis, as a DTensor, as torchtitan has it.
        distribute_module(block.get_submodule("router"), mesh)


def layouts_of_torch(model: nn.Module) -> dict[str, Any]:
    reader = LayoutReader(dist.get_rank())
    return {
        name: reader.read(param, name) for name, param in model.named_parameters() if param.ndim > 1
    }


def layouts_of_recipe(model: nn.Module, mesh: str, rank: int = 0) -> dict[str, Any]:
    described = Model(name="tiny", params=module_params(model), source="here")
    _, placed = placed_params(described, parse_mesh(mesh), rank=rank, stage=None)
    return {p.param.name: p.layout for p in placed if len(p.param.shape) > 1}


def blocks() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(Block(), Block())


def apply_fsdp(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (8,)))


def apply_hsdp(model: nn.Module) -> None:
    names = ("dp_replicate", "dp_shard")
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=names))


def apply_tp(model: nn.Module) -> None:
    tensor_parallel(model, init_device_mesh("cpu", (8,)))


def apply_fsdp_tp(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp_shard", "tp"))
    tensor_parallel(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp_shard"])


def apply_hsdp_tp(model: nn.Module) -> None:
    names = ("dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    tensor_parallel(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])


@pytest.mark.parametrize(
    ("mesh", "apply"),
    [
        ("dp_shard=8", apply_fsdp),
        ("dp_replicate=2,dp_shard=4", apply_hsdp),
        ("dp_shard=4,cp=2", apply_fsdp),
        ("tp=8", apply_tp),
        ("dp_shard=4,tp=2", apply_fsdp_tp),
        ("dp_replicate=2,dp_shard=2,tp=2", apply_hsdp_tp),
    ],
)
@pytest.mark.parametrize("rank", [0, 5])
def test_recipe_equals_what_torch_does(
    mesh: str, apply: Callable[[nn.Module], None], rank: int
) -> None:
    expected = layouts_of_recipe(blocks(), mesh, rank)
    model = blocks()
    with fake_process_group(8, rank):
        apply(model)
        assert layouts_of_torch(model) == expected


@pytest.mark.parametrize(("num_experts", "dim"), [(16, 0), (2, 1)])
@pytest.mark.parametrize("is_replicated", [False, True])
def test_expert_recipe_equals_what_torch_does(
    num_experts: int, dim: int, *, is_replicated: bool
) -> None:
    """Stacks over ``ep``, then ``fully_shard`` over the rest, by rows where experts are few."""
    shape = (2, 2, 2) if is_replicated else (4, 2)
    names = ("dp_replicate", "dp_shard_mod_ep", "ep")[-len(shape) :]
    with torch.device("meta"):
        model = Mixture(num_experts)
    replicate = "dp_replicate=2,dp_shard=4" if is_replicated else "dp_shard=8"
    expected = layouts_of_recipe(model, f"{replicate},ep=2", 3)
    with fake_process_group(8, 3):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        experts = model.experts
        for name, stack in list(experts.named_parameters()):
            cut = distribute_tensor(stack, mesh["ep"], [Shard(0)], src_data_rank=None)
            setattr(experts, name, nn.Parameter(cut))
        fully_shard(experts, mesh=mesh[names[:-1]], shard_placement_fn=lambda _param: Shard(dim))
        apply_hsdp(model) if is_replicated else apply_fsdp(model)
        assert layouts_of_torch(model) == expected


def test_experts_that_are_parameters_of_their_own_live_where_they_are() -> None:
    params = tuple(
        ModelParam(name=f"mlp.experts.{i}.up_proj.weight", shape=(8, 4), algorithm="muon", role="")
        for i in range(8)
    )
    model = Model(name="list", params=params, source="here")
    parallelism = parse_mesh("dp_replicate=2,dp_shard=8,ep=4")
    _, placed = placed_params(model, parallelism, rank=6, stage=None)
    assert [p.param.name.split(".")[2] for p in placed] == ["4", "5"]
    assert {p.layout.mesh.members for p in placed} == {(2, 6, 10, 14)}
    plan = plan_model(model, parallelism, PlanSettings(), rank=6).plan
    assert {m.owner for b in plan.buckets for m in b.matrices} <= {2, 6, 10, 14}


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ("0.q_proj.weight=tp:R", "S(0) R"),
        ("0.q_proj.weight=dp_shard:S(1)", "S(1) S(0)"),
        ("0.q_proj.weight=dp_shard:S(0/1)", "S(0) S(0)"),
        ("0.q_proj.*=tp:S(-1),dp_shard:S(-1)", "S(1/2) S(1)"),
    ],
)
def test_placement_overrides_one_axis_and_fsdp_follows(placement: str, expected: str) -> None:
    model = Model(name="tiny", params=module_params(blocks()), source="here")
    changed = override(model, [placement], [])
    _, placed = placed_params(changed, parse_mesh("dp_shard=4,tp=2"), rank=0, stage=None)
    texts = {p.param.name: p.layout.placements_text() for p in placed}
    assert texts["0.q_proj.weight"] == expected
    assert texts["1.q_proj.weight"] == "S(0/2) S(0)"


def test_view_override_makes_other_matrices() -> None:
    model = Model(name="tiny", params=module_params(blocks()), source="here")
    changed = override(model, [], ["*.q_proj.weight=heads:4"])
    plan = plan_model(changed, parse_mesh("dp_shard=2"), PlanSettings()).plan
    assert sum(len(bucket.matrices) for bucket in plan.buckets) == 8 - 2 + 8 + 2


def layered(num_layers: int) -> Model:
    names = ["embed", *(f"layers.{i}.up" for i in range(num_layers)), "head"]
    params = [ModelParam(name=name, shape=(8, 8), algorithm="muon", role="") for name in names]
    return Model(name="layered", params=tuple(params), source="here")


def test_stages_are_consecutive_layers_with_the_ends_outside() -> None:
    stages = stage_params(layered(5), parse_mesh("pp=2,dp_shard=2"))
    names = [[param.name for param in stage] for stage in stages]
    assert names == [
        ["embed", "layers.0.up", "layers.1.up", "layers.2.up"],
        ["layers.3.up", "layers.4.up", "head"],
    ]


def test_a_stage_is_planned_on_its_own_ranks() -> None:
    parallelism = parse_mesh("pp=2,dp_shard=4")
    plan = plan_model(layered(4), parallelism, PlanSettings(), stage=1).plan
    assert {bucket.ranks for bucket in plan.buckets} == {(4, 5, 6, 7)}
    assert plan.rank in (4, 5, 6, 7)
    assert plan_model(layered(4), parallelism, PlanSettings(), rank=6).stage == 1


@pytest.mark.parametrize(("tp", "what"), [(3, "8 attention heads"), (4, "2 key/value heads")])
def test_tp_must_divide_heads(tp: int, what: str) -> None:
    model = Model(name="m", params=(), source="here", num_heads=8, num_kv_heads=2)
    with pytest.raises(InputError, match=f"tp={tp} does not divide the {what} of m"):
        check_heads(model, parse_mesh(f"tp={tp}"))


def test_placements_are_replicate_or_shard() -> None:
    assert parse_placements("tp:Replicate(),dp_shard:Shard(1)") == {
        "tp": "Replicate()",
        "dp_shard": "Shard(1)",
    }
    with pytest.raises(InputError, match=r"placement must be R, S\(dim\)"):
        parse_placements("tp:P")
