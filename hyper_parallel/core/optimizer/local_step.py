# SPDX-License-Identifier: Apache-2.0
"""One Muon step as this rank's local tensors see it. Knows parts of tensors, but no ranks."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.core.optimizer.bucket import Orthogonalization
from hyper_parallel.core.optimizer.dtensor_layout import (
    local_tensor,
    placements_text,
    same_layout,
)
from hyper_parallel.core.optimizer.layout import ParamLayout
from hyper_parallel.core.optimizer.packing import Part
from hyper_parallel.core.optimizer.polar import orthogonalize_with_schedule
from hyper_parallel.core.optimizer.update_rule import (
    commit_momentum,
    commit_update,
    directions,
    lr_ratio,
)

_AGREED_KEYS = ("lr", "weight_decay", "momentum", "nesterov", "adjust_lr_fn", "momentum_dtype")


@dataclass(frozen=True, slots=True)
class MuonParam:
    """A parameter that Muon steps on.

    Attributes:
        name: What to call it.
        param: The parameter.
        group: Its parameter group; read at every step, so schedulers are heard.
        local_shape: Shape of its local tensor when the plan was made.
        source: Layout of its momentum, if that is cut finer than the parameter.
    """

    name: str
    param: Tensor
    group: Mapping[str, Any]
    local_shape: tuple[int, ...]
    source: ParamLayout | None = None


class LocalStep:
    """Reads gradients once, and then answers what the executor asks.

    Args:
        params: All Muon parameters, in the plan's order.
        buffers: Their momentum.
    """

    def __init__(self, params: Sequence[MuonParam], buffers: Sequence[Tensor]) -> None:
        self._params = params
        self._failure = next(filter(None, map(_why_not, params)), None)
        self._weights = [local_tensor(entry.param) for entry in params]
        self._buffers = [local_tensor(buffer) for buffer in buffers]
        self._grads = [
            None if entry.param.grad is None else local_tensor(entry.param.grad) for entry in params
        ]

    def failure(self) -> str | None:
        """Why this rank cannot step; None if it can."""
        return self._failure

    def is_active(self, param: int) -> bool:
        """Whether a parameter has a gradient."""
        return self._grads[param] is not None

    def facts(self, params: Sequence[int]) -> list[str]:
        """What must be equal on all ranks that share these parameters, one fact a line."""
        lines = []
        for i in params:
            entry = self._params[i]
            gradient = "a gradient" if self.is_active(i) else "no gradient"
            settings = ", ".join(f"{key}={value}" for key, value in _agreed(entry.group))
            lines.append(f"{gradient} for {entry.name} (with {settings})")
        return lines

    def fingerprint(self, params: Sequence[int]) -> int:
        """64-bit hash of :meth:`facts`, without writing them out for every parameter."""
        groups = {id(self._params[i].group): self._params[i].group for i in params}
        settings = [tuple(_agreed(group)) for group in groups.values()]
        text = repr(settings).encode() + bytes(self.is_active(i) for i in params)
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def prepare(self, parts: Sequence[Part]) -> list[Tensor]:
        """What is to be orthogonalized; no state is touched."""
        made: list[Tensor] = []
        for group, run in self._runs(parts):
            made += directions(
                [part.of(self._gradient(part)) for part in run],
                [part.of_momentum(self._buffers[part.param]) for part in run],
                momentum=group["momentum"],
                nesterov=group["nesterov"],
            )
        return made

    def compute(self, batch: Tensor, work: Orthogonalization) -> Tensor:
        """Orthogonalize whole matrices."""
        dtype = getattr(torch, work.dtype)
        return orthogonalize_with_schedule(
            batch, work.coefficients, method=work.method, eps=work.eps, dtype=dtype
        )

    def apply(self, stored: Sequence[Part], updates: Sequence[tuple[Part, Tensor]]) -> None:
        """Advance the momentum of ``stored`` and apply the updates."""
        for group, run in self._runs(stored):
            commit_momentum(
                [part.of(self._gradient(part)) for part in run],
                [part.of_momentum(self._buffers[part.param]) for part in run],
                momentum=group["momentum"],
            )
        tensors = iter([update for _, update in updates])
        for group, run in self._runs([part for part, _ in updates]):
            lr = group["lr"]
            ratios = [lr_ratio(group["adjust_lr_fn"], p.num_rows, p.num_cols) for p in run]
            commit_update(
                [part.of(self._weights[part.param]) for part in run],
                [next(tensors) for _ in run],
                decay=1 - lr * group["weight_decay"],
                steps=[lr * ratio for ratio in ratios],
            )

    def _gradient(self, part: Part) -> Tensor:
        gradient = self._grads[part.param]
        assert gradient is not None
        return gradient

    def _runs(self, parts: Sequence[Part]) -> Iterator[tuple[Mapping[str, Any], list[Part]]]:
        """Parts with the same group that follow each other, so that they share a kernel."""
        run: list[Part] = []
        for part in parts:
            if run and self._params[run[0].param].group is not self._params[part.param].group:
                yield self._params[run[0].param].group, run
                run = []
            run.append(part)
        if run:
            yield self._params[run[0].param].group, run


def _agreed(group: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for key in _AGREED_KEYS:
        value = group[key]
        if isinstance(value, Tensor):
            # A tensor on another device is not looked at: that would wait for the device.
            value = float(value) if value.device.type == "cpu" else "a tensor"
        yield key, value


def _why_not(entry: MuonParam) -> str | None:
    """What is wrong with a parameter or its gradient in this step; None if nothing is."""
    param, gradient = entry.param, entry.param.grad
    local_shape = tuple(local_tensor(param).shape)
    if local_shape != entry.local_shape:
        return (
            f"{entry.name}: its local tensor has changed from shape {entry.local_shape} to "
            f"{local_shape} since the optimizer was built; build the optimizer after the model "
            "is sharded"
        )
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        return f"{entry.name}: its gradient has layout {gradient.layout}; make it dense"
    if gradient.is_complex():
        return f"{entry.name}: its gradient is complex ({gradient.dtype}); Muon needs real numbers"
    if not same_layout(param, gradient):
        return (
            f"{entry.name}: its gradient is laid out as {placements_text(gradient)} with shape "
            f"{tuple(gradient.shape)}, the parameter as {placements_text(param)} with shape "
            f"{tuple(param.shape)}; reduce and redistribute the gradient like the parameter"
        )
    return None
