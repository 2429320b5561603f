# SPDX-License-Identifier: Apache-2.0
"""One small model on every layout, trained, saved and loaded: what the tests of checkpoints share.

All ranks see the same batch, so that every layout has the gradients of one process, up to rounding.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from hyper_parallel import Muon, muon_param_groups

VOCABULARY, WIDTH, HIDDEN = 11, 6, 10

State = dict[str, dict[str, Tensor]]


class Model(nn.Module):
    """Matrices for Muon, among them a stack, and an embedding, a head and biases for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / WIDTH**0.5)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x + self.down(torch.tanh(self.up(x)))
        for i in range(3):
            x = x + torch.tanh(x @ self.experts[i])
        logits: Tensor = self.head(x)
        return logits


@dataclass(frozen=True)
class Layout:
    """How the model lies.

    Attributes:
        kind: ``"alone"``, ``"ddp"``, ``"fsdp"`` or ``"tp"`` (FSDP over it where the mesh is 2-D).
        mesh: Sizes of the mesh's axes.
        options: Arguments of the optimizer.
    """

    kind: str
    mesh: tuple[int, ...] = (1,)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Processes that it takes."""
        return int(torch.tensor(self.mesh).prod())


LAYOUTS = {
    "one process": Layout("alone"),
    "FSDP 1": Layout("fsdp", (1,)),
    "FSDP 2": Layout("fsdp", (2,)),
    "FSDP 3": Layout("fsdp", (3,)),
    "FSDP 4": Layout("fsdp", (4,)),
    "HSDP 2x2": Layout("fsdp", (2, 2)),
    "HSDP 2x2, momentum once": Layout("fsdp", (2, 2), {"shard_momentum": True}),
    "DDP 2": Layout("ddp", (2,)),
    "DDP 3, momentum once": Layout("ddp", (3,), {"shard_momentum": True}),
    "TP 2": Layout("tp", (2,)),
    "FSDP x TP 2x2": Layout("tp", (2, 2)),
}


_MESHES: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """The mesh of this shape over all ranks; made once per process."""
    names = ("outer", "inner")[-len(shape) :]
    if shape not in _MESHES:
        _MESHES[shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _MESHES[shape]


def build(layout: Layout, **options: Any) -> tuple[nn.Module, Muon]:
    """The model and its optimizer, both as at the start of a run.

    Momentum of the experts is kept in bfloat16, that of all others in float64: neither is the
    dtype of the parameters.
    """
    torch.manual_seed(0)
    model: nn.Module = Model()
    replicas = None
    if layout.kind == "fsdp":
        fully_shard(model, mesh=mesh_of(layout.mesh))
    elif layout.kind == "tp":
        mesh = mesh_of(layout.mesh)
        styles: dict[str, ParallelStyle] = {
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(model, mesh["inner"], styles)
        if len(layout.mesh) > 1:
            fully_shard(model, mesh=mesh["outer"])
    elif layout.kind == "ddp":
        replicas = mesh_of(layout.mesh)
        model = DistributedDataParallel(model)
    groups = muon_param_groups(
        model,
        adamw={"lr": 0.01},
        overrides={"experts": {"algorithm": "muon", "momentum_dtype": torch.bfloat16}},
    )
    settings: dict[str, Any] = {
        "lr": 0.05,
        "ns_dtype": torch.float64,
        "momentum_dtype": torch.float64,
        "replicate_mesh": replicas,
    }
    return model, Muon(groups, **settings | layout.options | options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps whose batch depends on their number only."""
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(VOCABULARY, (4, 5), generator=generator)
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: Tensor) -> Tensor:
    """A tensor as one process has it; every rank that holds a part calls."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def state_of(model: nn.Module, optimizer: Any) -> Iterator[Tensor]:
    """Weights, then momentum and moments, whole."""
    for p in model.parameters():
        yield whole(p)
        yield from (whole(value) for key, value in sorted(optimizer.state[p].items()))


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the name that all layouts share."""
    return {name.removeprefix("module."): p for name, p in model.named_parameters()}


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights, whole."""
    return {name: whole(p) for name, p in named(model).items()}


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """State of all parameters, whole."""
    return {
        name: {key: whole(value) for key, value in optimizer.state[p].items()}
        for name, p in named(model).items()
    }


def assert_state_is(
    model: nn.Module, optimizer: torch.optim.Optimizer, due: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Every rank's part has the bits and the dtype that it should have, and the layout to keep."""
    for name, param in named(model).items():
        state = optimizer.state[param]
        assert state.keys() == due[name].keys(), name
        for key, value in state.items():
            expected = due[name][key]
            assert value.dtype == expected.dtype, (name, key, value.dtype, expected.dtype)
            if key != "step" and isinstance(param, DTensor):
                assert isinstance(value, DTensor), (name, key)
            if isinstance(value, DTensor):
                assert value.shape == expected.shape, (name, key)
                cut = distribute_tensor(
                    expected, value.device_mesh, value.placements, src_data_rank=None
                )
                value, expected = value.to_local(), cut.to_local()
            assert torch.equal(value, expected), (name, key, dist.get_rank())
