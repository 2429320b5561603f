# SPDX-License-Identifier: Apache-2.0
"""Train while ranks are killed, again and again, and show that nobody can tell from the weights.

Three runs of ``examples/train_gpt.py`` with the same options::

    undisturbed  no kill, on the first number of ranks throughout
    moved        no kill but the ones after which the job goes on with another number of ranks
    soaked       a rank is killed every few dozen steps, and ``torchrun`` restarts the job

The soaked run must have the bits of the moved one: every loss, all weights, all optimizer state.
The undisturbed one says what the change of the number of ranks costs, which is rounding alone.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs as a script, anywhere

from benchmarks.soak_faults import PLACES, EventLog, Fault
from benchmarks.soak_rank import write_faults
from benchmarks.soak_report import Outcome, compare, report
from examples.options import whole_number

ROOT: Final = Path(__file__).resolve().parents[1]
MODEL: Final = (
    *("--width=32", "--layers=2", "--heads=2", "--context=32", "--batch=12", "--warmup=10"),
    *("--ns-dtype=float32", "--eval-batches=1", "--sample-bytes=0"),
)
"""A model so small that restarts, not steps, take the time. A batch that 1 to 4 ranks can share."""
_POLL_S: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps that are trained on one number of ranks.

    Attributes:
        world_size: Number of ranks.
        faults: What strikes them, in order. If another phase follows, the last one ends this.
    """

    world_size: int
    faults: list[Fault] = field(default_factory=list)


def plan_faults(
    ranks: Sequence[int], *, steps: int, every: int, checkpoint_every: int, seed: int
) -> list[Phase]:
    """Draw who is killed, when and where.

    Args:
        ranks: World size of each phase; the phases share the steps equally.
        steps: Optimizer steps of the whole run.
        every: Mean number of steps between two kills.
        checkpoint_every: Steps between checkpoints; a kill in a save strikes at one of these.
        seed: Of the draws.

    Returns:
        The phases. Kills ascend, and each place has its turn.
    """
    draw = random.Random(seed)
    phases = []
    for number, world_size in enumerate(ranks):
        first, last = (steps * end // len(ranks) for end in (number, number + 1))
        kills = max(1, round((last - first) / every))
        faults = []
        for i in range(kills):
            place = PLACES[(number + i) % len(PLACES)]
            low, high = (first + (last - first) * end // kills for end in (i, i + 1))
            due = checkpoint_every if place == "save" else 1
            step = draw.choice([step for step in range(low + 1, high) if step % due == 0])
            faults.append(Fault(step=step, rank=draw.randrange(world_size), place=place))
        phases.append(Phase(world_size=world_size, faults=faults))
    return phases


def without_restarts(phases: Sequence[Phase]) -> list[Phase]:
    """Keep the kills that end a phase, and no other.

    Args:
        phases: Of the soaked run.

    Returns:
        Phases of the moved run.
    """
    ends = [phase.faults[-1:] for phase in phases[:-1]] + [[]]
    return [
        Phase(world_size=phase.world_size, faults=end)
        for phase, end in zip(phases, ends, strict=True)
    ]


class Soak:
    """Starts runs and watches them.

    Args:
        folder: Where runs, logs and results go.
        options: Options of the example, the same for all runs.
        steps: Optimizer steps of a run.
        console: Shows the progress.
    """

    def __init__(
        self, folder: Path, options: Sequence[str], *, steps: int, console: Console
    ) -> None:
        self._folder = folder
        self._options = options
        self._steps = steps
        self._console = console

    def run(self, name: str, phases: Sequence[Phase]) -> Outcome:
        """Train to the end.

        Args:
            name: Of the run, and of its folder.
            phases: One after the other; each goes on from the last checkpoint.

        Returns:
            What came of it.

        Raises:
            RuntimeError: If a phase ends otherwise than planned.
        """
        folder = self._folder / name
        folder.mkdir(parents=True)
        log = EventLog(folder / "events.jsonl")
        start_s = time.monotonic()
        with Progress(
            TextColumn(f"{name:<11}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=self._console,
        ) as bar:
            task = bar.add_task(name, total=self._steps, status="")
            for number, phase in enumerate(phases):
                is_last = number == len(phases) - 1
                process = self._start(folder, number, phase, is_last=is_last)
                try:
                    while process.poll() is None:
                        time.sleep(_POLL_S)
                        killed = len(log.events("fault"))
                        status = f"{phase.world_size} ranks, killed {killed}"
                        bar.update(task, completed=steps_done(folder), status=status)
                finally:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGTERM)
                        process.wait()
                if (process.returncode == 0) != is_last:
                    raise RuntimeError(
                        f"{name}: phase {number} on {phase.world_size} ranks ended with code "
                        f"{process.returncode}; see {folder / f'phase_{number}.log'}"
                    )
        return Outcome(
            run_dir=folder / "run",
            steps=self._steps,
            starts=log.events("start"),
            faults=log.events("fault"),
            wall_s=time.monotonic() - start_s,
        )

    def _start(
        self, folder: Path, number: int, phase: Phase, *, is_last: bool
    ) -> subprocess.Popen[bytes]:
        faults = folder / f"faults_{number}.json"
        write_faults(phase.faults, faults)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            f"--nproc-per-node={phase.world_size}",
            f"--max-restarts={len(phase.faults) - (not is_last)}",
            *("-m", "benchmarks.soak_rank", str(faults), str(folder / "events.jsonl")),
            *(*self._options, f"--steps={self._steps}", f"--run-dir={folder / 'run'}"),
            "--auto-resume",
        ]
        with (folder / f"phase_{number}.log").open("wb") as output:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def steps_done(folder: Path) -> int:
    """Count the steps that a run has recorded.

    Args:
        folder: Of the run.

    Returns:
        Lines of its metrics.
    """
    path = folder / "run" / "metrics.jsonl"
    return path.read_bytes().count(b'{"step"') if path.exists() else 0


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="soak",
        description="Train under repeated SIGKILL on changing numbers of ranks, and compare with "
        "the uninterrupted run, bit by bit.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    count = whole_number(least=1)
    parser.add_argument("--steps", type=count, default=2000, help="optimizer steps")
    parser.add_argument("--every", type=count, default=60, help="mean steps between two kills")
    parser.add_argument(
        "--ranks", default="2,4,3", help="numbers of ranks, one after the other; 12 is a multiple"
    )
    parser.add_argument("--checkpoint-every", type=count, default=20, help="steps")
    parser.add_argument("--seed", type=int, default=0, help="of kills, weights and data")
    parser.add_argument("--data", type=Path, default=ROOT / "docs", help="folder of text")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/soak"), help="new folder for all that is left"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name. None takes ``sys.argv``.

    Returns:
        0 if the soaked run has the bits of the moved one, else 1.
    """
    parser = make_parser()
    arguments = parser.parse_args(argv)
    ranks = [int(text) if text.isdecimal() else 0 for text in arguments.ranks.split(",")]
    if not all(number and 12 % number == 0 for number in ranks):
        parser.error(f"--ranks {arguments.ranks}: expected divisors of 12, such as 2,4,3")
    if arguments.every < 2 * arguments.checkpoint_every:
        parser.error(
            f"--every {arguments.every}: a kill in a save needs a save to strike, expected twice "
            f"--checkpoint-every {arguments.checkpoint_every} or more"
        )
    if arguments.run_dir.exists():
        parser.error(f"--run-dir {arguments.run_dir} exists already; remove it or pass another")
    folder = arguments.run_dir.resolve()
    shutil.copytree(arguments.data, folder / "text")  # it may be edited while the soak runs
    options = [
        *(*MODEL, f"--checkpoint-every={arguments.checkpoint_every}", f"--seed={arguments.seed}"),
        *(f"--eval-every={arguments.steps}", f"--data={folder / 'text'}"),
    ]
    console = Console()
    soak = Soak(folder, options, steps=arguments.steps, console=console)
    phases = plan_faults(
        ranks,
        steps=arguments.steps,
        every=arguments.every,
        checkpoint_every=arguments.checkpoint_every,
        seed=arguments.seed,
    )
    undisturbed = soak.run("undisturbed", [Phase(world_size=ranks[0])])
    moved = soak.run("moved", without_restarts(phases)) if len(ranks) > 1 else undisturbed
    soaked = soak.run("soaked", phases)
    result = compare(soaked, moved=moved, undisturbed=undisturbed)
    (folder / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    console.print(report(result), markup=False, highlight=False, soft_wrap=True)
    return 0 if result["bitwise"] else 1


if __name__ == "__main__":
    sys.exit(main())
