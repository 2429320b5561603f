# SPDX-License-Identifier: Apache-2.0
"""The plots of a report as plotly figures; colours that a page can change for a dark screen."""

import math
from typing import Any, Final

import plotly.graph_objects as go

from hyper_parallel.core.optimizer.timeline import LANES
from hyper_parallel.reports.report import Report

# Okabe and Ito's colours, which all kinds of eyes tell apart. https://jfly.uni-koeln.de/color/
BLUE: Final = "#0072B2"
ORANGE: Final = "#E69F00"
GREEN: Final = "#009E73"
VERMILION: Final = "#D55E00"
SKY: Final = "#56B4E9"
GREY: Final = "#8A8F98"
LANE_COLORS: Final = dict(zip(LANES, (SKY, ORANGE, BLUE, VERMILION, GREEN), strict=True))
LANE_TITLES: Final = dict(
    zip(LANES, ("prepare", "exchange in", "orthogonalize", "exchange back", "apply"), strict=True)
)

_MOST_BARS: Final = 256
_MOST_POINTS: Final = 2048
_FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


def scaled(largest: float, unit: str) -> tuple[float, str]:
    """Factor and unit that make the largest of some numbers readable.

    Args:
        largest: The largest number.
        unit: Its unit, without a prefix.

    Returns:
        What to multiply by, and the unit with its prefix.

    Example:
        >>> scaled(2_500_000, "B")
        (1e-06, 'MB')
    """
    prefixes = ("", "k", "M", "G", "T", "P")
    power = min(int(math.log10(largest) // 3), 5) if largest >= 1 else 0
    return 1000.0**-power, f"{prefixes[power]}{unit}"


def time_scale(largest_s: float) -> tuple[float, str]:
    """Factor and unit for some seconds.

    Args:
        largest_s: The longest of them.

    Returns:
        What to multiply by, and the unit.
    """
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if largest_s * factor >= 1:
            return factor, unit
    return 1e6, "us"


def load_figure(report: Report) -> go.Figure:
    """Operations of each rank: bars for few ranks, a sorted curve for many."""
    simulation = report.simulation
    factor, unit = scaled(simulation.max_flops, "FLOP")
    loads = [flops * factor for flops in simulation.flops]
    mean = simulation.mean_flops * factor
    figure = go.Figure()
    if len(loads) <= _MOST_BARS:
        figure.add_bar(
            x=list(simulation.ranks),
            y=loads,
            customdata=list(simulation.matrices),
            marker={"color": BLUE, "line": {"width": 0}},
            name="a rank's load",
            hovertemplate=f"rank %{{x}}<br>%{{y:.3g}} {unit}<br>%{{customdata}} matrices"
            "<extra></extra>",
        )
        figure.update_xaxes(title_text="rank")
    else:
        order = sorted(range(len(loads)), key=lambda i: -loads[i])
        every = max(1, len(order) // _MOST_POINTS)
        shown = order[::every]
        figure.add_scatter(
            x=list(range(0, len(order), every)),
            y=[loads[i] for i in shown],
            customdata=[simulation.ranks[i] for i in shown],
            mode="lines",
            line={"color": BLUE, "width": 2, "shape": "hv"},
            fill="tozeroy",
            name="a rank's load",
            hovertemplate=f"rank %{{customdata}}<br>%{{y:.3g}} {unit}<extra></extra>",
        )
        figure.update_xaxes(title_text="ranks, most work first")
    figure.add_hline(y=mean, line={"color": VERMILION, "width": 2, "dash": "dash"})
    figure.add_annotation(
        x=1,
        xref="paper",
        y=mean,
        yshift=11,
        xanchor="right",
        text=f"mean {mean:.3g} {unit}",
        showarrow=False,
        font={"color": VERMILION},
    )
    figure.update_yaxes(title_text=f"Newton-Schulz ({unit})", rangemode="tozero")
    return styled(figure)


def timeline_figure(report: Report) -> go.Figure:
    """What the busiest rank does when, one lane per phase."""
    spans = report.simulation.busiest.timeline
    factor, unit = time_scale(report.simulation.step_s)
    figure = go.Figure()
    for lane in LANES:
        mine = [span for span in spans if span.lane == lane]
        figure.add_bar(
            base=[span.start_s * factor for span in mine],
            x=[(span.stop_s - span.start_s) * factor for span in mine],
            y=[LANE_TITLES[lane]] * len(mine),
            customdata=[[span.bucket, span.stop_s * factor] for span in mine],
            orientation="h",
            width=0.62,
            marker={"color": LANE_COLORS[lane], "line": {"width": 1, "color": "white"}},
            name=lane,
            hovertemplate=f"bucket %{{customdata[0]}}, {lane}<br>%{{base:.3g}} to "
            f"%{{customdata[1]:.3g}} {unit}<br>takes %{{x:.3g}} {unit}<extra></extra>",
        )
    figure.update_layout(barmode="overlay", showlegend=False)
    figure.update_yaxes(
        categoryorder="array", categoryarray=[LANE_TITLES[lane] for lane in reversed(LANES)]
    )
    figure.update_xaxes(title_text=f"time in the step ({unit})", rangemode="tozero")
    return styled(figure, grid="x")


def traffic_figure(report: Report) -> go.Figure:
    """Bytes that the busiest rank receives, by the mesh axis that they cross."""
    shown = report.simulation.busiest.received_by_axis
    factor, unit = scaled(max(shown.values(), default=0), "B")
    figure = go.Figure()
    figure.add_bar(
        x=[nbytes * factor for nbytes in shown.values()],
        y=list(shown),
        text=[f"{nbytes * factor:.3g}" for nbytes in shown.values()],
        textposition="outside",
        cliponaxis=False,
        orientation="h",
        width=0.62,
        marker={"color": ORANGE, "line": {"width": 0}},
        name="received",
        hovertemplate=f"over %{{y}}<br>%{{x:.3g}} {unit}<extra></extra>",
    )
    figure.update_xaxes(title_text=f"received per step ({unit})", rangemode="tozero")
    figure.update_yaxes(categoryorder="array", categoryarray=list(reversed(shown)))
    return styled(figure, grid="x")


def scaling_figure(report: Report) -> go.Figure:
    """Step time on fewer and on more ranks."""
    points = report.scaling
    factor, unit = time_scale(max((p.step_s for p in points), default=0.0))
    ranks = [point.num_ranks for point in points]
    figure = go.Figure()
    if points:
        first = points[0].step_s * factor * ranks[0]
        figure.add_scatter(
            x=ranks,
            y=[first / n for n in ranks],
            mode="lines",
            line={"color": GREY, "dash": "dot", "width": 2},
            name="halved by twice the ranks",
            hoverinfo="skip",
        )
    figure.add_scatter(
        x=ranks,
        y=[point.step_s * factor for point in points],
        customdata=[(point.axis, point.axis_size, point.num_idle) for point in points],
        mode="lines+markers",
        line={"color": BLUE, "width": 2},
        marker={"size": [13 if report.is_planned(point) else 8 for point in points]},
        name="predicted step",
        hovertemplate="%{customdata[0]} = %{customdata[1]:,}: %{x:,} ranks, %{customdata[2]:,} idle"
        f"<br>%{{y:.3g}} {unit}<extra></extra>",
    )
    figure.update_xaxes(
        title_text="ranks (large dot: this plan)",
        type="log",
        tickvals=ranks,
        ticktext=[f"{n:,}" for n in ranks],
    )
    shown = [value for trace in figure.data for value in trace.y or ()]
    ticks = log_ticks(min(shown, default=1.0), max(shown, default=1.0))
    figure.update_yaxes(
        title_text=f"step time ({unit})",
        type="log",
        tickvals=ticks,
        ticktext=[f"{tick:g}" for tick in ticks],
    )
    return styled(figure)


def log_ticks(smallest: float, largest: float) -> list[float]:
    """Ticks of a logarithmic axis: 1, 2 and 5 times the powers of ten.

    Args:
        smallest: The smallest number shown, positive.
        largest: The largest.

    Returns:
        Ticks from just below to just above.

    Example:
        >>> log_ticks(3, 40)
        [2.0, 5.0, 10.0, 20.0, 50.0]
    """
    powers = range(math.floor(math.log10(smallest)) - 1, math.ceil(math.log10(largest)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    low = max((tick for tick in ticks if tick <= smallest), default=ticks[0])
    high = min((tick for tick in ticks if tick >= largest), default=ticks[-1])
    return [tick for tick in ticks if low <= tick <= high]


def styled(figure: go.Figure, *, grid: str = "y") -> go.Figure:
    """Give a figure the look of the page: no frame, one set of grid lines, no background."""
    axis: dict[str, Any] = {"showline": False, "zeroline": False, "automargin": True}
    figure.update_layout(
        template="none",
        font={"family": _FONT, "size": 13, "color": GREY},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 8, "r": 12, "t": 28, "b": 8},
        bargap=0.15,
        height=320,
        hoverlabel={"font": {"family": _FONT}},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    )
    figure.update_xaxes(**axis, showgrid=grid == "x", gridcolor="rgba(138,143,152,0.25)")
    figure.update_yaxes(**axis, showgrid=grid == "y", gridcolor="rgba(138,143,152,0.25)")
    return figure
