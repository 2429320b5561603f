# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters of parameter groups: what there is, and whether a value makes sense."""

import difflib
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Final

import torch
from torch import Tensor

from hyper_parallel.core.optimizer.bucket import Orthogonalization
from hyper_parallel.core.optimizer.coefficients import resolve_coefficients
from hyper_parallel.core.optimizer.forms import METHODS
from hyper_parallel.core.optimizer.matrix_view import normalize_view
from hyper_parallel.core.optimizer.update_rule import ADJUST_LR_FNS

ALGORITHMS: Final = ("muon", "adamw")
MUON_KEYS: Final = (
    "lr",
    "weight_decay",
    "momentum",
    "nesterov",
    "ns_coefficients",
    "eps",
    "ns_steps",
    "adjust_lr_fn",
    "ns_method",
    "ns_dtype",
    "momentum_dtype",
    "share_replicas",
    "shard_momentum",
    "matrix_view",
)
_ADAMW_DEFAULTS: Final[dict[str, Any]] = {
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
}
ADAMW_KEYS: Final = ("lr", "weight_decay", *_ADAMW_DEFAULTS)
# Keys that torch, its schedulers and people put into a group; they are kept and mean nothing here.
_ANNOTATIONS: Final = (
    "params",
    "param_names",
    "name",
    "algorithm",
    "initial_lr",
    "max_lr",
    "min_lr",
    "max_momentum",
    "base_momentum",
    "swa_lr",
)
# Keys of torch's own AdamW, which a loaded group may have; only these values change nothing.
_INERT: Final = {
    "differentiable": (None, False),
    "foreach": (None, False),
    "fused": (None, False),
    "capturable": (None, False),
    "decoupled_weight_decay": (None, True),
}
# OneCycleLR and CyclicLR write momentum into every group.
_SCHEDULED: Final = (("adamw", "momentum"),)
_NS_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_group(group: Mapping[str, Any], label: str) -> None:
    """Check a complete parameter group.

    Args:
        group: The group, defaults filled in.
        label: What to call it in an error, e.g. ``"parameter group 0"``.

    Raises:
        ValueError: If the algorithm, a key or a value is not one of those allowed.
        TypeError: If a value has the wrong type.
    """
    algorithm = group["algorithm"]
    checks = _MUON_CHECKS if algorithm == "muon" else _ADAMW_CHECKS
    for key, check in checks.items():
        check(group[key], f"{label}: {key}")
    if algorithm == "muon":
        orthogonalization_of(group, label)
        normalize_view(group["matrix_view"], label)
        if group["shard_momentum"] and group["share_replicas"] is False:
            raise ValueError(
                f"{label}: shard_momentum=True needs share_replicas=True or 'auto': a matrix whose "
                "momentum is split over the replicas can only be gathered from all of them"
            )


def complete_group(group: Any, defaults: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Check a group as a user wrote it, and fill in what it does not say.

    Args:
        group: The group.
        defaults: The optimizer's own settings.
        label: What to call it in an error.

    Returns:
        A new, complete dict; ``params`` are a list.

    Raises:
        TypeError: If it is not a dict, or a value has the wrong type.
        ValueError: If it is empty, the algorithm or a key is unknown (near names are suggested), or
            a value makes no sense.
    """
    if not isinstance(group, dict):
        raise TypeError(f"{label} must be a dict, got {type(group).__name__}")
    if "params" not in group:
        raise ValueError(f"{label} has no 'params', only {sorted(map(str, group))}")
    complete = dict(group)
    if isinstance(complete["params"], set):
        raise TypeError(f"{label}: params must be in an order that all ranks share, got a set")
    if isinstance(complete["params"], Tensor):
        complete["params"] = [complete["params"]]
    complete["params"] = list(complete["params"])
    if not complete["params"]:
        raise ValueError(f"{label} is empty; leave it out")
    check_keys(complete, label)
    if complete.setdefault("algorithm", "muon") == "adamw":
        shared = {key: defaults[key] for key in ("lr", "weight_decay")}
        complete = {**shared, **_ADAMW_DEFAULTS, **complete}
    else:
        complete = {**defaults, **complete}
        complete["matrix_view"] = normalize_view(complete["matrix_view"], label)
    check_group(complete, label)
    return complete


def check_keys(group: Mapping[str, Any], label: str) -> None:
    """Check that a group has no unknown key.

    Args:
        group: The group; need not be complete.
        label: What to call it in an error.

    Raises:
        ValueError: If the algorithm or a key is unknown; near names are suggested.
    """
    algorithm = group.get("algorithm", "muon")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"{label}: algorithm must be one of {ALGORITHMS}, got {algorithm!r}")
    known, others = (MUON_KEYS, ADAMW_KEYS) if algorithm == "muon" else (ADAMW_KEYS, MUON_KEYS)
    other = ALGORITHMS[1 - ALGORITHMS.index(algorithm)]
    for key in group:
        if key in known or key in _ANNOTATIONS or (algorithm, key) in _SCHEDULED:
            continue
        if any(group[key] is value for value in _INERT.get(key, ())):
            continue
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
        if key in others:
            hint = f"; it belongs to groups with algorithm={other!r}"
        else:
            hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"{label}: unknown key {key!r} for algorithm {algorithm!r}{hint}. "
            f"Known keys: {', '.join(known)}"
        )


def orthogonalization_of(
    group: Mapping[str, Any], label: str, *, device_type: str = "cpu"
) -> Orthogonalization:
    """How a Muon group's matrices are orthogonalized.

    Args:
        group: A complete Muon group.
        label: What to call it in an error.
        device_type: Where the matrices are.

    Returns:
        The record that the plan carries.

    Raises:
        ValueError: If the coefficients and the number of steps do not go together.
        TypeError: If they are not numbers.
    """
    try:
        schedule = resolve_coefficients(group["ns_coefficients"], group["ns_steps"])
    except (ValueError, TypeError) as error:
        raise type(error)(f"{label}: {error}") from None
    return Orthogonalization(
        coefficients=schedule,
        method=group["ns_method"],
        eps=float(group["eps"]),
        dtype=str(group["ns_dtype"]).removeprefix("torch."),
        device_type=device_type,
    )


def _not_negative(value: object, label: str) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{label} must have one element, got shape {tuple(value.shape)}")
        if not value.is_floating_point():
            raise TypeError(f"{label} must be a real number, got a tensor of {value.dtype}")
        if value.device.type != "cpu":
            return  # a look would wait for the device
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{label} must be a number, got {value!r}")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{label} must be at least 0 and finite, got {value!r}")


def _plain(value: object, label: str) -> None:
    if isinstance(value, Tensor):
        raise TypeError(f"{label} must be a plain number, got a tensor")
    _not_negative(value, label)


def _fraction(value: object, label: str) -> None:
    _plain(value, label)
    assert isinstance(value, Real)
    if float(value) > 1:
        raise ValueError(f"{label} must be at most 1, got {value!r}")


def _flag(value: object, label: str) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{label} must be True or False, got {value!r}")


def _one_of(*choices: object) -> Callable[[object, str], None]:
    def check(value: object, label: str) -> None:
        if not any(value is c or (isinstance(value, str) and value == c) for c in choices):
            near = difflib.get_close_matches(
                str(value), [c for c in choices if isinstance(c, str)], n=1
            )
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{label} must be one of {choices}, got {value!r}{hint}")

    return check


def _betas(value: object, label: str) -> None:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise TypeError(f"{label} must be two numbers, got {value!r}")
    for i, beta in enumerate(value):
        _plain(beta, f"{label}[{i}]")
        if float(beta) >= 1:
            raise ValueError(f"{label} must be less than 1, got {value!r}")


_MUON_CHECKS: Final[dict[str, Callable[[object, str], None]]] = {
    "lr": _not_negative,
    "weight_decay": _plain,
    "momentum": _fraction,
    "nesterov": _flag,
    "eps": _plain,
    "adjust_lr_fn": _one_of(None, *ADJUST_LR_FNS),
    "ns_method": _one_of(*METHODS),
    "ns_dtype": _one_of(*_NS_DTYPES),
    "momentum_dtype": _one_of(None, *_NS_DTYPES),
    "share_replicas": _one_of(True, False, "auto"),  # noqa: FBT003 -- the choices themselves
    "shard_momentum": _flag,
}
_ADAMW_CHECKS: Final[dict[str, Callable[[object, str], None]]] = {
    "lr": _not_negative,
    "weight_decay": _plain,
    "betas": _betas,
    "eps": _plain,
    "amsgrad": _flag,
    "maximize": _flag,
}
