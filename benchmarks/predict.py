# SPDX-License-Identifier: Apache-2.0
"""Predicted against measured steps on this machine: ``python -m benchmarks.predict``.

Each scenario of ``benchmarks.steps`` runs on real ranks, and the very plan that runs is simulated.
The scenarios take turns, a step each, and between the rounds the machine is calibrated, several
times: on a machine that others share, a core is at times half as fast as a minute before.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from benchmarks.steps_ranks import GRAD_SEED, WARM_UP, Entry
from benchmarks.steps_work import SCENARIOS, Job, make_mesh, whole_tensors, work_of
from hyper_parallel import Muon
from hyper_parallel.calibration import calibrate
from hyper_parallel.core.optimizer.hardware import Hardware, load_hardware, save_hardware
from hyper_parallel.core.optimizer.plan import Plan
from hyper_parallel.core.optimizer.report import table
from hyper_parallel.core.optimizer.simulation import Simulation, simulate
from hyper_parallel.core.optimizer.timeline import LANES
from tests.dist import run_ranks

RANKS = 4
CLOSE = 0.25
_CALIBRATIONS = 5
_BUDGET_S = 35


@dataclass(frozen=True)
class Line:
    """A scenario's prediction and measurement."""

    scenario: str
    size: int
    simulations: tuple[Simulation, ...]  # one for each calibration
    measured_s: float
    quartiles_s: tuple[float, float]

    @property
    def predicted_s(self) -> float:
        """Mean over the calibrations."""
        return statistics.fmean(simulation.step_s for simulation in self.simulations)

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1

    def lane_s(self, lane: str) -> float:
        """Seconds of a lane on the busiest rank, likewise."""
        return statistics.fmean(s.busiest.seconds_by_lane[lane] for s in self.simulations)


def main(argv: Sequence[str] | None = None) -> list[Line]:
    """Run the command line.

    Args:
        argv: Arguments without the program's name. None takes ``sys.argv``.

    Returns:
        One line per scenario and size.
    """
    parser = argparse.ArgumentParser(prog="predict.py", description=__doc__)
    parser.add_argument("--hardware", type=Path, help="hardware file; calibrate if not given")
    parser.add_argument("--size", type=int, action="append", help="width d; may be repeated")
    parser.add_argument("--rounds", type=int, default=40, help="timed steps of each")
    parser.add_argument("--output", type=Path, help="folder for predicted.md and hardware.json")
    arguments = parser.parse_args(argv)
    given = load_hardware(arguments.hardware) if arguments.hardware else None
    jobs = [Job(s, RANKS, size) for size in arguments.size or [256] for s in SCENARIOS]
    hardware: list[Hardware] = [] if given is None else [given]
    seen: list[list[tuple[Plan, list[float]]]] = []
    for _ in range(_CALIBRATIONS):
        seen.append(_measured(jobs, -(-arguments.rounds // _CALIBRATIONS)))
        if given is None:
            hardware.append(_calibrated())
    lines = [_line(job, hardware, runs) for job, *runs in zip(jobs, *seen, strict=True)]
    text = markdown(lines, hardware)
    print(text)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "predicted.md").write_text(text)
        save_hardware(hardware[-1], arguments.output / "hardware.json")
    return lines


def _calibrated() -> Hardware:
    _say("calibrates")
    return calibrate(RANKS, budget_s=_BUDGET_S, progress=lambda _what, _done: None)


def _measured(jobs: Sequence[Job], rounds: int) -> list[tuple[Plan, list[float]]]:
    """The plan of each job, and the seconds of its steps, those of the slowest rank."""
    _say(f"{rounds} rounds of {len(jobs)} scenarios")
    seen = run_ranks(RANKS, step_times, jobs, rounds, timeout_s=600)
    plans = [plan for plan, _ in seen[0]]
    return [
        (plan, [max(times) for times in zip(*(rank[i][1] for rank in seen), strict=True)])
        for i, plan in enumerate(plans)
    ]


def _line(job: Job, hardware: Sequence[Hardware], runs: Sequence[tuple[Plan, list[float]]]) -> Line:
    seconds = [took for _, times in runs for took in times]
    first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
    predicted = tuple(simulate(runs[0][0], one) for one in hardware)
    return Line(job.scenario, job.size, predicted, median, (first, third))


def step_times(jobs: Sequence[Job], rounds: int) -> list[tuple[Plan, list[float]]]:
    """Step on this rank, all jobs in turn.

    Args:
        jobs: What to step on.
        rounds: Timed steps of each.

    Returns:
        For each job the plan that ran, and the seconds of each step.
    """
    entries: list[Entry] = []
    for job in jobs:
        work = work_of(job)
        entries.append(Entry("ours", work, make_mesh(work), whole_tensors(work, GRAD_SEED)))
    times: list[list[float]] = [[] for _ in jobs]
    for number in range(WARM_UP + rounds):
        for entry, took in zip(entries, times, strict=True):
            entry.refresh()
            dist.barrier()
            seconds, _ = entry.step()
            if number >= WARM_UP:
                took.append(seconds)
    found = []
    for entry, took in zip(entries, times, strict=True):
        assert isinstance(entry.stepper, Muon)
        found.append((entry.stepper.plan, took))
    return found


def markdown(lines: Sequence[Line], hardware: Sequence[Hardware]) -> str:
    """The table.

    Args:
        lines: Its lines.
        hardware: What they were predicted with.

    Returns:
        Markdown.
    """
    last = hardware[-1]
    close = sum(abs(line.error) <= CLOSE for line in lines)
    rows = [
        (
            SCENARIOS[line.scenario],
            str(line.size),
            f"{line.predicted_s * 1e3:.1f}",
            f"{line.measured_s * 1e3:.1f}",
            " to ".join(f"{1e3 * s:.1f}" for s in line.quartiles_s),
            f"{line.error:+.0%}",
            *(f"{1e3 * line.lane_s(lane):.1f}" for lane in LANES),
        )
        for line in lines
    ]
    header = ("scenario", "d", "predicted ms", "measured ms", "quartiles", "error", *LANES)
    first, rule, *rest = table(header, rows)
    rates = "; ".join(
        f"{dtype} "
        + ", ".join(f"{flops / 1e9:.0f} at {size:.0f}" for size, flops in rate.measured)
        + " GFLOP/s"
        for dtype, rate in last.matrix_rates.items()
    )
    link = last.within_node
    return "\n".join(
        [
            "# Predicted against measured",
            "",
            f"{close} of {len(lines)} are within {CLOSE:.0%}. Measured is the median over steps of "
            f"the slowest of {RANKS} gloo ranks with one thread each; the last columns are what "
            "the prediction consists of, in ms. The scenarios took turns, and between the "
            f"rounds the machine was calibrated, {len(hardware)} times; predicted is the mean.",
            "",
            f"The last calibration: {last.source}. {rates}; memory "
            f"{last.memory_bytes_per_s / 1e9:.1f} GB/s; an operation "
            f"{last.operation_s * 1e6:.1f} us; all-to-all {link.latency_s * 1e6:.0f} us a peer "
            f"and {link.bytes_per_s / 1e9:.2f} GB/s.",
            "",
            "```text",
            first,
            rule,
            *rest,
            "```",
            "",
        ]
    )


def _say(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
