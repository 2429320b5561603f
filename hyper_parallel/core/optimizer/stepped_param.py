# SPDX-License-Identifier: Apache-2.0
"""A parameter of the optimizer, and whether it or its gradient can be stepped on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hyper_parallel.core.optimizer.dtensor_layout import local_gradient, local_tensor
from hyper_parallel.core.optimizer.layout import ParamLayout

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class SteppedParam:
    """A parameter as it was when the plan was made.

    Attributes:
        name: What to call it.
        param: The parameter.
        group: Its parameter group; read at every step, so schedulers are heard.
        local_shape: Shape of its local tensor.
        dtype: Its dtype.
        ranks: Global ranks of its mesh, ascending; all of them must step on it alike.
        source: Layout of its momentum, if that is cut finer than the parameter.
    """

    name: str
    param: Tensor
    group: Mapping[str, Any]
    local_shape: tuple[int, ...]
    dtype: torch.dtype
    ranks: tuple[int, ...]
    source: ParamLayout | None = None


def param_names(group: Mapping[str, Any], number: int) -> list[str]:
    """Names of a group's parameters, or their positions and shapes if they were given none.

    Args:
        group: The group.
        number: Its position in the optimizer.

    Returns:
        One name per parameter.
    """
    if "param_names" in group:
        return list(group["param_names"])
    return [param_name(param, i, number) for i, param in enumerate(group["params"])]


def param_name(param: Tensor, position: int, number: int) -> str:
    """What to call a parameter that was given no name."""
    return f"parameter {position} of group {number} (shape {tuple(param.shape)})"


def check_new_params(group: Mapping[str, Any], number: int, taken: Mapping[Tensor, str]) -> None:
    """Check that the parameters of a new group can be stepped on.

    Args:
        group: The group, complete; ``params`` are tensors or ``(name, tensor)`` pairs.
        number: Its position in the optimizer.
        taken: Parameters of the other groups, with their names.

    Raises:
        ValueError: If one of them cannot, or is in the optimizer already; the message names it.
    """
    seen = dict(taken)
    known = set(taken.values())
    for i, given in enumerate(group["params"]):
        param = given[1] if isinstance(given, tuple) else given
        if not isinstance(param, Tensor):
            return  # torch says what it is
        name = given[0] if isinstance(given, tuple) else param_name(param, i, number)
        if not (param.is_leaf or param.retains_grad):
            raise ValueError(
                f"{name}: a non-leaf tensor, the result of a computation; give the optimizer the "
                "parameter that it was computed from"
            )
        if param in seen:
            raise ValueError(
                f"{name}: it appears more than once in the optimizer, first as {seen[param]}; list "
                "a tied parameter once"
            )
        if name in known:
            raise ValueError(f"{name}: two parameters have this name; names must differ")
        seen[param] = name
        known.add(name)
        if param.layout != torch.strided:
            raise ValueError(
                f"{name}: expected a dense tensor, got layout {param.layout}; make it dense with "
                "to_dense() or leave it out of the optimizer"
            )
        if param.dtype not in _DTYPES:
            raise ValueError(
                f"{name}: expected real floating-point numbers of 16 to 64 bits, got "
                f"{param.dtype}; leave it out of the optimizer"
            )
        if group["algorithm"] == "muon" and param.ndim < 2:
            raise ValueError(
                f"{name}: Muon needs at least 2 dimensions, got shape {tuple(param.shape)}; put it "
                "into a group with algorithm='adamw', or let muon_param_groups(model) sort the "
                "parameters"
            )


def gradient_of(entry: SteppedParam) -> Tensor | None:
    """This rank's part of the gradient, after a look at parameter and gradient.

    Args:
        entry: The parameter.

    Returns:
        Plain tensor of the parameter's local shape; None without a gradient.

    Raises:
        ValueError: If it cannot be stepped on: what was expected, what was found, what to do.
    """
    name, param, gradient = entry.name, entry.param, entry.param.grad
    local_shape = tuple(local_tensor(param).shape)
    if local_shape != entry.local_shape or param.dtype != entry.dtype:
        raise ValueError(
            f"{name}: its local tensor was {entry.dtype} of shape {entry.local_shape} when the "
            f"optimizer was built and is {param.dtype} of shape {local_shape} now; build the "
            "optimizer after the model is cast and sharded"
        )
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        raise ValueError(
            f"{name}: expected a dense gradient, got layout {gradient.layout}; make it dense"
        )
    if gradient.dtype not in _DTYPES:
        raise ValueError(
            f"{name}: expected a gradient of real numbers of 16 to 64 bits, got {gradient.dtype}"
        )
    try:
        return local_gradient(param)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
