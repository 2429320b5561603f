# SPDX-License-Identifier: Apache-2.0
"""The code of a Markdown page, run as a reader would: all of it, in order, on real ranks.

Fenced blocks of ``python`` share one namespace. A block of ``text`` right after one is what it
prints. Comments in HTML, which no reader sees, say the rest:

``<!-- ranks: 4 -->``         on how many ranks the page runs; 1 without it
``<!-- first: ... -->``       code that runs at this place and is not shown
``<!-- not run: reason -->``  the next block of ``python`` does not run here, and why

``python -m tests.pages PAGE...`` runs pages and writes what they print into them.
"""

import contextlib
import io
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.dist import run_ranks

ROOT: Final = Path(__file__).resolve().parents[1]
PAGES: Final = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts),
)

_PIECE: Final = re.compile(
    r"^```(?P<language>\w+)\n(?P<body>.*?)^```$"
    r"|^<!-- (?P<word>ranks|first|not run):(?P<value>.*?)-->$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """One piece of code.

    Attributes:
        code: Python.
        place: Page and line, for tracebacks.
        printed: What the page says that it prints.
        not_run: Why it cannot run here; empty if it does.
    """

    code: str
    place: str
    printed: str = ""
    not_run: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """What a page has to run.

    Attributes:
        name: Path from the root of the repository.
        num_ranks: How many ranks its code runs on.
        blocks: Its code, in order.
        shell: Its lines of shell, without comments.
        prose: All that is not in a block.
    """

    name: str
    num_ranks: int
    blocks: tuple[Block, ...]
    shell: tuple[str, ...]
    prose: str


def read_page(path: Path) -> Page:
    """Read a page.

    Args:
        path: A Markdown file of the repository.

    Returns:
        Its code.

    Raises:
        ValueError: If a comment says that a block is not run and no block follows, or gives no
            reason.
    """
    name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    num_ranks, reason, end_of_python = 1, "", len(text)
    blocks: list[Block] = []
    shell: list[str] = []
    for piece in _PIECE.finditer(text):
        place = f"{name}, line {text.count(chr(10), 0, piece.start()) + 1}"
        language, word, value = piece["language"], piece["word"], (piece["value"] or "").strip()
        if word == "ranks":
            num_ranks = int(value)
        elif word == "first":
            blocks.append(Block(value, place))
        elif word == "not run":
            if reason or not value:
                raise ValueError(f"{place}: expected a reason and then a block of python")
            reason = value
        elif language == "python":
            blocks.append(Block(piece["body"], place, not_run=reason))
            reason, end_of_python = "", piece.end()
        elif (
            language == "text"
            and end_of_python < piece.start()
            and not (text[end_of_python : piece.start()].strip())
        ):
            last = blocks.pop()
            blocks.append(Block(last.code, last.place, piece["body"], last.not_run))
        elif language == "bash":
            lines = piece["body"].replace("\\\n", " ").splitlines()
            shell += filter(None, (line.split("#")[0].strip() for line in lines))
    if reason:
        raise ValueError(f"{name}: no block of python follows {reason!r}")
    return Page(name, num_ranks, tuple(blocks), tuple(shell), _PIECE.sub("", text))


def run_page(page: Page) -> None:
    """Run the code of a page on its ranks, in an empty folder that they share.

    Args:
        page: The page.

    Raises:
        AssertionError: If a rank fails, or the first one does not print what the page shows.
    """
    for block, printed in zip(page.blocks, _outputs(page), strict=True):
        for line in block.printed.splitlines():
            assert line in map(str.rstrip, printed.splitlines()), (
                f"{block.place} shows {line!r}, but it prints\n{printed}"
            )


def write_printed(path: Path) -> None:
    """Put what a page prints in the place of what it shows.

    Args:
        path: The page.
    """
    page, text = read_page(path), path.read_text(encoding="utf-8")
    for block, printed in zip(page.blocks, _outputs(page), strict=True):
        if block.printed:
            lines = [line.rstrip() for line in printed.splitlines()]
            text = text.replace(block.printed, "\n".join(lines).strip("\n") + "\n", 1)
    path.write_text(text, encoding="utf-8")


def _outputs(page: Page) -> list[str]:
    """What the blocks of a page print on its first rank."""
    with tempfile.TemporaryDirectory() as folder:
        first, *_ = run_ranks(page.num_ranks, _run_blocks, page.blocks, folder)
    assert isinstance(first, list)
    return first


def _run_blocks(blocks: tuple[Block, ...], folder: str) -> list[str]:
    os.chdir(folder)
    namespace: dict[str, object] = {}
    outputs = []
    for block in blocks:
        printed = io.StringIO()
        if not block.not_run:
            with contextlib.redirect_stdout(printed):
                exec(compile(block.code, block.place, "exec"), namespace)
        outputs.append(printed.getvalue())
    return outputs


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        write_printed(Path(argument).resolve())
