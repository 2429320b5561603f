# SPDX-License-Identifier: Apache-2.0
"""The error for input that a person has to correct."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """What a person gave cannot be meant; the message is one line and says what would be right."""


def unknown(what: str, given: str, known: Iterable[str], *, hint: str = "") -> str:
    """The message about a name that is none of those known.

    Args:
        what: What the name stands for, e.g. ``"model"``.
        given: The name.
        known: The names that there are.
        hint: What else would do; goes to the end.

    Returns:
        One line with the names that are near, or the first twenty if none is.

    Example:
        >>> print(unknown("mesh axis", "dp_shrad", ["dp_shard", "tp"]))
        unknown mesh axis 'dp_shrad'; did you mean 'dp_shard'?
    """
    names = list(known)
    near = difflib.get_close_matches(given, names, n=3, cutoff=0.5)
    if near:
        told = f"; did you mean {' or '.join(map(repr, near))}?"
    else:
        told = f"; known: {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"
    return f"unknown {what} {given!r}{told}{f' {hint}' if hint else ''}"
