# SPDX-License-Identifier: Apache-2.0
"""The soak, in small: ``torchrun`` brings a job back after each kill, and no bit is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.soak import MODEL, ROOT, main, plan_faults, without_restarts
from benchmarks.soak_faults import PLACES, EventLog, Fault
from benchmarks.soak_rank import write_faults
from examples.run_log import read_steps


@pytest.mark.dist
def test_a_job_that_torchrun_restarts_keeps_every_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--steps=24", "--every=8", "--checkpoint-every=4", "--ranks=2"]
    assert main([*argv, f"--run-dir={tmp_path / 'soak'}"]) == 0
    result = json.loads((tmp_path / "soak" / "soak.json").read_text())
    assert result["starts"] == 4
    assert sum(result["kills"].values()) == 3
    assert result["other_tensors"] == result["other_losses"] == 0
    assert result["most_recomputed"] <= 4
    assert result["last_loss"] < result["first_loss"] - 0.3
    assert (
        "| kills survived | 3: 1 in backward, 1 in forward, 1 in step |" in capsys.readouterr().out
    )


def test_kills_strike_every_place_and_many_ranks_in_order() -> None:
    phases = plan_faults([2, 4, 3], steps=2000, every=60, checkpoint_every=20, seed=0)
    faults = [fault for phase in phases for fault in phase.faults]
    steps = [fault.step for fault in faults]
    assert len(faults) >= 30
    assert steps == sorted(set(steps))
    assert {fault.place for fault in faults} == set(PLACES)
    assert all(fault.step % 20 == 0 for fault in faults if fault.place == "save")
    assert all({f.rank for f in phase.faults} == set(range(phase.world_size)) for phase in phases)
    ends = [phase.faults for phase in without_restarts(phases)]
    assert ends == [phases[0].faults[-1:], phases[1].faults[-1:], []]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ranks=2,5"], "--ranks 2,5: expected divisors of 12"),
        (["--every=10"], "--every 10: a kill in a save needs a save to strike"),
        (["--run-dir=."], "--run-dir . exists already"),
        (["--steps=0"], "'0' is not a whole number of 1 or more"),
    ],
)
def test_a_wrong_option_is_told_at_once(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert message in capsys.readouterr().err


def start(
    folder: Path, *, max_restarts: int, steps: int, every: int, timeout_s: int = 60
) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(f"--max-restarts={max_restarts}", "-m", "benchmarks.soak_rank"),
        *(str(folder / "faults.json"), str(folder / "events.jsonl"), *MODEL, f"--steps={steps}"),
        *(f"--run-dir={folder / 'run'}", f"--checkpoint-every={every}", "--auto-resume"),
        *(f"--eval-every={steps}", f"--data={ROOT / 'examples'}", f"--timeout={timeout_s}"),
    ]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def wait_for(path: Path, pattern: str, *, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = re.search(pattern, path.read_text()) if path.exists() else None
        if found:
            return found.group()
        time.sleep(0.05)
    raise TimeoutError(f"{pattern} is not in {path}")


def tree_of(pid: int) -> list[int]:
    """A process and all below it: torchrun's ranks have sessions of their own, and outlive it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(grandchild for child in children for grandchild in tree_of(int(child)))]


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_steps(folder / "run" / "metrics.jsonl")]


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.timeout(400)
def test_torchrun_goes_on_after_a_rank_was_frozen_and_thawed(tmp_path: Path) -> None:
    whole, frozen = tmp_path / "whole", tmp_path / "frozen"
    for folder in (whole, frozen):
        folder.mkdir()
        write_faults([], folder / "faults.json")
    assert start(whole, max_restarts=0, steps=20, every=5).wait() == 0
    write_faults([Fault(step=8, rank=1, place="step", signal="SIGSTOP")], frozen / "faults.json")
    process = start(frozen, max_restarts=1, steps=20, every=5, timeout_s=10)
    events = frozen / "events.jsonl"
    told = wait_for(events, r'"event": "error".*', timeout_s=120)
    assert "did not call step() within the timeout of the process group" in told
    assert "bucket 0 of 1 (scatter among ranks [0, 1]" in told
    (fault,) = EventLog(events).events("fault")
    os.kill(fault["pid"], signal.SIGCONT)
    assert process.wait() == 0
    assert losses(frozen) == losses(whole)


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.timeout(600)
def test_a_job_killed_from_outside_at_any_moment_goes_on(tmp_path: Path) -> None:
    """The whole job, agent and all, at moments that nobody chose: also while it starts."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        write_faults([], folder / "faults.json")
    assert start(whole, max_restarts=0, steps=200, every=5).wait() == 0
    for seconds in (3.0, 9.0, 10.1, 11.7, 12.3, 13.9):
        process = start(killed, max_restarts=0, steps=200, every=5)
        time.sleep(seconds)
        for pid in tree_of(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    assert start(killed, max_restarts=0, steps=200, every=5).wait() == 0
    assert losses(killed) == losses(whole)
