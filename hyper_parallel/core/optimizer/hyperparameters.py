# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters of parameter groups: what there is, and whether a value makes sense."""

import difflib
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from hyper_parallel.core.optimizer.bucket import Orthogonalization
from hyper_parallel.core.optimizer.coefficients import resolve_coefficients
from hyper_parallel.core.optimizer.matrix_view import normalize_view
from hyper_parallel.core.optimizer.value_checks import ADAMW_CHECKS, MUON_CHECKS
from hyper_parallel.core.optimizer.weight_rounding import RESIDUAL, keeps_residual

ALGORITHMS: Final = ("muon", "adamw")
# What is given to the constructor holds for the groups of both algorithms.
_SHARED_KEYS: Final = ("lr", "weight_decay", "maximize", "weight_rounding")
MUON_KEYS: Final = (
    *_SHARED_KEYS,
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
}
ADAMW_KEYS: Final = (*_SHARED_KEYS, *_ADAMW_DEFAULTS)
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
# Arguments of torch's optimizers that say how a step runs: values that change nothing, and what to
# do instead of the others.
_INERT: Final[dict[str, tuple[tuple[object, ...], str]]] = {
    "foreach": ((None, False, True), "leave it out: kernels are batched wherever they can be"),
    "fused": (
        (None, False),
        "leave it out: ranks talk between gradient and update, so a step cannot be one kernel",
    ),
    "capturable": (
        (None, False),
        "leave it out and step outside of the CUDA graph: a step reads on the host what the other "
        "ranks say",
    ),
    "differentiable": (
        (None, False),
        "leave it out: weights are written in place, under no_grad; differentiate through "
        "orthogonalize() instead",
    ),
    "decoupled_weight_decay": (
        (None, True),
        "leave it out: weight decay is decoupled here; for the other kind, add weight_decay * p "
        "to p.grad",
    ),
}
# OneCycleLR and CyclicLR write momentum into every group.
_SCHEDULED: Final = (("adamw", "momentum"),)


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
    checks = MUON_CHECKS if algorithm == "muon" else ADAMW_CHECKS
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
        shared = {key: defaults[key] for key in _SHARED_KEYS}
        complete = {**shared, **_ADAMW_DEFAULTS, **complete}
    else:
        complete = {**defaults, **complete}
        complete["matrix_view"] = normalize_view(complete["matrix_view"], label)
    check_group(complete, label)
    return complete


def check_arguments(others: Mapping[str, object]) -> None:
    """Check what was given to the constructor that it does not have.

    Args:
        others: Arguments of other optimizers, by name.

    Raises:
        TypeError: If one of them is unknown, or asks for what is not offered.
    """
    for key in set(others) & set(_ANNOTATIONS):
        raise TypeError(
            f"Muon: {key!r} belongs into a parameter group: "
            f"Muon([{{'params': [...], {key!r}: {others[key]!r}}}])"
        )
    try:
        check_keys(others, "Muon")
    except ValueError as error:
        raise TypeError(str(error)) from None


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
        if key in _INERT:
            inert, way_out = _INERT[key]
            if any(group[key] is value for value in inert):
                continue
            raise ValueError(f"{label}: {key}={group[key]!r} is not offered; {way_out}")
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
        if key in others:
            hint = f"; it belongs to groups with algorithm={other!r}"
        else:
            hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"{label}: unknown key {key!r} for algorithm {algorithm!r}{hint}. "
            f"Known keys: {', '.join(known)}"
        )


def state_dtype(kind: str, group: Mapping[str, Any], dtype: torch.dtype) -> torch.dtype:
    """Dtype of a state.

    Args:
        kind: Its key.
        group: The complete group of its parameter.
        dtype: Dtype of its parameter.

    Returns:
        The dtype. AdamW's moments beside compensated weights are of float32: in half precision they
        would stand still as weights do, since ``1 - beta2`` is 0.001.
    """
    if kind == "momentum_buffer":
        momentum_dtype: torch.dtype | None = group["momentum_dtype"]
        return momentum_dtype or dtype
    if kind != RESIDUAL and keeps_residual(group["weight_rounding"], dtype):
        return torch.float32
    return dtype


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
