# SPDX-License-Identifier: Apache-2.0
"""The planner page is true: its commands run, and print what it shows."""

import re
import shlex
from pathlib import Path

import pytest

from hyper_parallel.cli.main import main

PAGE = Path(__file__).resolve().parents[3] / "docs" / "planner.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [body for kind, body in BLOCK.findall(PAGE.read_text("utf-8")) if kind == language]


COMMANDS = "".join(blocks("bash")).splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shapes.json").write_text(blocks("json")[0], "utf-8")
    program, *words = shlex.split(command)
    assert program == "hyper-parallel"
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed
    if words[0] == "group":
        for line in "".join(blocks("text")).splitlines():
            assert line in printed.splitlines()


def test_page_names_the_other_commands() -> None:
    text = PAGE.read_text("utf-8")
    assert "hyper-parallel inspect " in text
    assert "hyper-parallel calibrate -o " in text
