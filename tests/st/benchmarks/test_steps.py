# SPDX-License-Identifier: Apache-2.0
"""The comparison of steps: a tiny run, its counts against the plan, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import steps_picture
from benchmarks.steps import main
from benchmarks.steps_contenders import CONTENDERS
from benchmarks.steps_ranks import GRAD_SEED, Entry
from benchmarks.steps_recorder import StepRecorder
from benchmarks.steps_report import markdown
from benchmarks.steps_work import SCENARIOS, Job, make_mesh, whole_tensors, work_of
from hyper_parallel import Muon
from hyper_parallel.core.optimizer.report import received_bytes
from tests.dist import run_ranks

TINY = ["--ranks", "2", "--rounds", "2", "--size", "16", "--quiet", "--no-picture"]
CONTENDER_KEYS = {
    "name",
    "title",
    "error",
    "ms",
    "ms_quartiles",
    "ratio",
    "ratio_quartiles",
    "core_ms",
    "core_ms_quartiles",
    "core_ratio",
    "core_ratio_quartiles",
    "flops",
    "flops_share",
    "received_bytes",
    "collectives",
    "collective_kinds",
    "peak_bytes",
    "distance",
}


def planned(job: Job) -> tuple[int, int]:
    """Collectives and received bytes of a step, as this rank's plan has them."""
    work = work_of(job)
    entry = Entry("ours", work, make_mesh(work), whole_tensors(work, GRAD_SEED))
    assert isinstance(entry.stepper, Muon)
    plan = entry.stepper.plan
    received = sum(received_bytes(plan.params, bucket, plan.rank) for bucket in plan.buckets)
    return plan.num_collectives, received


@pytest.mark.dist
def test_a_tiny_run_counts_what_the_plan_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["ours", "gather", "muonium"]
    peers = [word for name in names for word in ("--peer", name)]
    scenarios = ["--scenario", "fsdp-tp-columns", "--scenario", "ddp"]
    report = main([*TINY, *peers, *scenarios, "--profile", "--output", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out) == report
    assert json.loads((tmp_path / "steps.json").read_text()) == report
    assert (tmp_path / "steps.md").read_text() == markdown(report)
    assert not list(tmp_path.glob("*.png"))
    assert {"schema", "date", "command", "machine", "versions", "growth"} <= set(report)
    assert [s["scenario"] for s in report["scenarios"]] == ["fsdp-tp-columns", "ddp"]
    for scenario in report["scenarios"]:
        ours, gather, muonium = scenario["contenders"]
        assert set(ours) == set(gather) == set(muonium) == CONTENDER_KEYS
        plans = run_ranks(2, planned, Job(scenario["scenario"], 2, 16))
        assert ours["collectives"] == max(collectives for collectives, _ in plans)
        assert ours["received_bytes"] == max(received for _, received in plans)
        assert gather["flops"] == scenario["one_process_flops"]
        assert ours["flops_share"] < 0.6
        assert ours["distance"] < 0.1
        assert gather["distance"] < 0.1
        assert gather["ratio"] == 1
        assert ours["ms"] > 0
        # It needs a GPU, and says so itself, wherever it is installed.
        assert muonium["error"].startswith("ModuleNotFoundError: No module named")
        assert muonium["ms"] is None
    for profile in report["profile"]:
        assert profile["core_ms"]["orthogonalize"] > 0
        assert profile["wall_ms"]["apply"] > 0


def recorded() -> tuple[float, dict[str, int], int]:
    """Collectives of known cost, and memory that comes and goes."""
    whole, part = torch.ones(8), torch.ones(4)
    with StepRecorder() as recorder:
        dist.all_gather_into_tensor(whole, part)  # 16 bytes from the other
        dist.all_reduce(whole)  # 32, 16 each way
        dist.broadcast(part, src=0)  # 16, but not for rank 0
        dist.barrier()
        first = torch.zeros(100)
        del first
        second = torch.zeros(50) + 1  # the peak: 50 zeros and their sum, or 100 before
        second.view(25, 2).mul_(2)
    return recorder.received, dict(recorder.collectives), recorder.peak


@pytest.mark.dist
def test_the_recorder_counts_bytes_from_others_and_memory_that_is_alive() -> None:
    seen = run_ranks(2, recorded)
    assert [received for received, _, _ in seen] == [48, 64]
    for _, collectives, peak in seen:
        assert sum(collectives.values()) == 3
        assert peak == 400


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ranks", "0"], "--ranks must be at least 1"),
        (["--rounds", "x"], "invalid int value"),
        (["--scenario", "nothing"], "invalid choice"),
        (["--peer", "nobody"], "invalid choice"),
        (["--ranks", "3", "--scenario", "hsdp"], "need an even --ranks"),
    ],
)
def test_bad_arguments_end_with_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert complaint in text
    assert text.count("\n") == 1


def test_help_names_all_scenarios_and_contenders(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in (*SCENARIOS, *CONTENDERS))


def test_every_contender_can_be_drawn() -> None:
    assert set(steps_picture._COLORS) == set(steps_picture._MARKERS) == set(CONTENDERS)
