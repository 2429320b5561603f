# SPDX-License-Identifier: Apache-2.0
"""State of other optimizers into and out of this one: plain functions on state dicts.

[Note: two conventions of momentum] This package and ``torch.optim.Muon`` keep an average,
``m = mu m + (1 - mu) g``. The first published Muon, and Moonlight's, keep a sum,
``b = mu b + g``, which is ``m / (1 - mu)``. Both point in the same direction, with Nesterov as
well (``g + mu b`` against ``(1 - mu) g + mu m``), so only ``eps`` sees the difference in a step. In
a run that goes on, a sum that is taken for an average counts ``1 / (1 - mu)`` times too much,
20 times for 0.95, until it has decayed.

References:
    Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    https://kellerjordan.github.io/posts/muon/
    Liu et al., "Muon is Scalable for LLM Training", 2025. https://arxiv.org/abs/2502.16982
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from hyper_parallel.core.optimizer.coefficients import resolve_coefficients
from hyper_parallel.core.optimizer.param_uses import strip_wrappers
from hyper_parallel.core.optimizer.saved_state import REQUIRED_STATE
from hyper_parallel.core.optimizer.weight_rounding import RESIDUAL

StateDict = dict[str, Any]

MOMENTUM_CONVENTIONS: Final = ("average", "sum")

# Moonlight's names for what torch's AdamW keeps.
_ALIASES: Final = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}
_TORCH_MUON_KEYS: Final = ("lr", "weight_decay", "momentum", "nesterov", "eps", "adjust_lr_fn")
_TORCH_ADAMW_KEYS: Final = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
_TORCH_ADAMW_RUN: Final[dict[str, Any]] = {
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


def import_state(
    own: Mapping[str, Any],
    saved: Mapping[str, Any],
    *,
    names: Sequence[str] | None = None,
    momentum_convention: str = "average",
) -> StateDict:
    """Put the state of another optimizer, or of an older run, into a state dict of this one.

    Parameters are matched by name, whatever their groups. Those that ``saved`` does not have keep
    what ``own`` has, zeros in a fresh optimizer; those that ``own`` does not have are left out.
    Settings stay those of ``own``. Call it once per optimizer that was used before::

        state = import_state(optimizer.state_dict(), torch_muon, names=matrix_names)
        state = import_state(state, torch_adamw, names=other_names)
        optimizer.load_state_dict(state)

    Args:
        own: ``state_dict()`` of the :class:`~hyper_parallel.Muon` to load into, whose parameters
            have names (``muon_param_groups`` gives them).
        saved: ``state_dict()`` of this optimizer, ``torch.optim.Muon``, ``torch.optim.AdamW``,
            or an optimizer with the same keys; or what ``get_optimizer_state_dict`` returns,
            unflattened.
        names: Names of its parameters, in the order in which they were given to it. None if it
            holds names itself.
        momentum_convention: ``"average"`` (this package, ``torch.optim.Muon``) or ``"sum"`` (the
            first Muon, Moonlight); see the note in this module.

    Returns:
        A state dict for ``load_state_dict``; it may share tensors with the arguments, which are not
        modified.

    Raises:
        ValueError: If names are missing or match nothing, or a parameter's state is of another
            algorithm than its group here; the message names it.
    """
    _check_convention(momentum_convention)
    saved_ids = _ids_by_name(saved, names, "the saved state")
    momenta = _momentum_by_id(saved)
    states = {key: dict(value) for key, value in own["state"].items()}
    num_matched = 0
    for group in own["param_groups"]:
        for name, key in _named_ids(group, None, "this optimizer's state"):
            if name not in saved_ids:
                continue
            num_matched += 1
            found = saved["state"].get(saved_ids[name], {})
            if not found:
                continue  # it had no gradient yet
            scale = 1.0
            if momentum_convention == "sum" and group["algorithm"] == "muon":
                scale = _one_minus(momenta.get(saved_ids[name]) or group["momentum"], name)
            states[key] = _converted(found, name, group["algorithm"], scale)
    if not num_matched:
        theirs = ", ".join(list(saved_ids)[:5])
        raise ValueError(
            f"no parameter of this optimizer has a name of the saved state, which has {theirs}; "
            "pass names= as they are in the model"
        )
    return {**own, "state": states}


def export_state(
    own: Mapping[str, Any], algorithm: str, *, momentum_convention: str = "average"
) -> StateDict:
    """The part of this optimizer's state that ``torch.optim.Muon`` or ``AdamW`` can load.

    Args:
        own: ``state_dict()`` of a :class:`~hyper_parallel.Muon`; for optimizers on one process,
            of whole tensors.
        algorithm: ``"muon"`` for ``torch.optim.Muon``, ``"adamw"`` for ``torch.optim.AdamW``.
        momentum_convention: ``"average"`` for ``torch.optim.Muon``; ``"sum"`` as in
            :func:`import_state`.

    Returns:
        A state dict for an optimizer with the parameters of the groups of that algorithm, in their
        order. Its tensors are new, since torch shares those that it loads.

    Raises:
        ValueError: If there is no such group, or torch's optimizer has no setting like one of its;
            the message names it.
    """
    _check_convention(momentum_convention)
    if algorithm not in REQUIRED_STATE:
        raise ValueError(f"algorithm must be 'muon' or 'adamw', got {algorithm!r}")
    groups: list[StateDict] = []
    states: dict[int, StateDict] = {}
    position = 0
    for number, group in enumerate(own["param_groups"]):
        if group["algorithm"] != algorithm:
            continue
        label = f"parameter group {number}"
        scale = 1.0
        if algorithm == "muon" and momentum_convention == "sum":
            scale = 1 / _one_minus(group["momentum"], label)
        settings = _torch_muon(group, label) if algorithm == "muon" else _torch_adamw(group)
        numbers = list(range(position, position + len(group["params"])))
        position += len(numbers)
        for new, key in zip(numbers, group["params"], strict=True):
            state = own["state"][key]
            states[new] = {
                kind: value * scale if kind == "momentum_buffer" else value.clone()
                for kind, value in state.items()
                if kind != RESIDUAL  # torch rounds weights to the nearest
            }
        groups.append({**settings, "params": numbers})
    if not groups:
        raise ValueError(f"no parameter group has algorithm {algorithm!r}")
    return {"state": states, "param_groups": groups}


def _converted(
    found: Mapping[str, Any], name: str, algorithm: str, scale: float
) -> dict[str, Tensor]:
    renamed = {_ALIASES.get(key, key): value for key, value in found.items()}
    missing = [key for key in REQUIRED_STATE[algorithm] if key not in renamed]
    if missing:
        raise ValueError(
            f"{name}: algorithm {algorithm!r} needs state {', '.join(missing)}, but the saved one "
            f"is {', '.join(map(str, found))}; give the parameter to the algorithm that it was "
            "saved with (overrides= of muon_param_groups), or delete its saved state and start "
            "at zero"
        )
    if algorithm == "muon":
        residual = {RESIDUAL: renamed[RESIDUAL]} if RESIDUAL in renamed else {}
        return {"momentum_buffer": renamed["momentum_buffer"] * scale, **residual}
    kept = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", RESIDUAL)
    state = {key: renamed[key] for key in kept if key in renamed}
    state["step"] = torch.as_tensor(state["step"], dtype=torch.float32)
    return state


def _ids_by_name(
    saved: Mapping[str, Any], names: Sequence[str] | None, label: str
) -> dict[str, int | str]:
    ids: dict[str, int | str] = {}
    given = list(names) if names is not None else None
    if given is not None:
        num_params = sum(len(group["params"]) for group in saved["param_groups"])
        if len(given) != num_params:
            raise ValueError(
                f"names has {len(given)} names, but {label} has {num_params} parameters; give one "
                "name per parameter, in the order in which the optimizer got them"
            )
    for group in saved["param_groups"]:
        here = None
        if given is not None:
            here, given = given[: len(group["params"])], given[len(group["params"]) :]
        ids.update(_named_ids(group, here, label))
    return ids


def _named_ids(
    group: Mapping[str, Any], names: Sequence[str] | None, label: str
) -> list[tuple[str, int | str]]:
    """Names without wrappers, and ids; torch's distributed state dicts have names for ids."""
    keys = list(group["params"])
    if names is None:
        names = group.get("param_names")
    if names is None and all(isinstance(key, str) for key in keys):
        names = keys
    if names is None:
        raise ValueError(
            f"{label} has no parameter names; pass names= for a saved state, and build the "
            "optimizer from muon_param_groups(model) or (name, parameter) pairs"
        )
    return list(zip(map(strip_wrappers, names), keys, strict=True))


def _momentum_by_id(saved: Mapping[str, Any]) -> dict[int | str, float]:
    groups = saved["param_groups"]
    return {key: g["momentum"] for g in groups if "momentum" in g for key in g["params"]}


def _one_minus(momentum: float, label: str) -> float:
    if momentum >= 1:
        raise ValueError(f"{label}: with momentum {momentum} a sum is no multiple of an average")
    return 1 - momentum


def _check_convention(convention: str) -> None:
    if convention not in MOMENTUM_CONVENTIONS:
        raise ValueError(
            f"momentum_convention must be one of {MOMENTUM_CONVENTIONS}, got {convention!r}"
        )


def _torch_muon(group: Mapping[str, Any], label: str) -> StateDict:
    schedule = resolve_coefficients(group["ns_coefficients"], group["ns_steps"])
    has = "torch.optim.Muon has no such setting"
    if len(set(schedule)) > 1:
        raise ValueError(f"{label}: its Newton-Schulz coefficients differ by step; {has}")
    if group["adjust_lr_fn"] not in {None, "original", "match_rms_adamw"}:
        raise ValueError(f"{label}: adjust_lr_fn={group['adjust_lr_fn']!r}; {has}")
    if group["matrix_view"] is not None:
        raise ValueError(f"{label}: matrix_view={group['matrix_view']!r}; {has}")
    if group.get("maximize"):
        raise ValueError(f"{label}: maximize=True; {has}")
    settings = _kept(group, _TORCH_MUON_KEYS)
    return {**settings, "ns_coefficients": schedule[0], "ns_steps": len(schedule)}


def _torch_adamw(group: Mapping[str, Any]) -> StateDict:
    return {**_kept(group, _TORCH_ADAMW_KEYS), **_TORCH_ADAMW_RUN}


def _kept(group: Mapping[str, Any], keys: Sequence[str]) -> StateDict:
    return {key: group[key] for key in (*keys, "param_names", "initial_lr") if key in group}
