# SPDX-License-Identifier: Apache-2.0
"""Checks of the values of hyperparameters, one function per kind of value.

Each takes the value and what to call it, and raises a TypeError or a ValueError that says what is
allowed and what was given.
"""

import difflib
import math
from collections.abc import Callable
from numbers import Real
from typing import Final

import torch
from torch import Tensor

from hyper_parallel.core.optimizer.forms import ALL_METHODS
from hyper_parallel.core.optimizer.update_rule import ADJUST_LR_FNS
from hyper_parallel.core.optimizer.weight_rounding import WEIGHT_ROUNDINGS

_NS_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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


_SHARED_CHECKS: Final[dict[str, Callable[[object, str], None]]] = {
    "lr": _not_negative,
    "weight_decay": _plain,
    "maximize": _flag,
    "weight_rounding": _one_of(*WEIGHT_ROUNDINGS),
}
MUON_CHECKS: Final[dict[str, Callable[[object, str], None]]] = {
    "momentum": _fraction,
    "nesterov": _flag,
    "eps": _plain,
    "adjust_lr_fn": _one_of(None, *ADJUST_LR_FNS),
    "ns_method": _one_of(*ALL_METHODS),
    "ns_dtype": _one_of(*_NS_DTYPES),
    "momentum_dtype": _one_of(None, *_NS_DTYPES),
    "share_replicas": _one_of(True, False, "auto"),  # noqa: FBT003 -- the choices themselves
    "shard_momentum": _flag,
    **_SHARED_CHECKS,
}
ADAMW_CHECKS: Final[dict[str, Callable[[object, str], None]]] = {
    "betas": _betas,
    "eps": _plain,
    "amsgrad": _flag,
    **_SHARED_CHECKS,
}
