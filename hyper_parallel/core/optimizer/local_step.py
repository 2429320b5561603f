# SPDX-License-Identifier: Apache-2.0
"""One Muon step as this rank's local tensors see it. Knows parts of tensors, but no ranks."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.core.optimizer.agreement import Obstacle
from hyper_parallel.core.optimizer.bucket import Orthogonalization
from hyper_parallel.core.optimizer.dtensor_layout import local_tensor
from hyper_parallel.core.optimizer.nonfinite import obstacle_of
from hyper_parallel.core.optimizer.packet import Part
from hyper_parallel.core.optimizer.polar import orthogonalize_with_schedule
from hyper_parallel.core.optimizer.stepped_param import SteppedParam, gradient_of
from hyper_parallel.core.optimizer.update_rule import (
    commit_momentum,
    commit_update,
    directions,
    lr_ratio,
)
from hyper_parallel.core.optimizer.weight_rounding import unrounded

_SHARED_KEYS = ("lr", "weight_decay", "maximize", "weight_rounding")
_AGREED_KEYS = {
    "muon": (*_SHARED_KEYS, "momentum", "nesterov", "adjust_lr_fn", "momentum_dtype"),
    "adamw": (*_SHARED_KEYS, "betas", "eps", "amsgrad"),
}


class LocalStep:
    """Reads gradients once, and then answers what the executor asks.

    Args:
        params: All Muon parameters, in the plan's order.
        buffers: Their momentum.
        others: Parameters that somebody else steps on in the same step: if one of them cannot be
            stepped on, none is.
        residuals: What rounding left out of the Muon parameters, None where nothing is kept; see
            [Note: compensated weights].
        loss_scale: What the gradients are multiplied with (a gradient scaler's); None if nothing.
        nonfinite: What to do about gradients with inf or NaN; see
            :mod:`~hyper_parallel.core.optimizer.nonfinite`.
    """

    def __init__(
        self,
        params: Sequence[SteppedParam],
        buffers: Sequence[Tensor],
        others: Sequence[SteppedParam] = (),
        *,
        residuals: Sequence[Tensor | None] | None = None,
        loss_scale: Tensor | None = None,
        nonfinite: str = "propagate",
    ) -> None:
        self._params = params
        self._all = [*params, *others]
        self._obstacle: Obstacle | None = None
        self._grads = [self._gradient_of(entry) for entry in self._all]
        self._weights = [local_tensor(entry.param) for entry in params]
        self._buffers = [local_tensor(buffer) for buffer in buffers]
        residuals = residuals or [None] * len(params)
        self._residuals = [None if r is None else local_tensor(r) for r in residuals]
        self._loss_scale = None if loss_scale is None else loss_scale.reshape(())
        self._nonfinite = nonfinite
        if self._obstacle is None:
            names = [entry.name for entry in self._all]
            self._obstacle = obstacle_of(names, self._grads, nonfinite)

    def _gradient_of(self, entry: SteppedParam) -> Tensor | None:
        try:
            return gradient_of(entry)
        except ValueError as error:  # told once all ranks can hear it
            self._obstacle = self._obstacle or Obstacle(str(error))
            return None

    def other_gradients(self) -> list[Tensor | None]:
        """Local gradients of the others, without the loss scale."""
        grads = self._grads[len(self._params) :]
        scale = self._loss_scale
        if scale is None:
            return grads
        return [None if grad is None else grad / scale.to(grad.device) for grad in grads]

    def obstacle(self) -> Obstacle | None:
        """Why this rank cannot step; None if it can."""
        return self._obstacle

    def is_active(self, param: int) -> bool:
        """Whether a parameter has a gradient."""
        return self._grads[param] is not None

    def facts(self, params: Sequence[int]) -> list[str]:
        """What must be equal on all ranks that share these parameters, one fact a line.

        Args:
            params: Positions, those of the others after Muon's own.

        Returns:
            One line per parameter.
        """
        lines = []
        for entry in (self._all[i] for i in params):
            gradient = "no gradient" if entry.param.grad is None else "a gradient"
            settings = ", ".join(f"{key}={value}" for key, value in _agreed(entry.group))
            scale = "" if self._loss_scale is None else f", loss scale {_number(self._loss_scale)}"
            settings += f"{scale}, nonfinite={self._nonfinite}"
            lines.append(f"{gradient} for {entry.name} (with {settings})")
        return lines

    def fingerprint(self, params: Sequence[int]) -> int:
        """64-bit hash of :meth:`facts`, without writing them out for every parameter."""
        entries = [self._all[i] for i in params]
        groups = {id(entry.group): entry.group for entry in entries}
        settings: list[object] = [tuple(_agreed(group)) for group in groups.values()]
        settings += [str(_number(self._loss_scale)), self._nonfinite]
        text = repr(settings).encode() + bytes(e.param.grad is None for e in entries)
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def prepare(self, parts: Sequence[Part]) -> list[Tensor]:
        """What is to be orthogonalized; no state is touched."""
        made: list[Tensor] = []
        for group, run in self._runs(parts):
            made += directions(
                self._gradients(group, run),
                [part.of_momentum(self._buffers[part.param]) for part in run],
                momentum=group["momentum"],
                nesterov=group["nesterov"],
            )
        return made

    def compute(self, batch: Tensor, work: Orthogonalization) -> None:
        """Replace whole matrices by their orthogonalization."""
        dtype, form = getattr(torch, work.dtype), work.form(*batch.shape[-2:])
        orthogonalize_with_schedule(
            batch, work.coefficients, method=form, eps=work.eps, dtype=dtype, out=batch
        )

    def apply(self, stored: Sequence[Part], updates: Sequence[tuple[Part, Tensor]]) -> None:
        """Advance the momentum of ``stored`` and apply the updates."""
        for group, run in self._runs(stored):
            commit_momentum(
                self._gradients(group, run),
                [part.of_momentum(self._buffers[part.param]) for part in run],
                momentum=group["momentum"],
            )
        tensors = iter([update for _, update in updates])
        for group, run in self._runs([part for part, _ in updates]):
            lr = _number(group["lr"])
            ratios = [lr_ratio(group["adjust_lr_fn"], p.num_rows, p.num_cols) for p in run]
            weights = [part.of(self._weights[part.param]) for part in run]
            with unrounded(weights, [self._residual(part) for part in run]) as wide:
                commit_update(
                    wide,
                    [next(tensors) for _ in run],
                    decay=1 - lr * group["weight_decay"],
                    steps=[lr * ratio for ratio in ratios],
                )

    def _gradients(self, group: Mapping[str, Any], run: Sequence[Part]) -> list[Tensor]:
        """What the loss falls along, if one goes against it: unscaled, negated to maximize."""
        pieces: list[Tensor] = []
        for part in run:
            gradient = self._grads[part.param]
            assert gradient is not None
            pieces.append(part.of(gradient))
        if self._loss_scale is not None and pieces:
            pieces = list(torch._foreach_div(pieces, self._loss_scale.to(pieces[0].device)))
        return list(torch._foreach_neg(pieces)) if group["maximize"] and pieces else pieces

    def _residual(self, part: Part) -> Tensor | None:
        residual = self._residuals[part.param]
        return None if residual is None else part.of(residual)

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
    for key in _AGREED_KEYS[group["algorithm"]]:
        value = _number(group[key])
        yield key, "a tensor" if isinstance(value, Tensor) else value


def _number(value: Any) -> Any:
    """A tensor on the CPU as a number; one on another device stays: a look would wait for it."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" else value.detach().reshape(())
    return value
