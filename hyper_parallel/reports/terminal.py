# SPDX-License-Identifier: Apache-2.0
"""A report in a terminal: quiet, at most a hundred columns."""

from typing import Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hyper_parallel.core.optimizer.choices import GroupChoice
from hyper_parallel.core.optimizer.report import quantity
from hyper_parallel.core.optimizer.timeline import LANES
from hyper_parallel.reports.report import (
    SCALING_COLUMNS,
    Report,
    counted,
    duration,
    elements,
    scaling_cells,
)

WIDTH: Final = 100
_LARGEST_SHAPE_LIST: Final = 4


def print_report(report: Report, console: Console | None = None) -> None:
    """Print a report.

    Args:
        report: The report.
        console: Where to. None means the terminal, at most :data:`WIDTH` columns.
    """
    if console is None:
        console = Console(highlight=False)
        console.width = min(console.width, WIDTH)
    console.print(render(report))


def render(report: Report) -> RenderableType:
    """A report as something that ``rich`` prints.

    Args:
        report: The report.

    Returns:
        Headlines, the busiest rank, and the strategies of each group.
    """
    simulation = report.simulation
    title = Text.assemble(
        (report.title, "bold"), f"  on {report.hardware.name}, {report.mesh_text}"
    )
    facts = Text(
        f"{counted(simulation.num_params, 'parameter')}, "
        f"{counted(simulation.num_matrices, 'matrix', 'matrices')}, "
        f"{elements(simulation.num_elements)}; "
        f"{counted(simulation.num_buckets, 'bucket')} of at most "
        f"{quantity(simulation.bucket_bytes, 'B')}",
        style="dim",
    )
    parts: list[RenderableType] = [title, facts, "", _headlines(report), "", *_busiest(report)]
    for choice in report.choices:
        parts += ["", *_group(choice)]
    if report.scaling:
        parts += ["", *_scaling(report)]
    return Group(*parts)


def _table(*titles: str, first_is_text: int = 1) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim", show_edge=False)
    for i, title in enumerate(titles):
        table.add_column(title, justify="left" if i < first_is_text else "right")
    return table


def _headlines(report: Report) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="right", style="bold cyan", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    for headline in report.headlines():
        table.add_row(headline.value, headline.label, headline.note)
    return table


def _busiest(report: Report) -> list[RenderableType]:
    simulation, busiest = report.simulation, report.simulation.busiest
    table = _table(f"rank {busiest.rank}", *LANES)
    times = [duration(busiest.seconds_by_lane[lane]) for lane in LANES]
    table.add_row("busiest", *times)
    axes = {name: nbytes for name, nbytes in busiest.received_by_axis.items() if nbytes}
    texts = [f"{quantity(n, 'B')} over {name}" for name, n in axes.items()]
    share = busiest.flops / (simulation.mean_flops or 1)
    facts = (
        f"{counted(busiest.num_matrices, 'matrix', 'matrices')}, "
        f"{quantity(busiest.flops, 'FLOP')}, {share:.2f} of the mean; "
        f"receives {', '.join(texts) or 'nothing'}"
    )
    return [table, Text(facts, style="dim")]


def _group(choice: GroupChoice) -> list[RenderableType]:
    mesh = " x ".join(map(str, choice.mesh_shape)) or "1"
    head = Text.assemble(
        (choice.placements, "bold"),
        f" on {mesh}: {counted(choice.num_params, 'parameter')}, "
        f"{counted(choice.num_matrices, 'matrix', 'matrices')} ",
        (f"({_shapes(choice)})", "dim"),
    )
    table = _table("strategy", "time", "FLOP", "received", "memory")
    for i, strategy in enumerate(choice.strategies):
        table.add_row(
            f"{'>' if i == 0 else ' '} {strategy.name}",
            duration(strategy.seconds),
            quantity(strategy.flops, "FLOP"),
            quantity(strategy.received_bytes, "B"),
            quantity(strategy.memory_bytes, "B"),
            style="" if i == 0 else "dim",
        )
    words = " ".join(text for text in (choice.reason, choice.bound, choice.advice) if text)
    return [head, Padding(table, (0, 0, 0, 2)), Padding(Text(words), (0, 0, 0, 2))]


def _shapes(choice: GroupChoice) -> str:
    shown = [f"{n:,} of {rows} x {cols}" for rows, cols, n in choice.shapes[:_LARGEST_SHAPE_LIST]]
    return ", ".join(shown + ["..."] * (len(choice.shapes) > _LARGEST_SHAPE_LIST))


def _scaling(report: Report) -> list[RenderableType]:
    head = Text.assemble((f"More ranks: {report.scaling_text}", "bold"), ", everything else equal")
    table = _table(*SCALING_COLUMNS, first_is_text=0)
    for point in report.scaling:
        style = "" if report.is_planned(point) else "dim"
        table.add_row(*scaling_cells(point), style=style)
    return [head, Padding(table, (0, 0, 0, 2))]
