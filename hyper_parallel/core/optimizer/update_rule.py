# SPDX-License-Identifier: Apache-2.0
"""Muon's arithmetic on plain local tensors: momentum, learning-rate scale, decay, update.

[Note: a step is pure until it commits]
With ``m' = m + (1 - mu) (g - m)``, Nesterov's direction ``g + mu (m' - g)`` is
``g + mu**2 (m - g)``: one interpolation of the *old* momentum. So what travels is computed without
touching any state, and momentum, decay and update are written together, once it is known that no
rank failed.
"""

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_HALF: Final = (torch.bfloat16, torch.float16)
ADJUST_LR_FNS: Final = ("original", "match_rms_adamw", "spectral")


def lr_ratio(adjust_lr_fn: str | None, num_rows: int, num_cols: int) -> float:
    """Factor on the learning rate for a matrix of a shape.

    Args:
        adjust_lr_fn: ``"original"`` or None (``sqrt(max(1, rows / cols))``),
            ``"match_rms_adamw"`` (``0.2 sqrt(max(rows, cols))``) or ``"spectral"``
            (``sqrt(rows / cols)``).
        num_rows: Rows of the whole matrix.
        num_cols: Columns of the whole matrix.

    Returns:
        The factor.

    Example:
        >>> lr_ratio("original", 4, 16), lr_ratio("original", 16, 4), lr_ratio("spectral", 4, 16)
        (1.0, 2.0, 0.5)

    References:
        Jordan et al., https://kellerjordan.github.io/posts/muon/ ("original");
        Liu et al., "Muon is Scalable for LLM Training", 2025, https://arxiv.org/abs/2502.16982
        ("match_rms_adamw"); Bernstein, "Deriving Muon", 2025,
        https://jeremybernste.in/writing/deriving-muon ("spectral").
    """
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(num_rows, num_cols))
    if adjust_lr_fn == "spectral":
        return math.sqrt(num_rows / num_cols)
    return math.sqrt(max(1.0, num_rows / num_cols))


def directions(
    grads: Sequence[Tensor], buffers: Sequence[Tensor], *, momentum: float, nesterov: bool
) -> list[Tensor]:
    """What is orthogonalized, from gradients and the momentum of the *previous* step.

    Args:
        grads: Local gradients. Not modified.
        buffers: Local momentum, same shapes. Not modified.
        momentum: Momentum coefficient ``mu``.
        nesterov: Whether to look ahead.

    Returns:
        New tensors, in the wider of the two dtypes.
    """
    pairs = [_promoted(g, m) for g, m in zip(grads, buffers, strict=True)]
    # See [Note: a step is pure until it commits].
    weight = momentum**2 if nesterov else momentum
    return _foreach_lerp([g for g, _ in pairs], [m for _, m in pairs], weight)


def commit_momentum(grads: Sequence[Tensor], buffers: Sequence[Tensor], *, momentum: float) -> None:
    """Advance the momentum in place: ``m <- m + (1 - mu) (g - m)``.

    Args:
        grads: Local gradients. Not modified.
        buffers: Local momentum, same shapes; modified.
        momentum: Momentum coefficient ``mu``.
    """
    same = [(g, m) for g, m in zip(grads, buffers, strict=True) if g.dtype == m.dtype]
    if same:
        torch._foreach_lerp_([m for _, m in same], [g for g, _ in same], 1 - momentum)
    for g, m in zip(grads, buffers, strict=True):
        if g.dtype != m.dtype:
            wide_g, wide_m = _promoted(g, m)
            m.copy_(torch.lerp(wide_m, wide_g, 1 - momentum))


def commit_update(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    decay: float | Tensor,
    steps: Sequence[float | Tensor],
) -> None:
    """Decay the weights and add the update, in place: ``p <- decay * p - step * u``.

    Args:
        params: Local weights; modified. Half-precision ones are computed in float32 and rounded
            once.
        updates: Orthogonalized pieces of the same shapes, any float dtype.
        decay: ``1 - lr * weight_decay``, with the unadjusted learning rate.
        steps: Adjusted learning rate of each piece.
    """
    wide = [p.float() if p.dtype in _HALF else p for p in params]
    if wide and (isinstance(decay, Tensor) or decay != 1):
        torch._foreach_mul_(wide, decay.reshape(()) if isinstance(decay, Tensor) else decay)
    together: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
    for param, update, step in zip(wide, updates, steps, strict=True):
        if isinstance(step, Tensor):
            param.sub_(update.to(param.dtype) * step.to(param.dtype))
        else:
            same_params, same_updates = together.setdefault(step, ([], []))
            same_params.append(param)
            same_updates.append(update)
    for step, (same_params, same_updates) in together.items():
        torch._foreach_add_(same_params, same_updates, alpha=-step)
    for param, stepped in zip(params, wide, strict=True):
        if stepped is not param:
            param.copy_(stepped)


def _promoted(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(left.dtype, right.dtype)
    return left.to(dtype), right.to(dtype)


def _foreach_lerp(starts: list[Tensor], ends: list[Tensor], weight: float) -> list[Tensor]:
    return list(torch._foreach_lerp(starts, ends, weight)) if starts else []
