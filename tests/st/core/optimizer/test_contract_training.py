# SPDX-License-Identifier: Apache-2.0
"""How models are trained with FSDP2 and DDP: accumulation, offloading, mixed precision, meta."""

import copy
import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler, swa_utils
from typing_extensions import override

from hyper_parallel import Muon, muon_param_groups
from hyper_parallel.core.optimizer.weight_rounding import RESIDUAL
from tests.pool import Pools

pytestmark = pytest.mark.dist


class Block(nn.Module):
    """Two matrices for Muon and a norm for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10, bias=False)
        self.down = nn.Linear(10, 6, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.up(self.norm(x)).tanh())
        return result


def blocks(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(dtype)


@cache
def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("x", "y")[: len(shape)])


def shard(model: nn.Sequential, mesh: DeviceMesh, **policies: Any) -> Any:
    for module in (*model, model):
        fully_shard(module, mesh=mesh, **policies)
    return model


def muon(model: nn.Module, **settings: Any) -> Muon:
    settings = {"lr": 0.02, "ns_dtype": torch.float64, **settings}
    return Muon(muon_param_groups(model), **settings)


def loss(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).square().mean()


def batch(seed: int, num_rows: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows for every rank: ``(ranks, rows, 6)``, the same tensor on all of them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(dist.get_world_size(), num_rows, 6, generator=generator)
    return rows.to(dtype)


def step_on(model: Callable[[Tensor], Tensor], optimizer: Muon, x: Tensor) -> None:
    optimizer.zero_grad()
    loss(model, x).backward()
    optimizer.step()


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def assert_same(model: nn.Module, alone: nn.Module) -> None:
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(p), q.detach(), rtol=1e-7, atol=1e-9)


def bits(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for p in model.parameters():
        local: Any = p.to_local() if isinstance(p, DTensor) else p
        digest.update(local.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# --- Gradient accumulation ------------------------------------------------------------------


def accumulate(kind: str) -> None:
    alone = blocks()
    world = dist.get_world_size()
    model: Any = blocks()
    mesh = None
    if kind == "DDP":
        mesh = mesh_of(world)
        model = DistributedDataParallel(model)
    else:
        shard(model, mesh_of(2, 2) if kind == "HSDP" else mesh_of(world))
    optimizer = muon(model, replicate_mesh=mesh)
    due = muon(alone)
    for start in (0, 3):
        optimizer.zero_grad()
        micro = [batch(start + i) for i in range(3)]
        for i, x in enumerate(micro):
            last = i == 2
            if kind == "FSDP":
                model.set_requires_gradient_sync(last)
            elif kind == "HSDP":
                model.set_requires_all_reduce(last)
            with model.no_sync() if kind == "DDP" and not last else nullcontext():
                (loss(model, x[dist.get_rank()]) / 3).backward()
        optimizer.step()
        due.zero_grad()
        loss(alone, torch.cat(micro)).backward()
        due.step()
    assert_same(model, alone)


@pytest.mark.parametrize(("kind", "world_size"), [("FSDP", 2), ("HSDP", 4), ("DDP", 2)])
def test_micro_batches_add_up_to_the_large_batch(ranks: Pools, kind: str, world_size: int) -> None:
    """E10: reduced with the last micro batch only, two steps, against one process."""
    ranks.run(world_size, accumulate, kind)


def step_too_early() -> None:
    model = shard(blocks(), mesh_of(dist.get_world_size()))
    optimizer = muon(model)
    before = bits(model)
    model.set_requires_gradient_sync(False)
    loss(model, batch(0)[dist.get_rank()]).backward()
    with pytest.warns(UserWarning, match=r"without being reduced \(set_requires_gradient_sync"):
        optimizer.step()
    assert bits(model) == before


def test_a_step_before_gradients_are_reduced_says_so_and_does_nothing(ranks: Pools) -> None:
    """E10: the flag was left off, and there was nothing to step on."""
    ranks.run(2, step_too_early)


# --- Policies of FSDP2 ----------------------------------------------------------------------


def offloaded() -> None:
    alone = blocks()
    model = shard(blocks(), mesh_of(2), offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer, due = muon(model), muon(alone)
    for seed in range(2):
        x = batch(seed)
        step_on(model, optimizer, x[dist.get_rank()])
        step_on(alone, due, x)
    assert_same(model, alone)
    for p, state in optimizer.state.items():
        for key, value in state.items():
            assert value.device == p.device
            assert isinstance(value, DTensor) == (key != "step")


def test_offloaded_parameters_are_stepped_on_where_they_lie(ranks: Pools) -> None:
    """C20: offloading flattened weights, or left state on the device that they had left."""
    ranks.run(2, offloaded)


def mixed_precision() -> None:
    alone = blocks(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(blocks(torch.float32), mesh_of(2), mp_policy=policy)
    settings = {"ns_dtype": torch.float32, "weight_decay": 0.0}
    optimizer, due = muon(model, **settings), muon(alone, **settings)
    start = [full(p).clone() for p in model.parameters()]
    for seed in range(2):
        x = batch(seed, 8, torch.float32)
        optimizer.zero_grad()
        due.zero_grad()
        loss(model, x[dist.get_rank()].bfloat16()).backward()
        loss(alone, x).backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.step()
        due.step()
    moved = zip(model.parameters(), alone.parameters(), start, strict=True)
    for p, q, first in moved:
        if p.ndim == 2:  # the norm's moments are signs at first, which bf16 may turn over
            assert (full(p) - q).norm() < 0.3 * (q - first).norm()
    tensors = [t for s in optimizer.state.values() for t in s.values()]
    assert all(t.dtype == torch.float32 for t in [*tensors, *model.parameters()])


def test_mixed_precision_keeps_float32_weights_and_state(ranks: Pools) -> None:
    """A32: the forward is in bfloat16, the weights that are stepped on are not."""
    ranks.run(2, mixed_precision)


# --- Models that are made or run in other ways -----------------------------------------------


def trained_in_another_way(how: str) -> None:
    alone = blocks()
    if how == "meta":
        with torch.device("meta"):
            model: Any = blocks()
        shard(model, mesh_of(2))
        model.to_empty(device="cpu")
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            p.detach().copy_(
                DTensor.from_local(q.detach().chunk(2)[dist.get_rank()], mesh_of(2), [Shard(0)])
            )
    elif how == "checkpointed":
        model = nn.Sequential(*[checkpoint_wrapper(block) for block in blocks()])
        shard(model, mesh_of(2))
    else:
        assert how == "compiled"
        torch._dynamo.reset()
        model = shard(blocks(), mesh_of(2))
        for block in model:
            block.compile(backend="eager")
    optimizer, due = muon(model), muon(alone)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.01], total_steps=3)
    due_scheduler = lr_scheduler.OneCycleLR(due, max_lr=[0.05, 0.01], total_steps=3)
    cycled = []
    for seed in range(3):
        x = batch(seed)
        step_on(model, optimizer, x[dist.get_rank()])
        step_on(alone, due, x)
        cycled.append(optimizer.param_groups[0]["lr"])
        if seed < 2:
            scheduler.step()
            due_scheduler.step()
    assert len(set(cycled)) == 3
    assert_same(model, alone)


@pytest.mark.parametrize("how", ["meta", "checkpointed", "compiled"])
def test_a_sharded_model_trains_alike_however_it_is_made(ranks: Pools, how: str) -> None:
    """C24: meta device, recomputed activations, compiled blocks; with a schedule of momentum."""
    ranks.run(2, trained_in_another_way, how)


def moving_average() -> None:
    model = shard(blocks(), mesh_of(2))
    optimizer = muon(model)
    averages = [p.detach().clone() for p in model.parameters()]
    due = [full(a).clone() for a in averages]
    update: Any = swa_utils.get_ema_multi_avg_fn(0.75)
    for seed in range(2):
        optimizer.zero_grad()
        loss(model, batch(seed)[dist.get_rank()]).backward()
        optimizer.step()
        update(averages, [p.detach() for p in model.parameters()], seed)
        due = [0.75 * d + 0.25 * full(p) for d, p in zip(due, model.parameters(), strict=True)]
    for average, d in zip(averages, due, strict=True):
        assert isinstance(average, DTensor)
        torch.testing.assert_close(full(average), d)


def test_a_moving_average_of_sharded_weights_is_sharded(ranks: Pools) -> None:
    """FSDP2 models cannot be copied; torch's average of their parameters works."""
    ranks.run(2, moving_average)


# --- Half-precision weights -----------------------------------------------------------------


def compensated(shape: tuple[int, ...]) -> tuple[str, str]:
    settings: dict[str, Any] = {
        "lr": 2e-5,
        "weight_decay": 0.0,
        "ns_dtype": torch.float32,
        "momentum_dtype": torch.float32,
    }
    model = shard(blocks(torch.bfloat16), mesh_of(*shape))
    wide = blocks(torch.bfloat16).float()
    optimizer = muon(model, weight_rounding="compensated", **settings)
    due = muon(wide, **settings)
    start = [q.detach().clone() for q in wide.parameters()]
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        for p, q in zip(model.parameters(), wide.parameters(), strict=True):
            whole = (torch.randn(q.shape, generator=generator) * 0.3 + 1).bfloat16()
            q.grad = whole.float()
            mesh, placements = p.device_mesh, p.placements
            p.grad = torch.distributed.tensor.distribute_tensor(
                whole, mesh, placements, src_data_rank=None
            )
        optimizer.step()
        due.step()
    for p, q, first in zip(model.parameters(), wide.parameters(), start, strict=True):
        whole = full(p).float() + full(optimizer.state[p][RESIDUAL]).float()
        assert (whole - q).norm() < 0.05 * (q - first).norm()
    held = {p: {k: full(v).clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other = muon(model, weight_rounding="compensated", **settings)
    set_optimizer_state_dict(model, other, saved)
    for p, state in held.items():
        for key, value in state.items():
            loaded = other.state[p][key]
            assert loaded.dtype == value.dtype
            assert torch.equal(full(loaded), value)
    return bits(model), ",".join(sorted({key for state in held.values() for key in state}))


@pytest.mark.parametrize(("world_size", "shape"), [(2, (2,)), (4, (2, 2))])
def test_compensated_weights_are_those_of_one_process_and_alike_on_replicas(
    ranks: Pools, world_size: int, shape: tuple[int, ...]
) -> None:
    """A32, A09, D03: small updates of sharded bfloat16 weights add up, on all replicas alike.

    Residuals and moments go through a distributed state dict with their bits and dtypes.
    """
    found = ranks.run(world_size, compensated, shape)
    shards = shape[-1]
    for rank, held in enumerate(found):
        assert held == found[rank % shards]


# --- Meshes that are not what they seem -------------------------------------------------------


def strange_mesh(algorithm: str) -> str:
    mesh = DeviceMesh("cpu", torch.tensor([dist.get_rank(), 7]), _init_backend=False)
    p = nn.Parameter(DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False))
    with pytest.raises(ValueError, match="w: its mesh") as caught:
        Muon([{"params": [("w", p)], "algorithm": algorithm}])
    return str(caught.value)


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_mesh_of_ranks_that_do_not_run_is_refused(ranks: Pools, algorithm: str) -> None:
    """E11: ranks made up for the other cells of a mesh were found at the first collective."""
    for message in ranks.run(2, strange_mesh, algorithm):
        assert "7]" in message
        assert "only 2 processes" in message
