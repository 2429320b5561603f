# SPDX-License-Identifier: Apache-2.0
"""Check what a caller wants otherwise for some parameters, before any of it is applied."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from hyper_parallel.core.optimizer.param_uses import ParameterUse, strip_wrappers

__all__ = ["Override", "check_options", "check_patterns", "matches", "normalize_overrides"]

Override = str | Mapping[str, Any]

_SHARED_KEYS = {"lr", "weight_decay", "eps"}
_MUON_KEYS = {
    *("momentum", "nesterov", "ns_coefficients", "ns_steps", "ns_method", "ns_dtype"),
    *("momentum_dtype", "adjust_lr_fn", "matrix_view", "share_replicas", "shard_momentum"),
}
_ADAMW_KEYS = {"betas", "amsgrad", "maximize"}
_NON_NEGATIVE = {"lr", "weight_decay", "eps", "momentum"}


def normalize_overrides(overrides: Mapping[str, Override]) -> dict[str, Mapping[str, Any]]:
    """Bring overrides to their long form, a mapping of options for each pattern.

    Args:
        overrides: From patterns to an algorithm or to options.

    Returns:
        The same patterns in the same order.

    Raises:
        TypeError: If an override is neither a string nor a mapping.
        ValueError: If an algorithm is unknown.

    Example:
        >>> normalize_overrides({"*.gate.*": "adamw"})
        {'*.gate.*': {'algorithm': 'adamw'}}
    """
    rules: dict[str, Mapping[str, Any]] = {}
    for pattern, override in overrides.items():
        options = {"algorithm": override} if isinstance(override, str) else override
        if not isinstance(options, Mapping):
            raise TypeError(
                f"override {pattern!r} must be 'muon', 'adamw' or a mapping of options, got "
                f"{override!r}"
            )
        algorithm = options.get("algorithm", "muon")
        if algorithm not in ("muon", "adamw"):
            raise ValueError(
                f"override {pattern!r}: algorithm must be 'muon' or 'adamw', got {algorithm!r}"
            )
        rules[pattern] = options
    return rules


def matches(pattern: str, places: Sequence[ParameterUse]) -> bool:
    """Tell whether a pattern matches any name of a parameter, with or without wrappers.

    Args:
        pattern: In the manner of ``fnmatch``, case-sensitive; ``*`` crosses dots.
        places: The places of one parameter.

    Returns:
        True if one of its names matches.
    """
    names = (name for use in places for name in (use.fqn, strip_wrappers(use.fqn)))
    return any(fnmatchcase(name, pattern) for name in names)


def check_patterns(patterns: Iterable[str], uses: Sequence[Sequence[ParameterUse]]) -> None:
    """Make sure that no pattern is idle.

    Args:
        patterns: Patterns of the overrides.
        uses: The places of each parameter, frozen ones included.

    Raises:
        ValueError: If a pattern matches no trainable parameter. Names near matches.
    """
    trainable = [places for places in uses if places[0].param.requires_grad]
    for pattern in patterns:
        if any(matches(pattern, places) for places in trainable):
            continue
        if any(matches(pattern, places) for places in uses):
            raise ValueError(f"override {pattern!r} matches frozen parameters only")
        names = [use.fqn for places in trainable for use in places]
        near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise ValueError(f"override {pattern!r} matches no trainable parameter{hint}")


def check_options(options: Mapping[str, Any], algorithm: str, source: str) -> None:
    """Refuse options that cannot be meant. Unknown ones pass unless they look like a typing error.

    Args:
        options: Keys of a parameter group, without ``"params"`` and ``"algorithm"``.
        algorithm: ``"muon"`` or ``"adamw"``.
        source: Where they come from, for the error.

    Raises:
        ValueError: If a key belongs to the other algorithm, is reserved or misspelt, or if a value
            is out of range.
    """
    known = _SHARED_KEYS | (_MUON_KEYS if algorithm == "muon" else _ADAMW_KEYS)
    foreign = (_MUON_KEYS | _ADAMW_KEYS) - known
    for key, value in options.items():
        if key in foreign:
            raise ValueError(f"{source}: {key!r} does not apply to algorithm {algorithm!r}")
        if not isinstance(key, str) or key in ("params", "param_names", "algorithm"):
            raise ValueError(f"{source}: {key!r} cannot be an option")
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        if key not in known and near:
            raise ValueError(f"{source}: unknown option {key!r}; did you mean {near[0]!r}?")
        if key in _NON_NEGATIVE and not _is_non_negative(value):
            raise ValueError(f"{source}: {key} must be a non-negative number, got {value!r}")
        if key == "matrix_view" and not _is_view(value):
            raise ValueError(
                f"{source}: matrix_view must be None, 'flatten', ('split', (rows, ...)) or "
                f"('heads', num_heads), got {value!r}"
            )


def _is_non_negative(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return True  # a look would wait for its device
    return isinstance(value, int | float) and value >= 0


def _is_view(value: object) -> bool:
    # The form only: the optimizer checks the sizes, which a list may hold as well as a tuple.
    if value is None or value == "flatten":
        return True
    return isinstance(value, list | tuple) and len(value) == 2 and value[0] in ("split", "heads")
