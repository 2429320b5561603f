# SPDX-License-Identifier: Apache-2.0
"""What planning costs: CPU seconds on one core and peak memory, over ranks and over matrices.

Each case runs in a process of its own, which plans, prints and digests as ``hyper-parallel plan``
does. ``python -m benchmarks.planning --output benchmarks/results`` writes the table.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from hyper_parallel.models.mesh_axes import parse_mesh
from hyper_parallel.models.model_param import Model, ModelParam
from hyper_parallel.models.planning import PlanSettings, plan_model
from hyper_parallel.models.sources import load_model

SMALL_SHAPES: Final = ((512, 128), (128, 512), (384, 128), (128, 128))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is planned.

    Attributes:
        model: A preset, or a number of small matrices, a parameter each.
        mesh: Sizes of the axes.
    """

    model: str
    mesh: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What it took.

    Attributes:
        num_ranks: Ranks.
        num_matrices: Matrices.
        plan_s: CPU seconds until the plan stood, the model's shapes included.
        print_s: CPU seconds of its table.
        digest_s: CPU seconds of its digests.
        peak_mb: Largest resident memory of the process, in MiB.
    """

    num_ranks: int
    num_matrices: int
    plan_s: float
    print_s: float
    digest_s: float
    peak_mb: float


CASES: Final = (
    *(
        Case(model="llama3-405b", mesh=mesh)
        for mesh in (
            "dp_shard=8,tp=8",
            "dp_shard=32,tp=8",
            "dp_replicate=2,dp_shard=64,tp=8",
            "dp_replicate=4,dp_shard=128,tp=8",
            "dp_replicate=16,dp_shard=128,tp=8",
            "dp_shard=16384",
        )
    ),
    Case(model="kimi-k2", mesh="dp_replicate=2,dp_shard=256,tp=8,ep=64"),
    Case(model="kimi-k2", mesh="dp_shard=512,tp=8,ep=128"),
    Case(model="deepseek-v3", mesh="pp=8,dp_shard=512,ep=64"),
    *(
        Case(model=number, mesh="dp_replicate=4,dp_shard=16")
        for number in ("1000", "10000", "100000")
    ),
    Case(model="100000", mesh="dp_replicate=4,dp_shard=1024"),
)


def cost_of(case: Case) -> Cost:
    """Plan one case in this process.

    Args:
        case: What to plan.

    Returns:
        What it took.
    """
    start = time.process_time()
    model = _small(int(case.model)) if case.model.isdigit() else load_model(case.model)
    parallelism = parse_mesh(case.mesh)
    plan = plan_model(model, parallelism, PlanSettings()).plan
    planned = time.process_time()
    text = str(plan)
    printed = time.process_time()
    digests = [plan.digest(), *(plan.digest(ranks) for ranks in plan.domains)]
    end = time.process_time()
    assert text
    assert all(digests)
    return Cost(
        num_ranks=parallelism.world_size,
        num_matrices=sum(len(bucket.matrices) for bucket in plan.buckets),
        plan_s=planned - start,
        print_s=printed - planned,
        digest_s=end - printed,
        peak_mb=_peak_mb(),
    )


def _small(number: int) -> Model:
    shapes = [SMALL_SHAPES[i % len(SMALL_SHAPES)] for i in range(number)]
    params = tuple(
        ModelParam(name=f"w{i}", shape=shape, algorithm="muon", role="matrix")
        for i, shape in enumerate(shapes)
    )
    return Model(name=f"{number} matrices", params=params, source="made here")


def _peak_mb() -> float:
    """Largest resident memory of this process, in MiB."""
    # On Linux a new process inherits the figure that getrusage gives from the one that started it,
    # here a test process that may hold a gigabyte. Its own is in /proc.
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(case: Case) -> Cost:
    """Plan one case in a process of its own.

    Args:
        case: What to plan.

    Returns:
        What it took.
    """
    command = [sys.executable, "-m", "benchmarks.planning", "--case", case.model, case.mesh]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Cost(**json.loads(done.stdout))


def report(cases: Sequence[tuple[Case, Cost]]) -> str:
    """Lay costs out.

    Args:
        cases: What was planned, and what it took.

    Returns:
        A table in Markdown.
    """
    header = ("model", "mesh", "ranks", "matrices", "plan s", "print s", "digest s", "peak MiB")
    rows = [
        (
            case.model if not case.model.isdigit() else "small matrices",
            case.mesh,
            f"{cost.num_ranks:,}",
            f"{cost.num_matrices:,}",
            f"{cost.plan_s:.2f}",
            f"{cost.print_s:.2f}",
            f"{cost.digest_s:.2f}",
            f"{cost.peak_mb:.0f}",
        )
        for case, cost in cases
    ]
    lines = [" | ".join(line) for line in (header, ("---",) * len(header), *rows)]
    machine = f"Python {platform.python_version()}, one core of {os.cpu_count()}, CPU seconds."
    return "\n".join(["# Planning", "", machine, "", *(f"| {line} |" for line in lines), ""])


def main() -> None:
    """Plan every case, or the one that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="folder for planning.md")
    parser.add_argument("--case", nargs=2, metavar=("MODEL", "MESH"), help="one case, as JSON")
    arguments = parser.parse_args()
    if arguments.case:
        model, mesh = arguments.case
        print(json.dumps(asdict(cost_of(Case(model=model, mesh=mesh)))))
        return
    text = report([(case, measured(case)) for case in CASES])
    print(text)
    if arguments.output:
        (arguments.output / "planning.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
