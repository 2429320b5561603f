# SPDX-License-Identifier: Apache-2.0
"""The directive ``failure-table``: which test holds which failure off.

The tests are those whose docstrings name the id, found by ``tests/ut/test_failure_ids.py`` when the
site is built. What must hold is one line per id in ``docs/failures.toml``.
"""

import tomllib
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typing_extensions import override

from tests.ut.test_failure_ids import ids_in_docstrings

STATEMENTS: Final = Path(__file__).parents[1] / "failures.toml"


def statements(family: str = "") -> dict[str, str]:
    """What must hold, by id, in order.

    Args:
        family: The letter that ids begin with; all of them if empty.

    Returns:
        One line per id.
    """
    table: dict[str, str] = tomllib.loads(STATEMENTS.read_text(encoding="utf-8"))
    return {number: table[number] for number in sorted(table) if number.startswith(family)}


class FailureTable(SphinxDirective):
    """A table of one family; its letter is the argument."""

    required_arguments = 1

    @override
    def run(self) -> list[nodes.Node]:
        found = ids_in_docstrings()
        body = nodes.tbody()
        body += [
            _row([nodes.Text(number)], [nodes.Text(text)], _test_names(found[number]))
            for number, text in statements(self.arguments[0]).items()
            if number in found
        ]
        table = nodes.table(classes=["failures"])
        group = nodes.tgroup(cols=3)
        table += group
        group += [nodes.colspec(colwidth=width) for width in (6, 47, 47)]
        head = nodes.thead()
        head += _row(*([nodes.Text(word)] for word in ("id", "what must hold", "tests")))
        group += [head, body]
        for path in (STATEMENTS, Path(__file__)):
            self.env.note_dependency(str(path))
        return [table]


def _row(*cells: list[nodes.Node]) -> nodes.row:
    row = nodes.row()
    for cell in cells:
        entry = nodes.entry()
        entry += cell if len(cell) > 1 else nodes.paragraph("", "", *cell)
        row += entry
    return row


def _test_names(tests: list[str]) -> list[nodes.Node]:
    """File by file. A name may break after each of its words."""
    names: list[nodes.Node] = []
    for file, group in groupby(sorted(tests), key=lambda test: test.partition("::")[0]):
        names.append(nodes.paragraph("", "", nodes.strong(text=file), classes=["test-file"]))
        for test in group:
            words = escape(test.partition("::")[2]).replace("_", "_<wbr>")
            names.append(nodes.raw("", f'<p class="test-name">{words}</p>', format="html"))
    return names


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("failure-table", FailureTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
