# SPDX-License-Identifier: Apache-2.0
"""AdamW for the parameters that are no hidden matrices: PyTorch's own, on local tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.adamw import adamw

from hyper_parallel.core.optimizer.dtensor_layout import local_tensor
from hyper_parallel.core.optimizer.weight_rounding import RESIDUAL, unrounded


def adamw_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    group: Mapping[str, Any],
) -> None:
    """One AdamW step on parameters of one group.

    The update is element-wise, so every rank steps on its own part and nothing is communicated.

    Args:
        params: Parameters, plain or DTensors; modified.
        grads: Their *local* gradients.
        states: Their states; modified.
        group: Hyperparameters.
    """
    if not params:
        return
    amsgrad = bool(group["amsgrad"])
    beta1, beta2 = group["betas"]
    weights = [local_tensor(p) for p in params]
    residuals = [local_tensor(s[RESIDUAL]) if RESIDUAL in s else None for s in states]
    with unrounded(weights, residuals) as wide:
        adamw(
            wide,
            [grad.to(weight.dtype) for grad, weight in zip(grads, wide, strict=True)],
            [local_tensor(state["exp_avg"]) for state in states],
            [local_tensor(state["exp_avg_sq"]) for state in states],
            [local_tensor(state["max_exp_avg_sq"]) for state in states] if amsgrad else [],
            [state["step"] for state in states],
            amsgrad=amsgrad,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
