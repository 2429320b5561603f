# SPDX-License-Identifier: Apache-2.0
"""The planner page is true: its commands run, and print what it shows."""

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from hyper_parallel.cli.main import main

PAGE = Path(__file__).resolve().parents[3] / "docs" / "planner.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall(PAGE.read_text("utf-8"))
SHAPES = next(body for language, body in BLOCKS if language == "json")


def shown_commands() -> Iterator[tuple[str, str]]:
    """Each command, and what the page shows of what it prints."""
    for (language, body), (next_language, shown) in pairwise([*BLOCKS, ("", "")]):
        if language == "bash":
            for command in body.splitlines():
                yield command, shown if next_language == "text" else ""


COMMANDS = list(shown_commands())


@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_command_runs_and_prints_what_the_page_shows(
    command: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shapes.json").write_text(SHAPES, "utf-8")
    program, *words = shlex.split(command)
    assert program == "hyper-parallel"
    assert main(words) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed
    for line in shown.splitlines():
        assert line in printed, f"put what `{command}` prints into {PAGE}"


def test_page_names_the_other_commands() -> None:
    text = PAGE.read_text("utf-8")
    assert "hyper-parallel inspect " in text
    assert "hyper-parallel calibrate -o " in text
