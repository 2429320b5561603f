# SPDX-License-Identifier: Apache-2.0
"""Which failures of other projects are tests here, by the ids that docstrings of tests start with.

Family A is about a wrong update, B about hangs, C about crashes and silent mistakes of layouts and
gradients, D about checkpoints, E about cost.
"""

import ast
import re
from pathlib import Path
from typing import Final

import pytest

TESTS: Final = Path(__file__).parents[1]
ID: Final = re.compile(r"\b[A-E][0-3]\d\b")

COVERED: Final = (
    *("A01", "A02", "A03", "A04", "A05", "A06", "A07", "A08", "A09", "A11", "A14", "A16", "A17"),
    *("A18", "A19", "A20", "A21", "A22", "A24", "A25", "A27", "A29", "A30", "A31", "A32", "A34"),
    "A35",
    *("B01", "B02", "B03", "B04", "B05", "B06", "B07", "B08"),
    *("C01", "C02", "C03", "C06", "C07", "C08", "C09", "C10", "C11", "C13", "C14", "C15", "C16"),
    *("C18", "C19", "C20", "C22", "C23", "C24", "C25", "C26", "C27"),
    *("D01", "D02", "D03", "D05", "D06", "D07", "D08", "D09", "D10", "D11", "D12", "D13", "D14"),
    *("E01", "E02", "E03", "E04", "E05", "E06", "E07", "E08", "E09", "E10", "E11"),
)
LATER: Final[tuple[str, ...]] = ()


def ids_in_docstrings() -> dict[str, list[str]]:
    """From each id to the tests whose docstrings name it."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for number in ID.findall(ast.get_docstring(node) or ""):
                    found.setdefault(number, []).append(f"{path.name}::{node.name}")
    return found


FOUND: Final = ids_in_docstrings()


@pytest.mark.parametrize("number", COVERED)
def test_a_failure_that_is_covered_is_named_by_a_test(number: str) -> None:
    assert FOUND.get(number), f"no test names {number}"


def test_failures_that_are_left_for_later_are_named_by_none() -> None:
    for number in LATER:
        assert number not in FOUND, f"{number} is covered now by {FOUND[number]}"


def test_tests_name_no_unknown_failure() -> None:
    assert set(FOUND) <= set(COVERED) | set(LATER)
    assert len(set(COVERED) | set(LATER)) == len(COVERED) + len(LATER)
