# SPDX-License-Identifier: Apache-2.0
"""Gradients with inf or NaN: found in one pass, and what a step makes of them."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from hyper_parallel.core.optimizer.agreement import Obstacle

POLICIES: Final = ("raise", "skip", "propagate")

_SHOWN: Final = 3


def obstacle_of(
    names: Sequence[str], grads: Sequence[Tensor | None], policy: str
) -> Obstacle | None:
    """What keeps a rank from stepping on its gradients.

    Args:
        names: Names of the parameters.
        grads: Local gradients, any dtypes and shapes; None where there is none. Not modified.
        policy: One of ``POLICIES``.

    Returns:
        None if all entries are finite, or if nobody asks.
    """
    if policy == "propagate":
        return None
    found = [names[i] for i in _nonfinite(grads)]
    if not found:
        return None
    shown = ", ".join(found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return Obstacle(
        f"its part of the gradient of {shown}{more} has inf or NaN entries; look for what made "
        "them (a division, a learning rate, float16 without a gradient scaler)"
        + ("" if policy == "skip" else ", or leave such steps out with nonfinite='skip'"),
        is_fatal=policy == "raise",
    )


def _nonfinite(grads: Sequence[Tensor | None]) -> list[int]:
    """Positions of gradients with an inf or NaN entry."""
    # A norm is one pass and few kernels, but overflows before its entries do: it may only acquit.
    suspects: list[int] = []
    places: dict[torch.device, list[int]] = {}
    for i, grad in enumerate(grads):
        if grad is not None and grad.numel():
            places.setdefault(grad.device, []).append(i)
    for members in places.values():
        norms = torch._foreach_norm([g for i in members if (g := grads[i]) is not None])
        finite = torch.stack([norm.float() for norm in norms]).isfinite()
        suspects += [i for i, ok in zip(members, finite.tolist(), strict=True) if not ok]
    return [i for i in sorted(suspects) if (g := grads[i]) is not None and not g.isfinite().all()]
