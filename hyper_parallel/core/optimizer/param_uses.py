# SPDX-License-Identifier: Apache-2.0
"""Find the places of a model where each of its parameters sits, whatever wraps the model."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

__all__ = ["ModulePath", "ParameterUse", "find_uses", "strip_wrappers"]

ModulePath = tuple[str, ...]

_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUse:
    """One of the places where a parameter sits; a tied parameter has several.

    Attributes:
        fqn: Name by this place, wrappers included.
        path: Parts of the name without wrappers. A parametrized tensor has its original name.
        module: The module that owns it; of a parametrized tensor, the module that uses it.
        param: The parameter.
    """

    fqn: str
    path: ModulePath
    module: nn.Module
    param: nn.Parameter

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return tuple(self.param.shape)

    @property
    def type_name(self) -> str:
        """Class name of the owning module."""
        return type(self.module).__name__


def strip_wrappers(fqn: str) -> str:
    """Remove what DDP, ``torch.compile`` and checkpoint wrappers add to a name.

    Args:
        fqn: Name from ``named_parameters()`` or ``named_modules()``.

    Returns:
        The name that the unwrapped model would give.

    Example:
        >>> strip_wrappers("module._orig_mod.layers.0.weight")
        'layers.0.weight'
    """
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


def find_uses(model: nn.Module) -> list[list[ParameterUse]]:
    """List the places of each parameter of a model.

    Args:
        model: Any module. It is only read.

    Returns:
        One non-empty list for each parameter, in the order of ``model.named_parameters()``, whose
        first name comes first.

    Raises:
        ValueError: If a parameter is lazy and has no shape yet.
    """
    places: dict[int, list[ParameterUse]] = {}
    for use in _walk(model):
        if is_lazy(use.param):
            raise ValueError(f"{use.fqn}: a lazy parameter has no shape; run one forward first")
        places.setdefault(id(use.param), []).append(use)
    found = []
    for fqn, param in model.named_parameters():
        first, *others = places.get(id(param)) or [_unplaced(fqn, model, param)]
        # A wrapper at the root may hide itself from the names that the model gives.
        renamed = ParameterUse(fqn=fqn, path=first.path, module=first.module, param=param)
        found.append([renamed, *others])
    return found


def _walk(model: nn.Module) -> Iterator[ParameterUse]:
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        owner, tensor_name = name, ""
        if isinstance(module, ParametrizationList):
            owner, _, tensor_name = f".{name}".rpartition(".parametrizations.")
            owner = owner.removeprefix(".")
        for leaf, param in module.named_parameters(recurse=False, remove_duplicate=False):
            yield ParameterUse(
                fqn=f"{name}.{leaf}".removeprefix("."),
                path=_path(f"{owner}.{tensor_name or leaf}"),
                module=modules[owner],
                param=param,
            )


def _unplaced(fqn: str, model: nn.Module, param: nn.Parameter) -> ParameterUse:
    return ParameterUse(fqn=fqn, path=_path(fqn), module=model, param=param)


def _path(fqn: str) -> ModulePath:
    return tuple(strip_wrappers(fqn.removeprefix(".")).split("."))
