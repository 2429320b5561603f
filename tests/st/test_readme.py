# SPDX-License-Identifier: Apache-2.0
"""The README is true: its code runs, its commands exist, its table is what is printed."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist import run_ranks

pytestmark = pytest.mark.dist

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    found = BLOCK.findall((ROOT / "README.md").read_text())
    return [body for kind, body in found if kind == language]


def run_python_blocks() -> str:
    printed = io.StringIO()
    namespace: dict[str, object] = {}
    with contextlib.redirect_stdout(printed):
        for number, body in enumerate(blocks("python")):
            exec(compile(body, f"README.md, block {number}", "exec"), namespace)
    return printed.getvalue()


def test_readme_code_runs_and_prints_what_it_shows() -> None:
    first, _ = run_ranks(2, run_python_blocks)
    for line in "".join(blocks("text")).splitlines():
        assert line in first.splitlines(), f"the README shows {line!r}, which is not printed"


def test_readme_code_runs_on_one_process() -> None:
    run_ranks(1, run_python_blocks)


def test_readme_commands_are_targets_that_do_what_they_say() -> None:
    commands = [line.split("#")[0].strip() for line in "".join(blocks("bash")).splitlines()]
    assert commands == ["make demo", "make test"]
    dry = {
        command: subprocess.run(
            [*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for command in commands
    }
    assert "-m examples.compare --nproc 2" in dry["make demo"]
    for tool in ("ruff format --check", "ruff check", "mypy", "lint-imports", "pytest"):
        assert tool in dry["make test"]
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_demo_command_runs_and_says_where_its_results_are(tmp_path: Path) -> None:
    """What ``make demo`` runs, on a model that takes seconds."""
    tiny = [
        *("--width=32", "--layers=1", "--heads=2", "--context=32", "--steps=4", "--warmup=1"),
        *("--batch=4", "--eval-every=2", "--eval-batches=1", "--sample-bytes=4"),
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "examples.compare", "--nproc", "2", f"--run-dir={tmp_path}", *tiny],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for name in ("loss.png", "muon/metrics.jsonl", "adamw/metrics.jsonl", "muon/plan.txt"):
        path = tmp_path / name
        assert path.stat().st_size > 0
        assert str(path) in ended.stdout
