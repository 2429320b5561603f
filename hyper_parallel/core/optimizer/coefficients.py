# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz coefficients: published tables, and the rules for reading a user's choice.

A schedule is one triple ``(a, b, c)`` per step; a step maps each singular value ``x`` to
``a x + b x^3 + c x^5``. Where a comment below gives a band, it is where a schedule sends singular
values between 1e-3 and 1, the largest possible after normalization being 1.
"""

import difflib
import math
import numbers
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias, TypeGuard

__all__ = ["PRESETS", "Coefficients", "Schedule", "resolve_coefficients"]

Triple: TypeAlias = tuple[float, float, float]
Schedule: TypeAlias = tuple[Triple, ...]
Coefficients: TypeAlias = str | Sequence[float] | Sequence[Sequence[float]]

_DEFAULT_STEPS = 5
_MAX_STEPS = 100  # Exclusive, as in torch.optim.Muon.


def _with_safety_factor(schedule: Schedule, factor: float) -> Schedule:
    # p(x / factor) instead of p(x), in every step but the last: these polynomials are optimal up
    # to the very end of their interval and explode beyond it, so that a singular value which
    # rounding lifts above 1 would diverge without it.
    scaled = [(a / factor, b / factor**3, c / factor**5) for a, b, c in schedule[:-1]]
    return (*scaled, schedule[-1])


# Keller Jordan, https://kellerjordan.github.io/posts/muon/. The default of torch.optim.Muon.
# Band after 5 steps: 0.47 to 1.20. Bounded for inputs beyond 1.
_JORDAN: Triple = (3.4445, -4.7750, 2.0315)

# You Jiacheng, https://x.com/YouJiacheng/status/1905861218138804534, as listed in
# https://github.com/NVIDIA-NeMo/Emerging-Optimizers ("quintic").
# Band after 5 steps: 0.47 to 1.15. Bounded for inputs beyond 1.
_YOU: Schedule = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Amsel, Persson, Musco and Gower, "The Polar Express", https://arxiv.org/abs/2505.16932: interval
# from 1e-3, before the safety factor, which the authors set to 1.01.
# Band after 5 steps: 0.85 to 1.12, after 6: 0.994 to 1.001, after 8: 1 to 6 digits.
_POLAR_EXPRESS: Schedule = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)

# The same method made for exactly 5 steps, safety factor 1.02 included, from
# https://github.com/KellerJordan/modded-nanogpt. Band: 0.86 to 1.14.
_POLAR_EXPRESS_5: Schedule = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

# Grishina, Smirnov and Rakhuba, "CANS", https://arxiv.org/abs/2506.10935, as listed in
# https://github.com/NVIDIA-NeMo/Emerging-Optimizers. Published without a safety factor; 1.001
# already diverges, so it gets that of Polar Express. Band: 0.86 to 1.12.
_CANS: Schedule = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)

# DeepSeek-V4, as described in https://github.com/NVIDIA-NeMo/Emerging-Optimizers/pull/167: eight
# steep steps, then two that converge. Band: 1.000 to 1.001.
_DEEPSEEK_V4: Schedule = (_JORDAN,) * 8 + ((2.0, -1.5, 0.5),) * 2

PRESETS: Mapping[str, Schedule] = MappingProxyType(
    {
        "jordan": (_JORDAN,) * _DEFAULT_STEPS,
        "you": _YOU,
        "polar_express": _with_safety_factor(_POLAR_EXPRESS, 1.01),
        "polar_express_5": _POLAR_EXPRESS_5,
        "cans": _with_safety_factor(_CANS, 1.01),
        "deepseek_v4": _DEEPSEEK_V4,
    }
)

# Whose last step, repeated, keeps every singular value bounded and leads it to where it belongs:
# to 1 for Polar Express and to 0.989 for You. That of CANS leads to 1.028.
_REPEATS_LAST = frozenset({"jordan", "you", "polar_express"})
# Whose last steps are what makes them converge: a part of the table is another method.
_FIXED_LENGTH = frozenset({"polar_express_5", "deepseek_v4"})

_REFUSED = {
    "aol": (
        "its first polynomial is negative for singular values above 0.884, so that a matrix of "
        "rank one gets an update of the wrong sign; use 'you' or 'polar_express'"
    )
}


def resolve_coefficients(coefficients: Coefficients, steps: int | None = None) -> Schedule:
    """Turn a choice of Newton-Schulz coefficients into one triple per step.

    Lists are read like tuples, so that a choice survives JSON and state dicts. The result is
    itself a valid choice, and resolves to itself.

    Args:
        coefficients: One triple ``(a, b, c)`` for every step, a sequence of triples, or the name
            of a preset: one of ``PRESETS``.
        steps: Number of steps, 1 to 99. For a triple, how often it is repeated. For a sequence or
            a preset, its first ``steps`` triples; more than it has repeats the last one where
            that converges (``"jordan"``, ``"you"``, ``"polar_express"``) and is refused
            elsewhere. ``"polar_express_5"`` and ``"deepseek_v4"`` have one length, 5 and 10.
            None means the whole sequence or preset, and 5 for a triple.

    Returns:
        The schedule: ``steps`` triples of floats.

    Raises:
        TypeError: If ``coefficients`` is neither a name, a triple nor a sequence of triples of
            real numbers, or ``steps`` is not an integer.
        ValueError: If a preset is unknown, refused or of another length, a triple does not have
            three finite numbers, or ``steps`` is out of range.

    Example:
        >>> resolve_coefficients((2, -1.5, 0.5), steps=2)
        ((2.0, -1.5, 0.5), (2.0, -1.5, 0.5))
        >>> len(resolve_coefficients("polar_express")), len(resolve_coefficients("jordan", 3))
        (8, 3)
    """
    num_steps = None if steps is None else _checked_steps(steps)
    if isinstance(coefficients, str):
        return _resolve_preset(coefficients, num_steps)
    if not _is_sequence(coefficients):
        raise TypeError(
            "ns_coefficients: expected a triple (a, b, c), a sequence of triples or a preset name "
            f"({_known_presets()}), got {type(coefficients).__name__}"
        )
    if not coefficients:
        raise ValueError("ns_coefficients: expected at least one triple (a, b, c), got none")
    if not _is_sequence(coefficients[0]):
        triple = _checked_triple(coefficients, "ns_coefficients")
        return (triple,) * (num_steps or _DEFAULT_STEPS)
    schedule = tuple(
        _checked_triple(triple, f"ns_coefficients[{index}]")
        for index, triple in enumerate(coefficients)
    )
    return _resolve_explicit(schedule, num_steps)


def _resolve_preset(name: str, num_steps: int | None) -> Schedule:
    if name in _REFUSED:
        raise ValueError(f"ns_coefficients={name!r} is refused: {_REFUSED[name]}")
    if name not in PRESETS:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=2)
        hint = f" did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(
            f"ns_coefficients={name!r} is no preset;{hint} the presets are {_known_presets()}; "
            "a triple (a, b, c) or a sequence of triples is accepted too"
        )
    schedule = PRESETS[name]
    length = len(schedule)
    if num_steps is None or num_steps == length:
        return schedule
    if name in _FIXED_LENGTH:
        raise ValueError(
            f"ns_coefficients={name!r} has exactly {length} steps and converges only as a whole, "
            f"got ns_steps={num_steps}; pass ns_steps={length} or ns_steps=None"
        )
    if num_steps > length and name not in _REPEATS_LAST:
        raise ValueError(
            f"ns_coefficients={name!r} has {length} steps and repeating the last does not "
            f"converge to 1, got ns_steps={num_steps}; pass ns_steps={length} or less, or "
            "ns_coefficients='polar_express', which may be repeated"
        )
    return schedule[:num_steps] + schedule[-1:] * (num_steps - length)


def _resolve_explicit(schedule: Schedule, num_steps: int | None) -> Schedule:
    length = len(schedule)
    if length >= _MAX_STEPS:
        raise ValueError(f"ns_coefficients: expected fewer than {_MAX_STEPS} triples, got {length}")
    if num_steps is not None and num_steps > length:
        raise ValueError(
            f"ns_steps={num_steps} is more than the {length} triples of ns_coefficients; pass "
            f"ns_steps={length} or ns_steps=None, write the further triples out, or pass a single "
            "triple (a, b, c) to repeat it"
        )
    return schedule[:num_steps]


def _checked_steps(steps: object) -> int:
    if isinstance(steps, bool) or not isinstance(steps, numbers.Integral):
        raise TypeError(
            f"ns_steps: expected an integer from 1 to {_MAX_STEPS - 1}, or None for the whole of "
            f"ns_coefficients, got {steps!r} ({type(steps).__name__})"
        )
    num_steps = int(steps)
    if not 0 < num_steps < _MAX_STEPS:
        raise ValueError(
            f"ns_steps: expected an integer from 1 to {_MAX_STEPS - 1}, got {steps}; 5 is usual"
        )
    return num_steps


def _checked_triple(triple: object, where: str) -> Triple:
    if not _is_sequence(triple):
        raise TypeError(
            f"{where}: expected a triple (a, b, c), got {triple!r} ({type(triple).__name__}); "
            "pass either one triple or a sequence of triples"
        )
    if len(triple) != 3:
        raise ValueError(
            f"{where}: expected a triple (a, b, c) of exactly 3 numbers, got {len(triple)}: "
            f"{triple!r}"
        )
    a, b, c = (_checked_number(number, where) for number in triple)
    return a, b, c


def _checked_number(number: object, where: str) -> float:
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise TypeError(
            f"{where}: expected real numbers, got {number!r} ({type(number).__name__}); pass "
            "Python floats"
        )
    if not math.isfinite(number):
        raise ValueError(f"{where}: expected finite numbers, got {number!r}")
    return float(number)


def _is_sequence(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _known_presets() -> str:
    return ", ".join(map(repr, PRESETS))
