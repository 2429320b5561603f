# SPDX-License-Identifier: Apache-2.0
"""Loss scaling for float16 whose verdict is that of all ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from hyper_parallel.core.optimizer.collectives import all_reduce_, is_distributed, rank_group
from hyper_parallel.core.optimizer.dtensor_layout import local_tensor


class GradScaler(torch.amp.GradScaler):
    """:class:`torch.amp.GradScaler` that skips a step, and changes its scale, on all ranks alike.

    torch's scaler decides by what one rank sees: gradients of experts, of ignored or of
    tensor-parallel parameters may overflow on one rank alone, and what it finds in DTensors of
    several meshes is reduced over the first one's. A step that communicates would then wait for
    the rank that skips, and the scales drift apart. Here every rank looks at its own part of all
    gradients and one number is reduced. It works for any optimizer.

    Every rank calls ``step`` (or ``unscale_``) once per optimizer and iteration, whatever gradients
    it has.

    Args:
        device: As in torch.
        process_group: Ranks that decide together; the world's if None.
        **settings: As in torch: ``init_scale``, ``growth_factor``, ``backoff_factor``,
            ``growth_interval``, ``enabled``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> scaler = GradScaler("cpu", init_scale=8.0)
        >>> scaler.scale(weight.sum()).backward()
        >>> _ = scaler.step(optimizer)
        >>> scaler.update()
        >>> weight[0, 0].item()
        0.5
    """

    def __init__(
        self,
        device: str = "cuda",
        *,
        process_group: dist.ProcessGroup | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(device, **settings)
        self._process_group = process_group

    @override
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Look at the gradients and unscale them; what ``unscale_`` and ``step`` ask.

        Args:
            optimizer: The optimizer.
            inv_scale: What gradients are multiplied with, in place.
            found_inf: Where the verdict goes.
            allow_fp16: Whether float16 gradients are allowed.

        Returns:
            The verdict of all ranks, for each device; the scale's own is always there.

        Raises:
            ValueError: If a gradient is of float16 and may not be.
        """
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    grad = local_tensor(param.grad)
                    alike.setdefault((grad.device, grad.dtype), []).append(grad)
        if not allow_fp16 and any(dtype == torch.float16 for _, dtype in alike):
            raise ValueError(
                "gradients are of float16, which cannot hold them once they are unscaled; keep "
                "float32 parameters and let autocast or FSDP2's mixed precision cast them"
            )
        verdict = {found_inf.device: found_inf}
        for (device, _), grads in alike.items():
            found = verdict.setdefault(device, found_inf.to(device, copy=True))
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inv_scale.to(device))
        for device, found in verdict.items():
            if device != found_inf.device:
                found_inf.copy_(torch.maximum(found_inf, found.to(found_inf.device)))
        if is_distributed():
            all_reduce_(found_inf, rank_group(self._process_group), largest=True)
        return {device: found.copy_(found_inf) for device, found in verdict.items()}
