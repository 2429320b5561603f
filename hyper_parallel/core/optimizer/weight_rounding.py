# SPDX-License-Identifier: Apache-2.0
"""Half-precision weights that lose no update: what rounding drops is kept and added again.

[Note: compensated weights]
A bfloat16 weight has 8 bits: an update below half its spacing (0.4 % of the weight at worst) rounds
away, in every step. With ``weight_rounding="compensated"`` the rounding error of each weight is
kept beside it, in the weight's own dtype, and added before the next update (Kahan's summation).
Weight and residual together have about 17 bits, for 2 bytes an element instead of the 4 of a
float32 master copy. Three things follow from keeping an error instead of a copy: weights that
somebody else writes (a model checkpoint loaded after the optimizer was built) are not overwritten
with a stale copy; every framework moves and saves the state like a momentum; and the result is a
function of the element alone, so replicas keep the same bits and layouts do not matter, which
stochastic rounding would have to earn with a counter per element.

References:
    Kahan, "Further remarks on reducing truncation errors", Comm. ACM 8(1), 1965.
    Zamirai et al., "Revisiting BFloat16 Training", 2020, https://arxiv.org/abs/2010.06192
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

WEIGHT_ROUNDINGS: Final = ("nearest", "compensated")
RESIDUAL: Final = "weight_residual"
"""State key of what rounding has left out of a weight."""


def keeps_residual(weight_rounding: str, dtype: torch.dtype) -> bool:
    """Whether weights of a dtype have a residual; wide ones round too little to need it."""
    return weight_rounding == "compensated" and dtype.itemsize == 2


@contextmanager
def unrounded(
    weights: Sequence[Tensor], residuals: Sequence[Tensor | None]
) -> Iterator[list[Tensor]]:
    """Weights as they would be without rounding, to be changed in place.

    When the block ends, they are rounded into ``weights`` and what is left goes to ``residuals``.
    A residual that is no rounding error of its weight, since somebody wrote the weight in between,
    counts as zero.

    Args:
        weights: Local weights; modified.
        residuals: Their residuals, same shapes and dtypes, modified; None for a weight without.

    Yields:
        Float32 copies; a weight without a residual as it is.
    """
    wide = [w if r is None else _joined(w, r) for w, r in zip(weights, residuals, strict=True)]
    yield wide
    for weight, residual, whole in zip(weights, residuals, wide, strict=True):
        if residual is not None:
            weight.copy_(whole)
            residual.copy_(whole.sub_(weight))


def _joined(weight: Tensor, residual: Tensor) -> Tensor:
    whole, rest = weight.float(), residual.float()
    # Half a spacing, seen from the lower end of the weight's binade.
    largest = whole.abs() * (torch.finfo(weight.dtype).eps / 2)
    return whole.add_(torch.where(rest.abs() <= largest, rest, 0.0))
