# SPDX-License-Identifier: Apache-2.0
"""Optimizer state: made at construction, laid out like its parameter, checked before a load."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.optimizer.dtensor_layout import (
    in_layout,
    local_tensor,
    zeros_like_param,
)
from hyper_parallel.core.optimizer.hyperparameters import check_group
from hyper_parallel.core.optimizer.stepped_param import SteppedParam, param_names

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
    """
    dtype = entry.group["momentum_dtype"] or entry.dtype
    buffer = state.get("momentum_buffer")
    if buffer is None:
        buffer = zeros_like_param(entry.param, dtype)
    if entry.source is not None:
        buffer = in_layout(buffer, entry.source, mesh, dtype)
    state["momentum_buffer"] = buffer


def fill_adamw_state(entry: SteppedParam, state: State) -> None:
    """Give a parameter what ``torch.optim.AdamW`` keeps, under its names; what is there is kept.

    Args:
        entry: The parameter.
        state: Its state; modified.
    """
    if "step" not in state:
        state["step"] = torch.tensor(0.0)
    moments = ["exp_avg", "exp_avg_sq"]
    if entry.group["amsgrad"]:
        moments.append("max_exp_avg_sq")
    for key in moments:
        if key not in state:
            state[key] = zeros_like_param(entry.param)


def fit_state_dict(saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Bring a saved state dict into the form of this optimizer, or say why it does not fit.

    Parameters are matched by name where both sides have names. Settings that the saved groups do
    not have (an older version, ``torch.optim``) are taken from this optimizer.

    Args:
        saved: What ``state_dict()`` returned; not modified.
        groups: This optimizer's parameter groups.

    Returns:
        A state dict that can be loaded without a surprise.

    Raises:
        ValueError: If groups, names, algorithms, settings or shapes do not fit.
    """
    saved_groups = saved["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"the saved state has {len(saved_groups)} parameter groups, this optimizer "
            f"{len(groups)}; build the optimizer with the groups that it was saved with"
        )
    fitted = []
    for number, (old, new) in enumerate(zip(saved_groups, groups, strict=True)):
        group = {key: value for key, value in new.items() if key != "params"} | dict(old)
        group = _matched_by_name(group, new, f"parameter group {number}")
        if group["algorithm"] != new["algorithm"]:
            raise ValueError(
                f"parameter group {number}: saved with algorithm {group['algorithm']!r}, but here "
                f"it is {new['algorithm']!r}; put the groups into the same order"
            )
        check_group(group, f"saved parameter group {number}")
        _check_shapes(group["params"], saved["state"], new, number)
        fitted.append(group)
    return {**saved, "param_groups": fitted}


def saved_momenta(
    saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> dict[Tensor, Tensor]:
    """The momentum of each parameter in a fitted state dict, in the dtype that it should have.

    torch casts every state to the dtype of its parameter when it loads; momentum has its own.

    Args:
        saved: A fitted state dict.
        groups: This optimizer's parameter groups.

    Returns:
        New tensors, by parameter.
    """
    momenta: dict[Tensor, Tensor] = {}
    for old, new in zip(saved["param_groups"], groups, strict=True):
        if old["algorithm"] != "muon":
            continue
        for key, param in zip(old["params"], new["params"], strict=True):
            buffer = saved["state"].get(key, {}).get("momentum_buffer")
            if buffer is not None:
                dtype = old["momentum_dtype"] or param.dtype
                device = local_tensor(param).device
                momenta[param] = buffer.detach().to(device=device, dtype=dtype, copy=True)
    return momenta


def _matched_by_name(group: dict[str, Any], new: Mapping[str, Any], label: str) -> dict[str, Any]:
    if "param_names" not in new or "param_names" not in group:
        return group
    saved_names, names = list(group["param_names"]), list(new["param_names"])
    if len(group["params"]) != len(saved_names):
        return group
    missing = [name for name in names if name not in set(saved_names)]
    extra = [name for name in saved_names if name not in set(names)]
    if missing or extra:
        raise ValueError(
            f"{label}: the saved state has other parameters: "
            f"missing {_some(missing)}, not here {_some(extra)}"
        )
    by_name = dict(zip(saved_names, group["params"], strict=True))
    return {**group, "params": [by_name[name] for name in names], "param_names": names}


def _check_shapes(
    saved_keys: Sequence[int], states: Mapping[int, State], new: Mapping[str, Any], number: int
) -> None:
    if len(saved_keys) != len(new["params"]):
        raise ValueError(
            f"parameter group {number}: saved with {len(saved_keys)} parameters, but here it has "
            f"{len(new['params'])}"
        )
    for name, key, param in zip(param_names(new, number), saved_keys, new["params"], strict=True):
        for kind, value in states.get(key, {}).items():
            if kind != "step" and isinstance(value, Tensor) and value.shape != param.shape:
                raise ValueError(
                    f"{name}: state {kind!r} was saved with shape {tuple(value.shape)}, but the "
                    f"parameter has {tuple(param.shape)}; it belongs to another parameter"
                )


def _some(names: Sequence[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
