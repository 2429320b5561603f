# SPDX-License-Identifier: Apache-2.0
"""Optimizer state: made at construction, laid out like its parameter."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.optimizer.dtensor_layout import (
    in_layout,
    like_param,
    zeros_like_param,
)
from hyper_parallel.core.optimizer.hyperparameters import state_dtype
from hyper_parallel.core.optimizer.stepped_param import SteppedParam
from hyper_parallel.core.optimizer.weight_rounding import RESIDUAL, keeps_residual

State = dict[str, Any]

_LAID_OUT: Final = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", RESIDUAL)
"""State that lies where its parameter does."""


def has_state(entry: SteppedParam, states: Mapping[Tensor, State]) -> bool:
    """Whether a parameter has all the state that its algorithm needs."""
    if entry.param not in states:
        return False
    state = states[entry.param]
    if (RESIDUAL in state) != keeps_residual(entry.group["weight_rounding"], entry.dtype):
        return False
    is_muon = entry.group["algorithm"] == "muon"
    moment = state.get("momentum_buffer" if is_muon else "exp_avg")
    if moment is None or moment.device != entry.param.device:  # the model was moved
        return False
    return is_muon or not entry.group["amsgrad"] or "max_exp_avg_sq" in state


def fill_muon_state(entry: SteppedParam, state: State, mesh: DeviceMesh | None) -> None:
    """Give a parameter its momentum, in its dtype and layout; what is there is kept.

    Args:
        entry: The parameter.
        state: Its state; modified.
        mesh: Mesh over which plain tensors are replicated.

    Raises:
        ValueError: If it lies on another mesh than the parameter.
    """
    _follow(entry, state)
    dtype = state_dtype("momentum_buffer", entry.group, entry.dtype)
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
    _fill_residual(entry, state)


def fill_adamw_state(entry: SteppedParam, state: State) -> None:
    """Give a parameter what ``torch.optim.AdamW`` keeps, under its names; what is there is kept.

    Args:
        entry: The parameter.
        state: Its state; modified.

    Raises:
        ValueError: If some of it lies on another mesh than the parameter.
    """
    _follow(entry, state)
    if "step" not in state:
        state["step"] = torch.tensor(0.0)
    moments = ["exp_avg", "exp_avg_sq"]
    if entry.group["amsgrad"]:
        moments.append("max_exp_avg_sq")
    for key in moments:
        dtype = state_dtype(key, entry.group, entry.dtype)
        if key not in state:
            state[key] = zeros_like_param(entry.param, dtype)
        try:
            state[key] = like_param(state[key], entry.param).to(dtype)
        except ValueError as error:
            raise ValueError(f"{entry.name}: state {key!r} {error}") from None
    _fill_residual(entry, state)


def _follow(entry: SteppedParam, state: State) -> None:
    """Move state to where the parameter is now; what lies on the meta device has no values."""
    device = entry.param.device
    for key in _LAID_OUT:
        if key in state and state[key].device != device:
            value = state.pop(key)
            if not value.is_meta:
                state[key] = value.to(device)


def _fill_residual(entry: SteppedParam, state: State) -> None:
    if not keeps_residual(entry.group["weight_rounding"], entry.dtype):
        state.pop(RESIDUAL, None)
        return
    residual = state.get(RESIDUAL)
    if residual is None:
        residual = zeros_like_param(entry.param)
    try:
        state[RESIDUAL] = like_param(residual, entry.param).to(entry.dtype)
    except ValueError as error:
        raise ValueError(f"{entry.name}: state {RESIDUAL!r} {error}") from None
