# SPDX-License-Identifier: Apache-2.0
"""What a person wants otherwise for some parameters: placements and views, by pattern. No torch."""

import difflib
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from hyper_parallel.core.optimizer.matrix_view import MatrixView, normalize_view
from hyper_parallel.models.errors import InputError
from hyper_parallel.models.model_param import Model, ModelParam
from hyper_parallel.models.recipes import parse_placements


def override(model: Model, placements: Sequence[str], views: Sequence[str]) -> Model:
    """Apply ``PATTERN=...`` options to a model; later ones win.

    Args:
        model: The model.
        placements: Such as ``"*.gate.weight=dp_shard:S(1),tp:R"``; axes that are not named keep
            their recipe.
        views: Such as ``"*.c_attn.weight=split:768,768,768"``.

    Returns:
        The model with these placements and views.

    Raises:
        InputError: If an option is malformed, or its pattern matches nothing.
    """
    params = list(model.params)
    for option in placements:
        pattern, value = _pattern_and_value(option, "--placement")
        told = parse_placements(value)
        for i in _matches(pattern, params, "--placement"):
            params[i] = replace(params[i], placements={**params[i].placements, **told})
    for option in views:
        pattern, value = _pattern_and_value(option, "--view")
        view = parse_view(value)
        for i in _matches(pattern, params, "--view"):
            params[i] = replace(params[i], view=view)
    return replace(model, params=tuple(params))


def parse_view(text: str) -> MatrixView:
    """Read what a matrix is.

    Args:
        text: ``"flatten"``, ``"heads:N"``, ``"split:a,b,c"`` or ``"none"``.

    Returns:
        The view.

    Raises:
        InputError: If it is none of these.

    Example:
        >>> parse_view("split:64,32,32")
        ('split', (64, 32, 32))
    """
    kind, _, argument = text.partition(":")
    view: object = None if text == "none" else kind
    try:
        if kind == "heads":
            view = (kind, int(argument))
        elif kind == "split":
            view = (kind, tuple(int(size) for size in argument.split(",")))
        return normalize_view(view, "--view")
    except ValueError:
        raise InputError(
            f"--view: expected none, flatten, heads:N or split:rows,rows,..., got {text!r}"
        ) from None


def _pattern_and_value(option: str, name: str) -> tuple[str, str]:
    pattern, equals, value = option.partition("=")
    if not equals or not pattern or not value:
        raise InputError(f"{name}: expected PATTERN=VALUE, got {option!r}")
    return pattern, value


def _matches(pattern: str, params: Sequence[ModelParam], name: str) -> list[int]:
    found = [i for i, param in enumerate(params) if fnmatchcase(param.name, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern, [p.name for p in params], n=3, cutoff=0.4)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise InputError(f"{name}: {pattern!r} matches no parameter{hint}")
    return found
