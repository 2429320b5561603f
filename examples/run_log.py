# SPDX-License-Identifier: Apache-2.0
"""What a training run shows on the screen and leaves in ``metrics.jsonl``. Imports no torch."""

import json
import statistics
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Record = dict[str, Any]


class RunLog:
    """Progress bar and metrics file of one run.

    Every rank makes one and calls the same methods; all but rank 0's do nothing. On a terminal
    there is a live bar, elsewhere a line every ``log_every`` steps.

    Attributes:
        records: One per step since the start of the run, resumed or not, as in the file.
    """

    def __init__(
        self, run_dir: Path, *, is_first_rank: bool, num_steps: int, steps_done: int, log_every: int
    ) -> None:
        self.records: list[Record] = []
        self._path = run_dir / "metrics.jsonl"
        self._active = is_first_rank
        self._num_steps = num_steps
        self._log_every = log_every
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=Console(file=sys.stdout),
            disable=not (is_first_rank and sys.stdout.isatty()),
        )
        self._task = self._bar.add_task(
            run_dir.name, total=num_steps, completed=steps_done, status=""
        )
        if self._active:
            self._drop_after(steps_done)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def add(self, record: Record) -> None:
        """Show and keep what one step measured.

        Args:
            record: ``step``, ``loss``, ``tokens_per_s``, ``step_s``, ``optimizer_s`` and more;
                ``val_loss`` where there was a validation.
        """
        if not self._active:
            return
        self.records.append(record)
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        status = _status(record)
        self._bar.update(self._task, completed=record["step"], status=status)
        if "val_loss" in record:
            self.say(f"step {record['step']:>5}  validation loss {record['val_loss']:.4f}")
        elif self._bar.disable and record["step"] % self._log_every == 0:
            self.say(f"step {record['step']:>5} of {self._num_steps}  {status}")

    def summarize(self, **fields: object) -> None:
        """Append the last line of the metrics: totals and medians of the whole run.

        Args:
            **fields: Facts to keep beside them.
        """
        if not self._active:
            return
        step_s = statistics.median(record["step_s"] for record in self.records)
        optimizer_s = statistics.median(record["optimizer_s"] for record in self.records)
        summary = {
            "summary": True,
            "steps": len(self.records),
            "val_loss": self.records[-1]["val_loss"],
            "train_s": sum(record["step_s"] for record in self.records),
            "median_step_s": step_s,
            "median_optimizer_s": optimizer_s,
            "optimizer_share": optimizer_s / step_s,
            **fields,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(summary) + "\n")
        self.say(
            f"validation loss {summary['val_loss']:.4f} nats per byte after {summary['steps']} "
            f"steps in {summary['train_s']:.0f} s; the optimizer takes "
            f"{summary['optimizer_share']:.0%} of a step"
        )

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one.

        Args:
            text: Printed as it is, without markup.
        """
        if self._active:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _drop_after(self, step: int) -> None:
        """Keep the records up to ``step``, the last one that the checkpoint knows."""
        if step and self._path.exists():
            self.records = [r for r in read_steps(self._path) if r["step"] <= step]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".draft")  # the run may end here, too
        draft.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        draft.replace(self._path)


def read_steps(path: Path) -> list[Record]:
    """Read the records of a metrics file.

    Args:
        path: A ``metrics.jsonl``.

    Returns:
        One record a step, without the summary, and without a last line that a crash cut off.
    """
    records = [
        json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"
    ]
    return [record for record in records if "summary" not in record]


def read_summary(path: Path) -> Record:
    """Read the last line of the metrics file of a finished run.

    Args:
        path: A ``metrics.jsonl``.

    Returns:
        The totals that :meth:`RunLog.summarize` wrote.
    """
    summary: Record = json.loads(path.read_text().splitlines()[-1])
    return summary


def _status(record: Record) -> str:
    return (
        f"loss {record['loss']:.3f}  {record['tokens_per_s']:,.0f} tokens/s  "
        f"optimizer {1e3 * record['optimizer_s']:.0f} of {1e3 * record['step_s']:.0f} ms"
    )
