# SPDX-License-Identifier: Apache-2.0
"""Train Muon and AdamW on the same budget, one after the other, and compare their curves.

    python examples/compare.py

The rest of the command line is that of ``train_gpt.py``, given to both runs. In the end there are
``loss.png`` and, for each run, ``metrics.jsonl`` and ``plan.txt``.
"""

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs as a script, anywhere

from examples.options import OptionParser, add_training_arguments, check_options, whole_number
from examples.processes import exit_with, num_cores
from examples.run_log import read_steps, read_summary
from examples.text_data import load_text

LABELS = {"adamw": "AdamW", "muon": "Muon"}
_COLORS = {"adamw": "tab:orange", "muon": "tab:blue"}
_SMOOTHING = 0.8  # share of the old value in the running mean of the training loss


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    console = Console()
    try:
        comparison = parse_comparison(argv)
        comparison.run_dir.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        exit_with(error)
    for optimizer, label in LABELS.items():
        console.rule(f"{label} on {comparison.num_processes} processes")
        code = comparison.train(optimizer)
        if code:
            folder = comparison.run_dir / optimizer
            console.print(
                f"{label} ended with exit code {code}: see above; what it left is in {folder}",
                style="red",
                soft_wrap=True,
            )
            raise SystemExit(code)
    plot_losses(comparison.run_dir)
    console.print(summary_table(comparison.run_dir))
    console.print("Written:")
    for name in ("loss.png", "adamw/metrics.jsonl", "muon/metrics.jsonl", "muon/plan.txt"):
        console.print(f"  {comparison.run_dir / name}", highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two training runs that differ in the optimizer alone.

    Attributes:
        run_dir: Receives a folder for each run.
        num_processes: Of each run.
        training_argv: Options that both runs get, as typed.
    """

    run_dir: Path
    num_processes: int
    training_argv: list[str]

    def train(self, optimizer: str) -> int:
        """Run one training to its end, on this terminal.

        Args:
            optimizer: As ``--optimizer``.

        Returns:
            Exit code; 0 is success.
        """
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        script = Path(__file__).with_name("train_gpt.py")
        command = [
            *launcher,
            f"--nproc-per-node={self.num_processes}",
            str(script),
            *self.training_argv,
            f"--optimizer={optimizer}",
            f"--run-dir={self.run_dir / optimizer}",
        ]
        # Each process takes its part of the cores itself; without this, torchrun warns of it.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        return subprocess.run(command, env=environment, check=False).returncode


def parse_comparison(argv: Sequence[str] | None) -> Comparison:
    """Parse the command line, and check all that both runs would refuse before starting one.

    Args:
        argv: Arguments without the program's name. None takes ``sys.argv``.

    Returns:
        What to run.

    Raises:
        ValueError: Naming the option, what it was, and the way out.
    """
    own = OptionParser(add_help=False, allow_abbrev=False)
    own.add_argument(
        "--nproc",
        type=whole_number(least=1),
        metavar="N",
        help="processes of each run (default: one a GPU, else one a core and at most 4)",
    )
    own.add_argument(
        "--run-dir",
        type=Path,
        metavar="FOLDER",
        default=Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}",
        help="where all results go (default: %(default)s)",
    )
    parser = OptionParser(
        usage="%(prog)s [options]",
        parents=[own],
        allow_abbrev=False,
        description="Train with Muon and with AdamW on the same budget, and compare the losses.",
    )
    add_training_arguments(parser)
    arguments = parser.parse_args(argv)
    num_processes: int = arguments.nproc or _default_num_processes(arguments.batch)
    for optimizer in LABELS:
        run_options = {**vars(arguments), "optimizer": optimizer}
        run_options |= {"resume": False, "auto_resume": False}
        run_options["run_dir"] = arguments.run_dir / optimizer
        del run_options["nproc"]
        check_options(argparse.Namespace(**run_options), world_size=num_processes)
    load_text(arguments.data, context=arguments.context)
    return Comparison(
        run_dir=arguments.run_dir,
        num_processes=num_processes,
        training_argv=own.parse_known_args(argv)[1],
    )


def _default_num_processes(batch: int) -> int:
    most = torch.cuda.device_count() or min(4, num_cores())
    return max(n for n in range(1, most + 1) if batch % n == 0)


def plot_losses(run_dir: Path) -> None:
    """Draw the losses of both runs over steps and over time into ``loss.png``.

    Args:
        run_dir: Holds one folder for each of ``LABELS``, with its ``metrics.jsonl``.
    """
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.8), sharey=True, layout="constrained")
    _draw(panels[0], run_dir, over="step")
    _draw(panels[1], run_dir, over="time")
    panels[0].set(xlabel="optimizer step", ylabel="loss (nats per byte)", title="at equal steps")
    panels[1].set(xlabel="training time (s)", title="at equal time")
    panels[0].set_ylim(top=_loss_after_start(run_dir))
    panels[0].legend()
    figure.suptitle("Muon and AdamW on the same model, data and batches")
    figure.savefig(run_dir / "loss.png", dpi=150)
    plt.close(figure)


def summary_table(run_dir: Path) -> Table:
    """Compare what the two runs reached.

    Args:
        run_dir: Holds one folder for each of ``LABELS``, with its ``metrics.jsonl``.

    Returns:
        A row for each run.
    """
    table = Table(title="Same model, data, batches and steps")
    table.add_column("optimizer")
    for heading in ("validation loss (nats/byte)", "bits/byte", "step (ms)", "in optimizer"):
        table.add_column(heading, justify="right")
    for optimizer, label in LABELS.items():
        summary = read_summary(run_dir / optimizer / "metrics.jsonl")
        table.add_row(
            label,
            f"{summary['val_loss']:.4f}",
            f"{summary['val_loss'] / math.log(2):.3f}",
            f"{1e3 * summary['median_step_s']:.0f}",
            f"{summary['optimizer_share']:.0%}",
        )
    return table


def _draw(panel: Axes, run_dir: Path, *, over: str) -> None:
    for optimizer, label in LABELS.items():
        records = read_steps(run_dir / optimizer / "metrics.jsonl")
        seconds = accumulate(record["step_s"] for record in records)
        xs = list(seconds) if over == "time" else [record["step"] for record in records]
        losses = [record["loss"] for record in records]
        evaluated = [i for i, record in enumerate(records) if "val_loss" in record]
        color = _COLORS[optimizer]
        panel.plot(xs, _running_mean(losses), color=color, alpha=0.4, label=f"{label}, training")
        panel.plot(
            [xs[i] for i in evaluated],
            [records[i]["val_loss"] for i in evaluated],
            color=color,
            marker="o",
            markersize=4,
            label=f"{label}, validation",
        )
    panel.grid(alpha=0.3)


def _loss_after_start(run_dir: Path) -> float:
    """Return the loss after a tenth of the steps: the fall before it would flatten the rest."""
    runs = [read_steps(run_dir / optimizer / "metrics.jsonl") for optimizer in LABELS]
    return max(_running_mean(r["loss"] for r in records)[len(records) // 10] for records in runs)


def _running_mean(values: Iterable[float]) -> list[float]:
    return list(accumulate(values, lambda old, new: _SMOOTHING * old + (1 - _SMOOTHING) * new))


if __name__ == "__main__":
    main()
