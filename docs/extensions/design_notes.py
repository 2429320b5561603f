# SPDX-License-Identifier: Apache-2.0
"""The directive ``design-notes`` of reStructuredText: the notes that stand in the code.

A note is a part of a module's docstring: from a line that begins with ``[Note: title]`` up to the
next note, the next section of the docstring, or its end.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typing_extensions import override

PACKAGE: Final = Path(__file__).parents[2] / "hyper_parallel"
_START: Final = re.compile(r"^\[Note: (.+?)\][ ]?", re.MULTILINE)
_END: Final = re.compile(r"^(References|Example|Shape legend):", re.MULTILINE)
_CITATION: Final = re.compile(r"\[Note: (.+?)\]")
_COLUMNS: Final = re.compile(r"^(\S.*?)\s{3,}(\S.*)$")


@dataclass(frozen=True, slots=True)
class DesignNote:
    """One note.

    Attributes:
        title: What it is cited by.
        module: File name, relative to the package.
        text: The note, in reStructuredText.
    """

    title: str
    module: str
    text: str

    @property
    def anchor(self) -> str:
        """Name that the note can be linked to by."""
        return f"note-{self.title.replace(' ', '-')}"


def design_notes(package: Path = PACKAGE) -> list[DesignNote]:
    """Collect the notes of a package.

    Args:
        package: Its folder.

    Returns:
        The notes, by module and then in their order.
    """
    notes = []
    for path in sorted(package.rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        starts = list(_START.finditer(docstring))
        for match, following in zip_longest(starts, starts[1:]):
            end = following.start() if following else len(docstring)
            text = _END.split(docstring[match.end() : end])[0].strip()
            notes.append(DesignNote(match[1], str(path.relative_to(package)), text))
    return notes


class DesignNotes(SphinxDirective):
    """All notes, each in a section with its title, its file and its text."""

    @override
    def run(self) -> list[nodes.Node]:
        sections: list[nodes.Node] = []
        for note in design_notes():
            self.env.note_dependency(str(PACKAGE / note.module))
            section = nodes.section(ids=[note.anchor], names=[note.anchor])
            section += nodes.title(text=note.title[0].upper() + note.title[1:])
            source = nodes.paragraph(classes=["note-source"])
            source += nodes.literal(text=f"hyper_parallel/{note.module}")
            section += source
            lines = StringList(list(_restructured(note.text)), source=note.module)
            self.state.nested_parse(lines, 0, section)
            sections.append(section)
        return sections


def _restructured(text: str) -> Iterator[str]:
    """Columns that are aligned by spaces become a table, citations links."""
    linked = _CITATION.sub(lambda m: f"`{m[1]} <#note-{m[1].replace(' ', '-')}>`__", text)
    for paragraph in linked.split("\n\n"):
        lines = paragraph.splitlines()
        if _COLUMNS.match(lines[0]) and len(lines) > 1:
            yield from (".. list-table::", "   :widths: 20 80", "")
            for line in lines:
                if match := _COLUMNS.match(line):
                    yield from (f"   * - {match[1]}", f"     - {match[2]}")
                else:
                    yield f"       {line.strip()}"
        else:
            yield from lines
        yield ""


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("design-notes", DesignNotes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
