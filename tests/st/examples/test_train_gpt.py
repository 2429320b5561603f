# SPDX-License-Identifier: Apache-2.0
"""The training example, run for real: a tiny model, a few steps."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples.checkpoint import newest_checkpoint
from examples.options import parse_train_options
from examples.run_log import Record, read_steps, read_summary
from examples.text_data import load_text
from examples.train_gpt import main, train
from tests.dist import run_ranks

pytestmark = pytest.mark.dist

ROOT = Path(__file__).resolve().parents[3]
TINY = [
    *("--width=32", "--layers=2", "--heads=2", "--context=32"),
    *("--steps=8", "--warmup=2", "--batch=4", "--ns-dtype=float32"),
    *("--eval-every=4", "--eval-batches=2", "--checkpoint-every=5", "--sample-bytes=4"),
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"file {i} says 'the quick brown fox', again. " * 20)
    return folder


def train_here(argv: list[str]) -> None:
    options = parse_train_options(argv, world_size=dist.get_world_size())
    train(options, load_text(options.data, context=options.context), torch.device("cpu"))


def run(num_ranks: int, argv: list[str], *, run_dir: Path) -> list[Record]:
    run_ranks(num_ranks, train_here, [*argv, f"--run-dir={run_dir}"])
    return read_steps(run_dir / "metrics.jsonl")


def losses(records: list[Record]) -> list[float]:
    return [record[key] for record in records for key in ("loss", "val_loss") if key in record]


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_any_number_of_ranks_gives_the_same_curve(
    optimizer: str, texts: Path, tmp_path: Path
) -> None:
    argv = [*TINY, f"--data={texts}", f"--optimizer={optimizer}"]
    alone = losses(run(1, argv, run_dir=tmp_path / "1"))
    assert len(alone) == 8 + 2
    assert alone[-1] < alone[0] - 0.1  # it learns
    for num_ranks, mesh in ((2, "dp_shard=2"), (4, "dp_replicate=2,dp_shard=2")):
        together = run(num_ranks, [*argv, f"--mesh={mesh}"], run_dir=tmp_path / str(num_ranks))
        # Float32 sums in another order, over 8 steps.
        assert losses(together) == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_resumed_run_equals_the_uninterrupted_one(
    optimizer: str, texts: Path, tmp_path: Path
) -> None:
    argv = [*TINY, f"--data={texts}", f"--optimizer={optimizer}"]
    whole = run(2, argv, run_dir=tmp_path / "whole")
    # What a crash after step 7 leaves: the metrics so far, and the checkpoint of step 5.
    cut = tmp_path / "cut"
    shutil.copytree(tmp_path / "whole", cut)
    shutil.rmtree(newest_checkpoint(cut))
    lines = (cut / "metrics.jsonl").read_text().splitlines()
    (cut / "metrics.jsonl").write_text("\n".join(lines[:7]) + "\n")
    for num_ranks, tolerance in ((2, 0), (1, 1e-4)):
        folder = tmp_path / f"resumed on {num_ranks}"
        shutil.copytree(cut, folder)
        resumed = run(num_ranks, ["--resume"], run_dir=folder)
        assert [record["step"] for record in resumed] == list(range(1, 9))
        assert [record["lr"] for record in resumed] == [record["lr"] for record in whole]
        assert losses(resumed) == pytest.approx(losses(whole), rel=tolerance, abs=0)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mesh=dp_shard=2"], "--mesh dp_shard=2: the product of its sizes is 2"),
        (["--data=nowhere"], "nowhere is not a folder; pass --data"),
        (["--resume"], "--resume: no run in runs/muon"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    argv: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not dist.is_initialized()


def test_the_other_ranks_let_the_first_tell_of_a_mistake(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 ended first, torchrun stopped rank 0, and nobody told what was wrong."""
    waits: list[float] = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("time.sleep", waits.append)
    with pytest.raises(SystemExit, match="2"):
        main(["--data=nowhere"])
    assert sum(waits) > 1
    assert not capsys.readouterr().err


def test_help_states_units_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "sequences a step, over all processes together (default: 16)" in text


def test_the_demo_trains_both_optimizers_and_plots(texts: Path, tmp_path: Path) -> None:
    command = [
        *(sys.executable, str(ROOT / "examples" / "compare.py"), "--nproc=2", *TINY),
        *(f"--data={texts}", f"--run-dir={tmp_path / 'demo'}"),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "demo" / "loss.png").stat().st_size > 10_000
    assert "Muon plan" in (tmp_path / "demo" / "muon" / "plan.txt").read_text()
    for optimizer in ("muon", "adamw"):
        path = tmp_path / "demo" / optimizer / "metrics.jsonl"
        assert len(read_steps(path)) == 8
        assert 0 < read_summary(path)["optimizer_share"] < 1
        assert str(path) in done.stdout
    assert "sample 1" in done.stdout
