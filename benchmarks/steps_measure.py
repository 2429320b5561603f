# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of a scenario, and turn what they say into one result per contender."""

import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.steps_contenders import BASELINE, CONTENDERS
from benchmarks.steps_profile import PHASES, profile
from benchmarks.steps_ranks import GRAD_SEED, Counts, check, race
from benchmarks.steps_work import SCENARIOS, Job, whole_displacements, work_of
from tests.dist import Failure, run_ranks, run_ranks_outcomes

Say = Callable[[str], None]

_CHECK_TIMEOUT_S = 300
_RACE_TIMEOUT_S = 1800
_GROUP_TIMEOUT_S = 120
_PROFILE_STEPS = 10


def measure(job: Job, names: Sequence[str], rounds: int, say: Say) -> dict[str, Any]:
    """Check each contender alone, then race those that can run.

    Args:
        job: The job.
        names: Keys of the contenders.
        rounds: Timed steps of each.
        say: Told what is going on.

    Returns:
        The scenario and one result per contender, as plain values.
    """
    work = work_of(job)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.pt"
        right = whole_displacements(work, GRAD_SEED, torch.float32)
        torch.save(right, answer)
        rounded = whole_displacements(work, GRAD_SEED, torch.bfloat16)
        floor = max(float((b - a).norm() / a.norm()) for a, b in zip(right, rounded, strict=True))
        say(f"{SCENARIOS[job.scenario]}, {job.ranks} ranks: counts of {', '.join(names)}")
        results = {
            name: _result(name, seen, work.flops())
            for name, seen in _checked(job, names, str(answer)).items()
        }
    able = [name for name in names if results[name]["error"] is None]
    say(f"{SCENARIOS[job.scenario]}, {job.ranks} ranks: {rounds} rounds of {', '.join(able)}")
    for name, timing in _race(job, able, rounds).items():
        results[name].update(timing)
    return {
        "scenario": job.scenario,
        "title": SCENARIOS[job.scenario],
        "what": work.what,
        "ranks": job.ranks,
        "size": job.size,
        "blocks": job.blocks,
        "mesh": list(work.mesh_shape),
        "matrices": len(work.matrices()),
        "whole_bytes": 2 * sum(rows * cols for rows, cols in work.matrices()),
        "one_process_flops": work.flops(),
        "one_process_bf16_distance": floor,
        "contenders": [results[name] for name in names],
    }


def _checked(job: Job, names: Sequence[str], answer: str) -> dict[str, list[Counts] | str]:
    """What all ranks say of each contender: counts, or its error."""
    try:
        outcomes = run_ranks_outcomes(
            job.ranks,
            check,
            job,
            names,
            answer,
            timeout_s=_CHECK_TIMEOUT_S * len(names),
            group_timeout_s=_GROUP_TIMEOUT_S,
        )
    except TimeoutError as late:
        outcomes = [Failure("TimeoutError", str(late), "")]
    lost = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    checked: dict[str, list[Counts] | str] = {}
    went_apart = bool(lost)
    for i, name in enumerate(names):
        said: list[Any] = [f"{f.kind}: {f.message}" for f in lost] or [
            outcome[i] for outcome in outcomes
        ]
        errors = [one for one in said if isinstance(one, str)]
        checked[name] = _own_error(errors) if errors else said
        went_apart |= 0 < len(errors) < job.ranks
    if went_apart and len(names) > 1:  # one may have spoilt it for others: each on its own ranks
        return {name: _checked(job, [name], answer)[name] for name in names}
    return checked


def _own_error(errors: Sequence[str]) -> str:
    """What a peer said itself; not what its neighbours said when it was gone."""
    return min(errors, key=lambda text: "Connection" in text).splitlines()[0]


def _result(name: str, seen: list[Counts] | str, whole_flops: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "name": name,
        "title": CONTENDERS[name].title,
        "error": None,
        "ms": None,
        "ms_quartiles": None,
        "ratio": None,
        "ratio_quartiles": None,
        "core_ms": None,
        "core_ms_quartiles": None,
        "core_ratio": None,
        "core_ratio_quartiles": None,
        "flops": None,
        "flops_share": None,
        "received_bytes": None,
        "collectives": None,
        "collective_kinds": None,
        "peak_bytes": None,
        "distance": None,
    }
    if isinstance(seen, str):
        return {**result, "error": seen}
    flops = max(c.flops for c in seen)
    busiest = max(seen, key=lambda c: sum(c.collectives.values()))
    return {
        **result,
        "flops": flops,
        "flops_share": flops / whole_flops,
        "received_bytes": round(max(c.received for c in seen)),
        "collectives": sum(busiest.collectives.values()),
        "collective_kinds": busiest.collectives,
        "peak_bytes": max(c.peak for c in seen),
        "distance": _distance(seen),
    }


def _distance(counts: Sequence[Counts]) -> float:
    """Of the parameter that is furthest off, over all ranks together."""
    worst = 0.0
    for parts in zip(*(c.distances for c in counts), strict=True):
        off, due = (sum(part[i] for part in parts) for i in (0, 1))
        worst = max(worst, math.sqrt(off / due))
    return worst


def _race(job: Job, names: Sequence[str], rounds: int) -> dict[str, dict[str, Any]]:
    if not names:
        return {}
    seconds = run_ranks(job.ranks, race, job, names, rounds, timeout_s=_RACE_TIMEOUT_S)
    timings: dict[str, dict[str, Any]] = {name: {} for name in names}
    # A round has ended when its slowest rank has; what it costs is what all ranks spend on cores.
    for kind, which, over_ranks in (("ms", 0, max), ("core_ms", 1, sum)):
        spent = {
            name: [1e3 * over_ranks(rank[i][n][which] for rank in seconds) for n in range(rounds)]
            for i, name in enumerate(names)
        }
        ratio = "ratio" if kind == "ms" else "core_ratio"
        for name, ms in spent.items():
            timings[name] |= {kind: statistics.median(ms), f"{kind}_quartiles": _quartiles(ms)}
            if BASELINE in spent:
                ratios = [a / b for a, b in zip(ms, spent[BASELINE], strict=True)]
                timings[name] |= {
                    ratio: statistics.median(ratios),
                    f"{ratio}_quartiles": _quartiles(ratios),
                }
    return timings


def _quartiles(values: Sequence[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def profiled(job: Job, say: Say) -> dict[str, Any]:
    """Where a step of ours spends its time, as the mean over ranks.

    Args:
        job: The job.
        say: Told what is going on.

    Returns:
        Milliseconds by phase, as plain values.
    """
    say(f"{SCENARIOS[job.scenario]}, {job.ranks} ranks: profile")
    ranks = run_ranks(job.ranks, profile, job, _PROFILE_STEPS, timeout_s=_RACE_TIMEOUT_S)

    def mean(kind: str, phase: str) -> float:
        return statistics.fmean(rank[kind][phase] for rank in ranks)

    return {
        "scenario": job.scenario,
        "title": SCENARIOS[job.scenario],
        "wall_ms": {phase: mean("wall", phase) for phase in PHASES},
        "core_ms": {phase: mean("core", phase) for phase in PHASES},
        "exchange_threads_ms": mean("threads", "total"),
    }
