# SPDX-License-Identifier: Apache-2.0
"""Whom we run against: each a small adapter to one interface.

All take the same parameters and the same settings (learning rate 0.02 adjusted by
``sqrt(max(1, rows / cols))``, Nesterov momentum 0.95, five Newton-Schulz steps in bfloat16). Weight
decay is zero, since its meaning differs from one to the next.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from benchmarks.steps_work import COEFFICIENTS, LR, MOMENTUM, NS_STEPS, lr_of, newton_schulz
from hyper_parallel import Muon


class Stepper(Protocol):
    """What all contenders are reduced to."""

    def step(self) -> Any:
        """Update all parameters from their gradients."""
        ...


@dataclass(frozen=True)
class Contender:
    """An optimizer to measure.

    Attributes:
        title: Name in tables.
        package: Package on PyPI that it comes in.
        build: From the parameters and the mesh of all ranks to a stepper, on every rank.
    """

    title: str
    package: str
    build: Callable[[Sequence[Tensor], DeviceMesh], Stepper]

    def version(self) -> str:
        """Version of the package."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return "not installed"


class GatherAndRepeat:
    """What most trainers ship: gather each matrix, orthogonalize it on every rank, keep a slice.

    Args:
        params: DTensors or plain tensors.
        wire_dtype: Dtype in which a matrix is gathered. None means as it is, float32.
    """

    def __init__(self, params: Sequence[Tensor], wire_dtype: torch.dtype | None = None) -> None:
        self._params = params
        self._wire_dtype = wire_dtype
        self._momenta = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters, one after the other."""
        for param, momentum in zip(self._params, self._momenta, strict=True):
            assert param.grad is not None
            momentum.lerp_(param.grad, 1 - MOMENTUM)
            direction = param.grad.lerp(momentum, MOMENTUM)
            if self._wire_dtype is not None:
                direction = direction.to(self._wire_dtype)
            whole = direction.full_tensor() if isinstance(direction, DTensor) else direction
            update = newton_schulz(whole, torch.bfloat16)
            if isinstance(param, DTensor):
                # Every rank has all of it, so that this cuts and sends nothing.
                update = distribute_tensor(
                    update, param.device_mesh, param.placements, src_data_rank=None
                )
            param.add_(update, alpha=-lr_of(param.shape))


def _ours(params: Sequence[Tensor], mesh: DeviceMesh, **options: Any) -> Stepper:
    plain = any(not isinstance(p, DTensor) for p in params)
    return Muon(
        params,
        lr=LR,
        weight_decay=0.0,
        momentum=MOMENTUM,
        ns_steps=NS_STEPS,
        ns_coefficients=COEFFICIENTS,
        replicate_mesh=mesh if plain else None,
        **options,
    )


def _torch_muon(params: Sequence[Tensor], _: DeviceMesh) -> Stepper:
    return torch.optim.Muon(list(params), lr=LR, weight_decay=0.0, momentum=MOMENTUM)


def _muon_fsdp2(params: Sequence[Tensor], _: DeviceMesh) -> Stepper:
    group = {
        "params": list(params),
        "use_muon": True,
        "lr": LR,
        "momentum": MOMENTUM,
        "weight_decay": 0.0,
        "rms_scale": False,
        "ns_steps": NS_STEPS,
    }
    optimizer: Stepper = import_module("muon_fsdp2").Muon([group])
    return optimizer


def _muonium(params: Sequence[Tensor], _: DeviceMesh) -> Stepper:
    optimizer: Stepper = import_module("muonium").Muon(
        list(params),
        lr=LR,
        wd=0.0,
        momentum=MOMENTUM,
        ns_steps=NS_STEPS,
        use_cautious_wd=False,
        orthogonalization_strategy="newton_schulz",
    )
    return optimizer


CONTENDERS = {
    "ours": Contender("hyper_parallel", "hyper-parallel", _ours),
    "ours-small": Contender(
        "hyper_parallel, 1 MiB buckets",
        "hyper-parallel",
        partial(_ours, bucket_bytes=2**20),
    ),
    "gather": Contender("gather and repeat", "torch", lambda params, _: GatherAndRepeat(params)),
    "gather-bf16": Contender(
        "gather bf16 and repeat",
        "torch",
        lambda params, _: GatherAndRepeat(params, torch.bfloat16),
    ),
    "torch": Contender("torch.optim.Muon", "torch", _torch_muon),
    "muon-fsdp2": Contender("muon-fsdp2", "muon-fsdp2", _muon_fsdp2),
    "muonium": Contender("muonium", "muonium", _muonium),
}
"""All contenders by their name on the command line; ratios are to ``gather``."""

BASELINE = "gather"
