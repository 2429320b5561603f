# SPDX-License-Identifier: Apache-2.0
"""A report as one picture for slides."""

import textwrap
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from hyper_parallel.core.optimizer.timeline import LANES
from hyper_parallel.reports.figures import (
    BLUE,
    GREY,
    LANE_COLORS,
    ORANGE,
    VERMILION,
    log_ticks,
    scaled,
    time_scale,
)
from hyper_parallel.reports.report import Report

_INK: Final = "#1d2129"
_SOFT: Final = "#5b6270"
_NOTE_WIDTH: Final = 38


def write_png(report: Report, path: str | Path) -> None:
    """Draw a report, 1600 x 900 pixels on white.

    Args:
        report: The report.
        path: Where.
    """
    figure = Figure(figsize=(16, 9), dpi=100, facecolor="white")
    figure.set_layout_engine(
        ConstrainedLayoutEngine(rect=(0.03, 0.02, 0.95, 0.65), hspace=0.12, wspace=0.05)
    )
    FigureCanvasAgg(figure)
    figure.text(0.04, 0.93, report.title, fontsize=26, fontweight="bold", color=_INK)
    figure.text(
        0.04, 0.895, f"One Muon step on {report.hardware.name}, {report.mesh_text}", **_soft(14)
    )
    for i, headline in enumerate(report.headlines()):
        left = 0.04 + 0.24 * i
        figure.text(left, 0.81, headline.value, fontsize=28, fontweight="bold", color=BLUE)
        figure.text(left, 0.775, headline.label, fontsize=14, fontweight="bold", color=_INK)
        note = textwrap.fill(headline.note, _NOTE_WIDTH)
        figure.text(left, 0.76, note, va="top", **_soft(11))
    grid = figure.add_gridspec(2, 2)
    drawn = (_draw_load, _draw_timeline, _draw_traffic, _draw_scaling)
    for i, draw in enumerate(drawn):
        draw(figure.add_subplot(grid[i // 2, i % 2]), report)
    figure.savefig(path)


def _soft(size: float) -> dict[str, Any]:
    return {"fontsize": size, "color": _SOFT}


def _style(axes: Axes, title: str, *, grid: str) -> None:
    axes.set_title(title, loc="left", fontsize=14, fontweight="bold", color=_INK, pad=10)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=_SOFT, labelsize=11)
    axes.xaxis.label.set(color=_SOFT, fontsize=12)
    axes.yaxis.label.set(color=_SOFT, fontsize=12)
    axes.grid(visible=True, axis="x" if grid == "x" else "y", color="#e3e6ea", linewidth=1)
    axes.set_axisbelow(True)


def _draw_load(axes: Axes, report: Report) -> None:
    simulation = report.simulation
    factor, unit = scaled(simulation.max_flops, "FLOP")
    loads = sorted((flops * factor for flops in simulation.flops), reverse=True)
    mean = simulation.mean_flops * factor
    axes.fill_between(range(len(loads) + 1), [*loads, loads[-1]], step="post", color=BLUE, lw=0)
    axes.axhline(mean, color=VERMILION, linestyle="--", linewidth=2)
    axes.annotate(
        f"mean {mean:.3g} {unit}",
        (1, mean),
        xycoords=("axes fraction", "data"),
        xytext=(0, 5),
        textcoords="offset points",
        ha="right",
        color=VERMILION,
        fontsize=11,
    )
    axes.set(xlim=(0, len(loads)), ylim=(0, 1.18 * loads[0] or 1), xlabel="ranks, most work first")
    axes.set_ylabel(f"Newton-Schulz ({unit})")
    _style(
        axes, f"Work on each rank: the busiest has {simulation.imbalance:.2f} of the mean", grid="y"
    )


def _draw_timeline(axes: Axes, report: Report) -> None:
    factor, unit = time_scale(report.simulation.step_s)
    for span in report.simulation.busiest.timeline:
        axes.barh(
            len(LANES) - 1 - LANES.index(span.lane),
            (span.stop_s - span.start_s) * factor,
            left=span.start_s * factor,
            height=0.62,
            color=LANE_COLORS[span.lane],
            edgecolor="white",
            linewidth=0.8,
        )
    axes.set_yticks(range(len(LANES)), reversed(LANES))
    axes.set(xlim=(0, None), ylim=(-0.6, len(LANES) - 0.4), xlabel=f"time in the step ({unit})")
    _style(axes, f"Step of rank {report.simulation.busiest.rank}, the busiest", grid="x")


def _draw_traffic(axes: Axes, report: Report) -> None:
    by_axis = report.simulation.busiest.received_by_axis
    factor, unit = scaled(max(by_axis.values(), default=0), "B")
    widths = [nbytes * factor for nbytes in by_axis.values()]
    bars = axes.barh(list(by_axis), widths, 0.62, color=ORANGE)
    axes.bar_label(bars, fmt="%.3g", padding=4, color=_SOFT, fontsize=11)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set(xlim=(0, None), xlabel=f"received per step ({unit})")
    _style(axes, "What it receives, by the mesh axes that the bytes cross", grid="x")


def _draw_scaling(axes: Axes, report: Report) -> None:
    points = report.scaling
    if not points:
        axes.set_axis_off()
        return
    _style(axes, f"More ranks: {report.scaling_text}", grid="y")
    factor, unit = time_scale(max(point.step_s for point in points))
    ranks = [point.num_ranks for point in points]
    times = [point.step_s * factor for point in points]
    ideal = [times[0] * ranks[0] / n for n in ranks]
    axes.loglog(ranks, ideal, ":", color=GREY, linewidth=2, label="halved by twice the ranks")
    axes.loglog(ranks, times, "o-", color=BLUE, linewidth=2, label="predicted step")
    for point in filter(report.is_planned, points):
        axes.plot(point.num_ranks, point.step_s * factor, "o", color=BLUE, markersize=12)
    ticks = log_ticks(min(ideal + times), max(times))
    for axis, values in ((axes.xaxis, [float(n) for n in ranks]), (axes.yaxis, ticks)):
        axis.set_major_locator(FixedLocator(values))
        axis.set_major_formatter(FixedFormatter([f"{value:,g}" for value in values]))
        axis.set_minor_locator(NullLocator())
    axes.set(xlabel="ranks (large dot: this plan)", ylabel=f"step time ({unit})")
    axes.legend(frameon=False, labelcolor=_SOFT, fontsize=11)
