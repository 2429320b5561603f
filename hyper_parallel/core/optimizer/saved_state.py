# SPDX-License-Identifier: Apache-2.0
"""State dicts: written so that all of torch can handle them, checked before they are loaded.

[Note: what a load keeps] A saved setting takes the place of this optimizer's, as in torch, but for
``share_replicas`` and ``shard_momentum``: they say where work and memory lie on the ranks that run
now, and change no value. Settings that the saved group does not have, since an older version or
``torch.optim`` wrote it, stay as they are here. State that the saved dict does not have is zero,
but for frozen parameters: torch leaves them out of what it hands over, so theirs stays.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from hyper_parallel.core.optimizer.dtensor_layout import local_tensor
from hyper_parallel.core.optimizer.hyperparameters import check_group, check_keys, state_dtype
from hyper_parallel.core.optimizer.param_uses import strip_wrappers
from hyper_parallel.core.optimizer.stepped_param import param_names

State = dict[str, Any]

REQUIRED_STATE: Final = {
    "muon": ("momentum_buffer",),
    "adamw": ("step", "exp_avg", "exp_avg_sq"),
}
"""What a parameter that has been stepped on has, by algorithm; AdamW's are torch's names."""

_HERE_KEYS: Final = ("share_replicas", "shard_momentum")
_DTYPE_KEYS: Final = {"ns_dtype", "momentum_dtype"}
# How torch's AdamW runs, not what it computes.
_TORCH_KEYS: Final = ("foreach", "fused", "capturable", "differentiable")


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
        ValueError: If groups, names, algorithms, settings, kinds of state or shapes do not fit.
    """
    _check_form(saved)
    saved_groups = saved["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"the saved state has {len(saved_groups)} parameter groups, this optimizer "
            f"{len(groups)}; build the optimizer with the groups that it was saved with"
            f"{_WAY_OUT}"
        )
    fitted = []
    for number, (old, new) in enumerate(zip(saved_groups, groups, strict=True)):
        group = _fitted_settings(old, new, number)
        group = _matched_by_name(group, new, f"parameter group {number}")
        _check_state(group["params"], saved["state"], new, number)
        fitted.append(group)
    return {**saved, "param_groups": fitted}


def with_dtype_names(state_dict: State) -> State:
    """A state dict as it is saved: dtypes by name, since torch gathers no other objects.

    Without it ``StateDictOptions(full_state_dict=True)`` raises.

    Args:
        state_dict: What torch's ``state_dict()`` returned; not modified.

    Returns:
        A state dict of tensors, numbers, strings and tuples of them.
    """
    groups = [
        {
            k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v
            for k, v in g.items()
        }
        for g in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


def copied_state(
    saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> dict[Tensor, State]:
    """The state of each parameter in a fitted state dict, in the dtypes that it should have.

    When torch loads, it casts every state to the dtype of its parameter, while momentum has its
    own; and where nothing is to be cast it shares the tensors with the saved dict, so that two
    optimizers in one process would step on the same moments.

    Args:
        saved: A fitted state dict.
        groups: This optimizer's parameter groups.

    Returns:
        New tensors, by parameter.
    """
    states: dict[Tensor, State] = {}
    for old, new in zip(saved["param_groups"], groups, strict=True):
        for key, param in zip(old["params"], new["params"], strict=True):
            state = saved["state"].get(key)
            if state:
                states[param] = {
                    kind: _copied(kind, value, param, old) for kind, value in state.items()
                }
    return states


def _copied(kind: str, value: Any, param: Tensor, group: Mapping[str, Any]) -> Any:
    if not isinstance(value, Tensor):
        return value
    if kind == "step":  # on the CPU, where AdamW reads it without waiting for a device
        return value.detach().to(device="cpu", copy=True)
    dtype = state_dtype(kind, group, param.dtype)
    return value.detach().to(device=local_tensor(param).device, dtype=dtype, copy=True)


def frozen_state(
    states: Mapping[Tensor, State], groups: Sequence[Mapping[str, Any]]
) -> dict[Tensor, State]:
    """The state of frozen parameters, which torch drops from what it hands to a load.

    Args:
        states: State by parameter, before the load.
        groups: This optimizer's parameter groups.

    Returns:
        Their states, by parameter.
    """
    params = (param for group in groups for param in group["params"])
    return {p: states[p] for p in params if not p.requires_grad and p in states}


_WAY_OUT: Final = (
    ", or load what has the same name and start the others at zero: optimizer.load_state_dict("
    "import_state(optimizer.state_dict(), saved))"
)


def _check_form(saved: Mapping[str, Any]) -> None:
    if not {"state", "param_groups"} <= set(saved):
        raise ValueError(
            "expected what an optimizer's state_dict() returns, with keys 'state' and "
            f"'param_groups', got keys {_some(sorted(map(str, saved)))}; load the optimizer's part "
            "of the checkpoint, and a flattened one with set_optimizer_state_dict"
        )


def _fitted_settings(old: Mapping[str, Any], new: Mapping[str, Any], number: int) -> dict[str, Any]:
    label = f"saved parameter group {number}"
    here = {key: value for key, value in new.items() if key != "params"}
    group = here | {key: value for key, value in old.items() if key not in _TORCH_KEYS}
    for key in _DTYPE_KEYS & set(old):
        named = getattr(torch, old[key], None) if isinstance(old[key], str) else old[key]
        group[key] = named if isinstance(named, torch.dtype) else old[key]
    group |= {key: new[key] for key in _HERE_KEYS if key in new}
    if group["algorithm"] != new["algorithm"]:
        raise ValueError(
            f"parameter group {number}: saved with algorithm {group['algorithm']!r}, but here "
            f"it is {new['algorithm']!r}; put the groups into the same order"
        )
    try:
        unknown = {key: value for key, value in group.items() if key not in here}
        check_keys({"algorithm": group["algorithm"], **unknown}, label)
    except ValueError as error:
        raise ValueError(
            f"{error}. If a newer version wrote it, load it with that version; or delete the key "
            "from the saved group, and it has no effect"
        ) from None
    check_group(group, label)
    return group


def _matched_by_name(group: dict[str, Any], new: Mapping[str, Any], label: str) -> dict[str, Any]:
    if "param_names" not in new or "param_names" not in group:
        return group
    saved_names, names = _comparable(group["param_names"]), _comparable(new["param_names"])
    if len(group["params"]) != len(saved_names):
        return group
    missing = [name for name in names if name not in set(saved_names)]
    extra = [name for name in saved_names if name not in set(names)]
    if missing or extra:
        raise ValueError(
            f"{label}: the saved state has other parameters: missing {_some(missing)}, not here "
            f"{_some(extra)}; build the optimizer with the parameters that it was saved with"
            f"{_WAY_OUT}"
        )
    by_name = dict(zip(saved_names, group["params"], strict=True))
    return {
        **group,
        "params": [by_name[name] for name in names],
        "param_names": list(new["param_names"]),
    }


def _comparable(names: Sequence[str]) -> list[str]:
    """Names without what DDP and ``torch.compile`` add, unless two parameters then share one."""
    stripped = [strip_wrappers(name) for name in names]
    return stripped if len(set(stripped)) == len(names) else list(names)


def _check_state(
    saved_keys: Sequence[int], states: Mapping[int, State], new: Mapping[str, Any], number: int
) -> None:
    if len(saved_keys) != len(new["params"]):
        raise ValueError(
            f"parameter group {number}: saved with {len(saved_keys)} parameters, but here it has "
            f"{len(new['params'])}; build the optimizer with the parameters that it was saved with"
            f"{_WAY_OUT}"
        )
    algorithm = new["algorithm"]
    for name, key, param in zip(param_names(new, number), saved_keys, new["params"], strict=True):
        state = states.get(key, {})
        missing = [k for k in REQUIRED_STATE[algorithm] if not isinstance(state.get(k), Tensor)]
        if state and missing:
            raise ValueError(
                f"{name}: algorithm {algorithm!r} needs state {', '.join(missing)}, but it was "
                f"saved with {_some([str(k) for k in state if k not in missing])}; step it with "
                "the algorithm that it was saved with, or delete its state and start at zero"
            )
        for kind, value in state.items():
            if kind != "step" and isinstance(value, Tensor) and value.shape != param.shape:
                raise ValueError(
                    f"{name}: state {kind!r} was saved with shape {tuple(value.shape)}, but the "
                    f"parameter has {tuple(param.shape)}; it belongs to another parameter"
                )


def _some(names: Sequence[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
