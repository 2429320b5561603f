# SPDX-License-Identifier: Apache-2.0
"""A model as a JSON list of names, shapes and placements. No torch."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hyper_parallel.core.optimizer.matrix_view import normalize_view
from hyper_parallel.models.errors import InputError, unknown
from hyper_parallel.models.model_param import Model, ModelParam
from hyper_parallel.models.recipes import parse_placements

_KEYS: Final = ("name", "shape", "placements", "view", "algorithm")


def shape_list(rows: Sequence[Any], source: str) -> Model:
    """Read a list of parameters.

    Args:
        rows: ``{"name": ..., "shape": [...]}``, with ``"placements"`` (``{"tp": "S(0)"}`` or
            ``"tp:S(0)"``; recipes decide about axes that are not named), ``"view"`` and
            ``"algorithm"`` if wanted. What has two dims or more is Muon's unless it says otherwise.
        source: The file.

    Returns:
        The model.

    Raises:
        InputError: If a row is malformed, or two have the same name.
    """
    params = [_param(row, f"{source}, row {number}") for number, row in enumerate(rows)]
    first: dict[str, int] = {}
    for number, param in enumerate(params):
        if first.setdefault(param.name, number) != number:
            raise InputError(
                f"{source}, row {number}: row {first[param.name]} is named {param.name!r}, too"
            )
    return Model(name=source, params=tuple(params), source=source)


def _param(row: Any, where: str) -> ModelParam:
    if not isinstance(row, Mapping):
        raise InputError(f"{where}: expected an object with name and shape, got {row!r}")
    for key in row:
        if key not in _KEYS:
            raise InputError(unknown(f"key in {where}:", str(key), _KEYS))
    name, shape = row.get("name"), row.get("shape")
    if not isinstance(name, str) or not name:
        raise InputError(f"{where}: name must be a string, got {name!r}")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise InputError(f"{where} ({name}): shape must be a list of sizes, got {shape!r}")
    algorithm = row.get("algorithm", "muon" if len(shape) > 1 else "adamw")
    if algorithm not in ("muon", "adamw"):
        raise InputError(f"{where} ({name}): algorithm must be muon or adamw, got {algorithm!r}")
    if algorithm == "muon" and len(shape) < 2:
        raise InputError(f"{where} ({name}): Muon needs at least two dims, got shape {shape}")
    try:
        view = normalize_view(row.get("view"), f"{where} ({name})")
    except ValueError as error:
        raise InputError(str(error)) from None
    return ModelParam(
        name=name,
        shape=tuple(shape),
        algorithm=algorithm,
        role="listed in the file",
        view=view,
        placements=_placements(row.get("placements", {}), f"{where} ({name})"),
    )


def _placements(given: Any, where: str) -> dict[str, str]:
    if isinstance(given, Mapping):
        given = ",".join(f"{axis}:{placement}" for axis, placement in given.items())
    if not isinstance(given, str):
        raise InputError(f"{where}: placements must be an object by mesh axis, got {given!r}")
    try:
        return parse_placements(given) if given else {}
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
