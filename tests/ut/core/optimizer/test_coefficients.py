# SPDX-License-Identifier: Apache-2.0
"""The tables against their published bands, and every way to name a schedule."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.optimizer.coefficients import PRESETS, Schedule, resolve_coefficients

JORDAN = (3.4445, -4.7750, 2.0315)
YOU_FIRST = (4.0848, -6.8946, 2.9270)
YOU_LAST = (2.8366, -3.0525, 1.2012)

finite = st.floats(allow_nan=False, allow_infinity=False)
triples = st.tuples(finite, finite, finite)


def apply(schedule: Schedule, x: float) -> float:
    for a, b, c in schedule:
        x = a * x + b * x**3 + c * x**5
    return x


def band(schedule: Schedule, low: float, high: float, points: int = 4001) -> tuple[float, float]:
    """The smallest and largest value of the schedule on a geometric grid."""
    values = [apply(schedule, low * (high / low) ** (i / (points - 1))) for i in range(points)]
    return min(values), max(values)


@pytest.mark.parametrize(
    ("name", "steps", "expected"),
    [
        ("jordan", 5, (0.471, 1.202)),
        ("you", 5, (0.475, 1.145)),
        ("you", 10, (0.988, 0.990)),
        ("polar_express", 5, (0.846, 1.124)),
        ("polar_express", 6, (0.994, 1.001)),
        ("polar_express", 8, (1.000, 1.000)),
        ("polar_express", 12, (1.000, 1.000)),
        ("polar_express_5", 5, (0.859, 1.141)),
        ("cans", 5, (0.863, 1.113)),
        ("deepseek_v4", 10, (1.000, 1.0005)),
    ],
)
def test_preset_sends_singular_values_to_its_published_band(
    name: str, steps: int, expected: tuple[float, float]
) -> None:
    low, high = band(resolve_coefficients(name, steps), 1e-3, 1.0)
    assert low == pytest.approx(expected[0], abs=1e-3)
    assert high == pytest.approx(expected[1], abs=1e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_positive_and_bounded_a_little_beyond_one(name: str) -> None:
    """bfloat16 lifts a singular value of 1 by up to 2**-8: CANS as published then diverges."""
    low, high = band(PRESETS[name], 1e-6, 1.004)
    assert low > 0
    assert high < 1.21


@pytest.mark.parametrize("steps", range(1, 6))
def test_every_prefix_of_a_preset_that_may_be_cut_is_bounded(steps: int) -> None:
    for name in ("jordan", "you", "cans", "polar_express"):
        assert band(resolve_coefficients(name, steps), 1e-6, 1.004)[1] < 2.0


@pytest.mark.parametrize("name", ["jordan", "you", "polar_express"])
def test_repeating_the_last_step_stays_bounded_however_often(name: str) -> None:
    low, high = band(resolve_coefficients(name, 40), 1e-6, 1.004, points=501)
    assert low > 0.6
    assert high < 1.21


def test_none_means_all_of_a_preset() -> None:
    lengths = {name: len(resolve_coefficients(name)) for name in PRESETS}
    assert lengths == {
        "jordan": 5,
        "you": 5,
        "polar_express": 8,
        "polar_express_5": 5,
        "cans": 5,
        "deepseek_v4": 10,
    }


def test_none_means_five_steps_for_a_triple() -> None:
    assert resolve_coefficients(JORDAN) == (JORDAN,) * 5 == resolve_coefficients("jordan")


def test_fewer_steps_take_the_first_of_a_preset() -> None:
    assert resolve_coefficients("you", 2) == PRESETS["you"][:2]
    assert resolve_coefficients("you", 1) == (YOU_FIRST,)


def test_more_steps_repeat_the_last_of_a_preset_that_converges() -> None:
    assert resolve_coefficients("you", 7) == (*PRESETS["you"], YOU_LAST, YOU_LAST)
    assert resolve_coefficients("polar_express", 9)[-2:] == ((1.875, -1.25, 0.375),) * 2
    assert resolve_coefficients("jordan", 9) == (JORDAN,) * 9


def test_safety_factor_divides_all_steps_but_the_last() -> None:
    """The values that Emerging-Optimizers prints, rounded to four digits."""
    schedule = resolve_coefficients("polar_express")
    assert schedule[0] == pytest.approx((8.2051, -22.9019, 16.4607), abs=1e-4)
    assert schedule[4] == pytest.approx((2.2779, -1.6198, 0.3985), abs=1e-4)
    assert schedule[6] == pytest.approx((1.8564, -1.2132, 0.3568), abs=1e-4)
    assert schedule[7] == (1.875, -1.25, 0.375)


@pytest.mark.parametrize(("name", "length"), [("deepseek_v4", 10), ("polar_express_5", 5)])
@pytest.mark.parametrize("difference", [-1, 1])
def test_preset_of_one_length_is_not_cut_or_extended(
    name: str, length: int, difference: int
) -> None:
    assert len(resolve_coefficients(name, length)) == length
    with pytest.raises(ValueError, match=rf"exactly {length} steps.*pass ns_steps={length} or ns"):
        resolve_coefficients(name, length + difference)


def test_deepseek_with_the_default_five_steps_says_what_to_pass() -> None:
    with pytest.raises(ValueError, match=r"got ns_steps=5; pass ns_steps=10 or ns_steps=None"):
        resolve_coefficients("deepseek_v4", 5)


def test_cans_is_not_extended() -> None:
    assert len(resolve_coefficients("cans", 3)) == 3
    with pytest.raises(ValueError, match=r"'cans' has 5 steps.*got ns_steps=6.*polar_express"):
        resolve_coefficients("cans", 6)


@given(st.lists(triples, min_size=1, max_size=12), st.integers(1, 12))
def test_explicit_list_gives_its_first_steps(
    schedule: list[tuple[float, float, float]], steps: int
) -> None:
    assert resolve_coefficients(schedule) == tuple(schedule)
    if steps <= len(schedule):
        assert resolve_coefficients(schedule, steps) == tuple(schedule[:steps])
    else:
        with pytest.raises(ValueError, match=rf"ns_steps={steps} is more than the {len(schedule)}"):
            resolve_coefficients(schedule, steps)


@given(triples, st.integers(1, 99))
def test_triple_is_repeated(triple: tuple[float, float, float], steps: int) -> None:
    assert resolve_coefficients(triple, steps) == (triple,) * steps


@pytest.mark.parametrize("name", PRESETS)
def test_result_resolves_to_itself_and_survives_json(name: str) -> None:
    schedule = resolve_coefficients(name)
    assert resolve_coefficients(schedule) == schedule
    assert resolve_coefficients(json.loads(json.dumps(schedule)), len(schedule)) == schedule


def test_lists_and_other_real_numbers_become_tuples_of_floats() -> None:
    result = resolve_coefficients([[2, Fraction(-3, 2), 0.5]])  # type: ignore[arg-type]
    assert result == ((2.0, -1.5, 0.5),)
    assert type(result[0]) is tuple
    assert all(type(number) is float for number in result[0])
    assert resolve_coefficients([2, -1.5, 0.5], 1) == result


def test_aol_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"'aol' is refused.*0\.884.*wrong sign; use 'you'"):
        resolve_coefficients("aol")


@pytest.mark.parametrize(
    ("name", "near"), [("jordon", "jordan"), ("Polar-Express", "polar_express"), ("YOU", "you")]
)
def test_unknown_preset_names_near_misses(name: str, near: str) -> None:
    with pytest.raises(
        ValueError, match=rf"ns_coefficients='{name}' is no preset; did you .*{near}"
    ):
        resolve_coefficients(name)


def test_unknown_preset_without_near_miss_lists_all() -> None:
    with pytest.raises(ValueError, match="presets are") as caught:
        resolve_coefficients("zzz")
    assert "did you mean" not in str(caught.value)
    assert all(repr(name) in str(caught.value) for name in PRESETS)


@pytest.mark.parametrize("steps", [0, -1, 100, 10**6])
def test_steps_out_of_range_are_refused(steps: int) -> None:
    for coefficients in (JORDAN, [JORDAN], "jordan"):
        with pytest.raises(ValueError, match=rf"ns_steps: expected .* 1 to 99, got {steps}"):
            resolve_coefficients(coefficients, steps)


@pytest.mark.parametrize("steps", [True, 5.0, "5", (5,)])
def test_steps_of_another_type_are_refused(steps: object) -> None:
    with pytest.raises(TypeError, match=r"ns_steps: expected an integer .* got"):
        resolve_coefficients(JORDAN, steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ((), r"ns_coefficients: expected at least one triple"),
        ((1.0, 2.0), r"ns_coefficients: .* exactly 3 numbers, got 2"),
        ((1.0, 2.0, 3.0, 4.0), r"ns_coefficients: .* exactly 3 numbers, got 4"),
        ([JORDAN, (1.0,)], r"ns_coefficients\[1\]: .* exactly 3 numbers, got 1"),
        ([[]], r"ns_coefficients\[0\]: .* exactly 3 numbers, got 0"),
        ((1.0, math.nan, 2.0), r"ns_coefficients: expected finite numbers, got nan"),
        ([JORDAN, (1.0, 2.0, math.inf)], r"ns_coefficients\[1\]: expected finite numbers, got inf"),
        ([JORDAN] * 100, r"ns_coefficients: expected fewer than 100 triples, got 100"),
    ],
)
def test_malformed_coefficients_are_refused(coefficients: Sequence[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_coefficients(coefficients)


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        (None, r"ns_coefficients: expected .* preset name \('jordan', .*\), got NoneType"),
        (3.4445, r"got float"),
        ({"a": 1}, r"got dict"),
        (b"you", r"got bytes"),
        ((True, 1.0, 2.0), r"ns_coefficients: expected real numbers, got True \(bool\)"),
        ((1.0, "2", 3.0), r"ns_coefficients: expected real numbers, got '2' \(str\)"),
        ((1.0, 2.0, 3j), r"expected real numbers, got 3j \(complex\)"),
        ([JORDAN, 1.0], r"ns_coefficients\[1\]: expected a triple \(a, b, c\), got 1\.0"),
        (["you"], r"ns_coefficients: .*"),
    ],
)
def test_coefficients_of_another_type_are_refused(coefficients: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        resolve_coefficients(coefficients)  # type: ignore[arg-type]
    assert caught.type is TypeError or coefficients == ["you"]


def test_presets_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        PRESETS["jordan"] = ()  # type: ignore[index]


def test_module_needs_no_torch() -> None:
    """The file alone is run: its package imports torch."""
    module = sys.modules[resolve_coefficients.__module__]
    program = (
        f"import runpy, sys; runpy.run_path({module.__file__!r}); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
