# SPDX-License-Identifier: Apache-2.0
"""What the pages say is so: their code runs, their commands exist, no failure is left out."""

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Final

import pytest

import hyper_parallel
from docs.drawings.__main__ import DRAWINGS, FOLDER
from docs.extensions.design_notes import design_notes
from docs.extensions.failure_table import statements
from hyper_parallel.cli.main import app
from hyper_parallel.core import optimizer
from hyper_parallel.core.optimizer import param_grouping
from tests.pages import PAGES, ROOT, read_page, run_page
from tests.ut.test_failure_ids import ids_in_docstrings

pytestmark = pytest.mark.dist

NAMES: Final = [str(path.relative_to(ROOT)) for path in PAGES]
# The README runs in test_readme.py, on several numbers of ranks.
WITH_CODE: Final = [n for n in NAMES if n != "README.md" and read_page(ROOT / n).blocks]
TARGETS: Final = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
COMMANDS: Final = {
    command.callback.__name__ for command in app.registered_commands if command.callback
}
OTHER_PROGRAMS: Final = {"pip", "git", "cd", "export", ".venv/bin/pre-commit"}


@pytest.mark.parametrize("name", WITH_CODE)
def test_code_of_a_page_runs_and_prints_what_the_page_shows(name: str) -> None:
    run_page(read_page(ROOT / name))


@pytest.mark.parametrize("name", NAMES)
def test_commands_of_a_page_exist(name: str) -> None:
    page = read_page(ROOT / name)
    for target in re.findall(r"`make ([a-z-]+)", page.prose):
        assert target in TARGETS
    for command in re.findall(r"`hyper-parallel ([a-z]+)", page.prose):
        assert command in COMMANDS
    for command in page.shell:
        words = shlex.split(command)
        while "=" in words[0]:  # environment
            words.pop(0)
        assert command_exists(words), f"{name}: {command}"


def command_exists(words: list[str]) -> bool:
    program = Path(words[0]).name
    if program == "make":
        return all(word in TARGETS for word in words[1:] if "=" not in word)
    if program in ("python", "torchrun") and "-m" in words:
        return importlib.util.find_spec(words[words.index("-m") + 1]) is not None
    if program in ("python", "torchrun"):
        return any((ROOT / word).is_file() for word in words[1:])
    if program == "hyper-parallel":
        return words[1] in COMMANDS
    return words[0] in OTHER_PROGRAMS


@pytest.mark.parametrize(
    "command", ["make nothing", "python -m nothing", "torchrun no.py", "hyper-parallel no", "no"]
)
def test_a_command_that_does_not_exist_is_found_out(command: str) -> None:
    assert not command_exists(command.split())


def test_a_page_that_shows_what_is_not_printed_is_found_out(tmp_path: Path) -> None:
    page = read_page(ROOT / "README.md")
    block = page.blocks[0]
    wrong = type(block)("print('here')", "page, line 1", printed="there\n")
    with pytest.raises(AssertionError, match="shows 'there'"):
        run_page(type(page)("page", 1, (wrong,), (), ""))


def test_blocks_that_do_not_run_are_listed_with_the_reason() -> None:
    listed = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    for name in WITH_CODE:
        page = name.removeprefix("docs/")
        for block in read_page(ROOT / name).blocks:
            if block.not_run:
                assert re.search(rf"\({page}\) \| {re.escape(block.not_run)} \|", listed), (
                    block.place
                )


def test_files_that_hold_a_guarantee_exist() -> None:
    named = re.findall(r"`(\w+\.py)`", (ROOT / "docs" / "guarantees.md").read_text("utf-8"))
    files = {path.name for path in (ROOT / "tests").rglob("*.py")}
    assert set(named) <= files
    assert len(named) > 15


def test_every_public_name_is_in_the_reference() -> None:
    reference = "".join(path.read_text("utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    grouping = param_grouping.__name__  # all of it is shown
    for name in {*hyper_parallel.__all__, *optimizer.__all__} - {"__version__"}:
        shown = re.search(rf"auto(class|function):: (\S+\.)?{name}\n", reference)
        assert shown or getattr(optimizer, name).__module__ == grouping, name


def test_every_failure_that_a_test_names_has_a_line_in_the_table() -> None:
    assert set(ids_in_docstrings()) <= set(statements())


def test_every_note_of_the_code_that_is_cited_is_a_note() -> None:
    titles = {note.title for note in design_notes()}
    files = [*(ROOT / "hyper_parallel").rglob("*.py"), *PAGES]
    for path in files:
        for cited in re.findall(r"\[Note: ([^\].]+)\]", path.read_text(encoding="utf-8")):
            assert cited in titles, f"{path.name} cites [Note: {cited}], which does not exist"


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^(?:.* <)?([a-z_/0-9]+)>?$", index, re.MULTILINE)
    pages = [name.removeprefix("docs/").removesuffix(".md") for name in NAMES if "docs/" in name]
    assert sorted(listed) == sorted(page for page in pages if page != "index")


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_what_the_package_computes(name: str) -> None:
    assert (FOLDER / f"{name}.svg").read_text("utf-8") == DRAWINGS[name]()
