# SPDX-License-Identifier: Apache-2.0
"""A rank is killed or frozen while a sharded model trains: what the others say, and what is lost.

Ranks are real processes and signals are real; only their start is quicker than ``torchrun``'s.
"""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.soak_faults import PLACES, EventLog, Fault, armed
from benchmarks.soak_report import Outcome
from examples.options import parse_train_options
from examples.text_data import load_text
from examples.train_gpt import train
from tests.dist import Failure, run_ranks_outcomes

pytestmark = pytest.mark.dist

STEPS, SAVE_EVERY = 9, 3
TINY = (
    *("--width=16", "--layers=2", "--heads=2", "--context=16", "--batch=12", "--warmup=2"),
    *(f"--steps={STEPS}", f"--checkpoint-every={SAVE_EVERY}", f"--eval-every={STEPS}"),
    *("--eval-batches=1", "--sample-bytes=0", "--ns-dtype=float32", "--auto-resume"),
)
KNOWN_IN_S = 20  # measured: 0.03 to 0.24 for a killed rank, the timeout for a frozen one
TIMEOUT_S = 4


def train_until_told(faults: Sequence[Fault], folder: Path, argv: list[str]) -> tuple[str, float]:
    """Train; what this rank raised, "" if nothing, and how long after the fault."""
    options = parse_train_options(
        [*TINY, *argv, f"--run-dir={folder / 'run'}", f"--data={folder / 'texts'}"],
        world_size=dist.get_world_size(),
    )
    log = EventLog(folder / "events.jsonl")
    data = load_text(options.data, context=options.context)
    options.run_dir.mkdir(parents=True, exist_ok=True)
    with armed(faults, log):
        try:
            train(options, data, torch.device("cpu"))
        except RuntimeError as error:
            (event,) = log.events("fault")
            if event["fault"]["signal"] == "SIGSTOP":
                os.kill(event["pid"], signal.SIGCONT)  # as an operator would, later
            return str(error), time.time() - event["time_s"]
    return "", 0.0


def run(
    num_ranks: int, folder: Path, *argv: str, faults: Sequence[Fault] = (), timeout_s: float = 30
) -> list[Any]:
    texts = folder / "texts"
    texts.mkdir(parents=True, exist_ok=True)
    for i in range(10):
        (texts / f"{i}.txt").write_text(f"file {i} says 'the quick brown fox', again. " * 20)
    return run_ranks_outcomes(
        num_ranks, train_until_told, faults, folder, list(argv), group_timeout_s=timeout_s
    )


def outcome(folder: Path) -> Outcome:
    log = EventLog(folder / "events.jsonl")
    starts, faults = log.events("start"), log.events("fault")
    return Outcome(run_dir=folder / "run", steps=STEPS, starts=starts, faults=faults, wall_s=0.0)


def assert_same_bits(a: Outcome, b: Outcome) -> None:
    assert a.losses() == b.losses()
    ours, theirs = a.final_state(), b.final_state()
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(3, folder, "--dropout=0.2") == [("", 0.0)] * 3
    return outcome(folder)


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_is_killed_costs_the_steps_since_the_checkpoint(
    place: str, undisturbed: Outcome, tmp_path: Path
) -> None:
    """B03: the others know within seconds. Steps lost: at most those since the checkpoint."""
    step = 6 if place == "save" else 5
    told = run(3, tmp_path, "--dropout=0.2", faults=[Fault(step=step, rank=1, place=place)])
    assert isinstance(told[1], Failure)
    assert told[1].kind == "Died"
    for message, seconds in (told[0], told[2]):
        assert message
        assert seconds < KNOWN_IN_S
        if place == "step":
            assert "bucket 0 of 1 (scatter among ranks [0, 1, 2], starts with blocks.0." in message
            assert "did not complete: a rank failed" in message
        if place == "save":
            assert "step_00000006 was not written; those from before are as they were" in message
    assert run(3, tmp_path) == [("", 0.0)] * 3
    resumed = outcome(tmp_path)
    assert resumed.recomputed() == [3 if place == "save" else 1]
    assert_same_bits(resumed, undisturbed)


def test_a_frozen_rank_is_named_by_the_timeout_and_writes_nothing_when_it_thaws(
    undisturbed: Outcome, tmp_path: Path
) -> None:
    """B03: SIGSTOP beyond the timeout, then SIGCONT. All three end, each with the bucket."""
    fault = Fault(step=6, rank=1, place="step", signal="SIGSTOP")  # a step that would be saved
    told = run(3, tmp_path, "--dropout=0.2", faults=[fault], timeout_s=TIMEOUT_S)
    for message, seconds in told:
        assert "bucket 0 of 1 (scatter among ranks [0, 1, 2], starts with blocks.0." in message
        assert "did not call step() within the timeout of the process group" in message
        assert TIMEOUT_S - 1 < seconds < TIMEOUT_S + KNOWN_IN_S
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step_00000003"]
    assert run(3, tmp_path) == [("", 0.0)] * 3
    assert_same_bits(outcome(tmp_path), undisturbed)


@pytest.mark.parametrize("num_ranks", [2, 1])
def test_fewer_ranks_go_on_with_the_curve(num_ranks: int, tmp_path: Path) -> None:
    """What a scheduler does that cannot replace the machine: same curve, but for rounding."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(3, whole) == [("", 0.0)] * 3
    run(3, cut, faults=[Fault(step=5, rank=2, place="backward")])
    assert run(num_ranks, cut) == [("", 0.0)] * num_ranks
    assert outcome(cut).losses()[:3] == outcome(whole).losses()[:3]
    assert outcome(cut).losses() == pytest.approx(outcome(whole).losses(), rel=1e-5)
    assert {start["world_size"] for start in outcome(cut).starts} == {3, num_ranks}
