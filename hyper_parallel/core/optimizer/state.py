# SPDX-License-Identifier: Apache-2.0
"""Optimizer state: made at construction, laid out like its parameter."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.optimizer.dtensor_layout import (
    in_layout,
    like_param,
    zeros_like_param,
)
from hyper_parallel.core.optimizer.stepped_param import SteppedParam

State = dict[str, Any]


def has_state(entry: SteppedParam, states: Mapping[Tensor, State]) -> bool:
    """Whether a parameter has all the state that its algorithm needs."""
    if entry.param not in states:
        return False
    state = states[entry.param]
    if entry.group["algorithm"] == "muon":
        return "momentum_buffer" in state
    return "exp_avg" in state and (not entry.group["amsgrad"] or "max_exp_avg_sq" in state)


def fill_muon_state(entry: SteppedParam, state: State, mesh: DeviceMesh | None) -> None:
    """Give a parameter its momentum, in its dtype and layout; what is there is kept.

    Args:
        entry: The parameter.
        state: Its state; modified.
        mesh: Mesh over which plain tensors are replicated.

    Raises:
        ValueError: If it lies on another mesh than the parameter.
    """
    dtype = entry.group["momentum_dtype"] or entry.dtype
    buffer = state.get("momentum_buffer")
    if buffer is None:
        buffer = zeros_like_param(entry.param, dtype)
    try:
        if entry.source is None:
            state["momentum_buffer"] = like_param(buffer, entry.param)
        else:
            mesh = getattr(entry.param, "device_mesh", mesh)
            state["momentum_buffer"] = in_layout(buffer, entry.source, mesh, dtype)
    except ValueError as error:
        raise ValueError(f"{entry.name}: state 'momentum_buffer' {error}") from None


def fill_adamw_state(entry: SteppedParam, state: State) -> None:
    """Give a parameter what ``torch.optim.AdamW`` keeps, under its names; what is there is kept.

    Args:
        entry: The parameter.
        state: Its state; modified.

    Raises:
        ValueError: If some of it lies on another mesh than the parameter.
    """
    if "step" not in state:
        state["step"] = torch.tensor(0.0)
    moments = ["exp_avg", "exp_avg_sq"]
    if entry.group["amsgrad"]:
        moments.append("max_exp_avg_sq")
    for key in moments:
        if key not in state:
            state[key] = zeros_like_param(entry.param)
        try:
            state[key] = like_param(state[key], entry.param)
        except ValueError as error:
            raise ValueError(f"{entry.name}: state {key!r} {error}") from None
