# SPDX-License-Identifier: Apache-2.0
"""State on ranks: laid out like the parameter, or finer, and a run goes on from it bit for bit."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from typing_extensions import override

from hyper_parallel import Muon, muon_param_groups
from hyper_parallel.core.optimizer.torch_private import StridedShard
from tests.dist import run_ranks

pytestmark = pytest.mark.dist

SHAPES = ((5, 3), (8, 6), (1, 4), (3, 4, 6))
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "FSDP": ((4,), (Shard(0),)),
    "HSDP": ((2, 2), (Replicate(), Shard(0))),
    "FSDP over TP": ((2, 2), (StridedShard(0, split_factor=2), Shard(0))),
    "DDP": ((4,), (Replicate(),)),
}


def params_on(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> list[Any]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", mesh_shape)
    whole = [torch.randn(shape) for shape in SHAPES]
    return [nn.Parameter(distribute_tensor(w, mesh, placements, src_data_rank=None)) for w in whole]


def step(optimizer: Muon, params: list[Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        whole = torch.randn(p.shape, generator=generator)
        p.grad = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
    optimizer.step()


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def continue_from_a_copy(
    mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], shard_momentum: bool
) -> None:
    options: dict[str, Any] = {"share_replicas": True, "shard_momentum": shard_momentum}
    params = params_on(mesh_shape, placements)
    optimizer = Muon(params, **options)
    step(optimizer, params, 1)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded_state = torch.load(file, weights_only=False)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    other = Muon(others, **options)
    other.load_state_dict(loaded_state)
    third_params = copy.deepcopy(params)
    third = Muon(third_params, share_replicas=True, shard_momentum=not shard_momentum)
    third.load_state_dict(optimizer.state_dict())  # the momentum finds its other layout
    for seed in (2, 3):
        step(optimizer, params, seed)
        step(other, others, seed)
        step(third, third_params, seed)
    for p, q, r in zip(params, others, third_params, strict=True):
        assert torch.equal(local(p), local(q))
        assert torch.equal(local(p), local(r))
        mine = optimizer.state[p]["momentum_buffer"]
        assert torch.equal(local(mine), local(other.state[q]["momentum_buffer"]))
        if shard_momentum and Replicate() in placements and p.numel() > 4:
            assert local(mine).numel() < local(p).numel() or dist.get_rank() > 0


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shard_momentum", [False, True])
def test_a_loaded_optimizer_goes_on_bit_for_bit(name: str, shard_momentum: bool) -> None:
    """D01, D03, D05: also where momentum is kept once over the replicas, and where that changes."""
    run_ranks(4, continue_from_a_copy, *LAYOUTS[name], shard_momentum)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 9, bias=False)
        self.back = nn.Linear(9, 6)
        self.head = nn.Linear(6, 11)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.back(torch.tanh(self.hidden(self.table(tokens)))))
        return logits


def sharded_model() -> tuple[Model, Muon]:
    torch.manual_seed(0)
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    groups = muon_param_groups(model, adamw={"lr": 0.01})
    return model, Muon(groups, lr=0.05, momentum_dtype=torch.float64, ns_dtype=torch.float32)


def train(model: Model, optimizer: Muon, seeds: range) -> None:
    for seed in seeds:
        tokens = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(seed))
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole_weights(model: nn.Module) -> dict[str, list[float]]:
    named: dict[str, Any] = dict(model.named_parameters())
    return {name: p.full_tensor().flatten().tolist() for name, p in named.items()}


def save(folder: str) -> dict[str, list[float]]:
    model, optimizer = sharded_model()
    train(model, optimizer, range(3))
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp_save(state, checkpoint_id=folder)
    train(model, optimizer, range(3, 6))
    return whole_weights(model)


def load(folder: str) -> dict[str, list[float]]:
    model, optimizer = sharded_model()
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp_load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for group in optimizer.param_groups:
        for p in group["params"]:
            if group["algorithm"] == "muon":
                assert optimizer.state[p]["momentum_buffer"].dtype == torch.float64
    train(model, optimizer, range(3, 6))
    return whole_weights(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_ranks", [2, 3, 1])
def test_a_distributed_checkpoint_goes_on_with_any_number_of_ranks(
    tmp_path: Path, num_ranks: int
) -> None:
    """D07: saved by two ranks, through PyTorch's own checkpoint; momentum keeps its dtype."""
    uninterrupted = run_ranks(2, save, str(tmp_path))[0]
    resumed = run_ranks(num_ranks, load, str(tmp_path))[0]
    for name, values in uninterrupted.items():
        if num_ranks == 2:
            assert resumed[name] == values
        torch.testing.assert_close(
            torch.tensor(resumed[name]), torch.tensor(values), rtol=1e-4, atol=1e-5
        )
