# SPDX-License-Identifier: Apache-2.0
"""The README is true: its code runs, its commands exist, its table is what is printed."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.pages import ROOT, read_page, run_page

pytestmark = pytest.mark.dist

README = read_page(ROOT / "README.md")


def test_readme_code_runs_and_prints_what_it_shows() -> None:
    assert [block.printed for block in README.blocks if block.printed]
    run_page(replace(README, num_ranks=2))


def test_readme_code_runs_on_one_process() -> None:
    run_page(replace(README, blocks=tuple(replace(block, printed="") for block in README.blocks)))


def test_readme_commands_are_targets_that_do_what_they_say() -> None:
    commands = README.shell
    assert commands == ("make demo", "make test")
    dry = {
        command: subprocess.run(
            [*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for command in commands
    }
    assert "-m examples.compare --nproc 2" in dry["make demo"]
    for tool in (
        "ruff format --check",
        "ruff check",
        "mypy",
        "lint-imports",
        "sphinx-build -W",
        "pytest",
    ):
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
