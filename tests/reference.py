# SPDX-License-Identifier: Apache-2.0
"""The oracle: Muon on one process with whole tensors, written plainly.

Slow and obvious on purpose. It follows the formulas of ``torch.optim.Muon`` step by step, in the
dtype of its tensors, and shares no code with the package.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

JORDAN = [(3.4445, -4.7750, 2.0315)] * 5


def newton_schulz(matrix: Tensor, coefficients: Sequence[tuple[float, float, float]]) -> Tensor:
    """One 2-D matrix, standard form, in its own dtype."""
    X = matrix / matrix.norm() if matrix.any() else matrix
    for a, b, c in coefficients:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X


def matrices(tensor: Tensor, view: object = None) -> list[Tensor]:
    """The matrices of a parameter, as 2-D views (copies for ``flatten`` of odd strides)."""
    if view == "flatten":
        return [tensor.flatten(1)]
    flat = tensor.flatten(0, -3) if tensor.ndim > 2 else tensor[None]
    if view is None:
        return list(flat)
    assert isinstance(view, tuple)
    kind, argument = view
    sizes = list(argument) if kind == "split" else [tensor.shape[-2] // argument] * argument
    return [block for matrix in flat for block in matrix.split(sizes)]


@dataclass
class ReferenceMuon:
    """Muon over whole tensors.

    Attributes:
        params: Weights, changed in place.
        views: ``matrix_view`` of each.
        momenta: Their momentum.
    """

    params: list[Tensor]
    lr: float = 0.02
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    adjust_lr_fn: str | None = None
    coefficients: Sequence[tuple[float, float, float]] = field(default_factory=lambda: JORDAN)
    views: list[object] | None = None
    momenta: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.momenta = [torch.zeros_like(p) for p in self.params]

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """One step; a parameter whose gradient is None is left alone."""
        views = self.views or [None] * len(self.params)
        for param, grad, m, view in zip(self.params, grads, self.momenta, views, strict=True):
            if grad is None:
                continue
            m.mul_(self.momentum).add_(grad, alpha=1 - self.momentum)
            direction = grad + self.momentum * (m - grad) if self.nesterov else m.clone()
            param.mul_(1 - self.lr * self.weight_decay)
            for weight, update in zip(
                matrices(param, view), matrices(direction.contiguous(), view), strict=True
            ):
                rows, cols = update.shape
                if not update.numel():
                    continue
                weight.add_(
                    newton_schulz(update, self.coefficients),
                    alpha=-self.lr * self.ratio(rows, cols),
                )

    def ratio(self, rows: int, cols: int) -> float:
        """Factor on the learning rate."""
        if self.adjust_lr_fn == "match_rms_adamw":
            return float(0.2 * max(rows, cols) ** 0.5)
        if self.adjust_lr_fn == "spectral":
            return float((rows / cols) ** 0.5)
        return float(max(1, rows / cols) ** 0.5)
