# SPDX-License-Identifier: Apache-2.0
"""A report as one page that opens without a network: plots, numbers and choices."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from hyper_parallel.core.optimizer.choices import GroupChoice
from hyper_parallel.core.optimizer.report import quantity
from hyper_parallel.core.optimizer.strategies import STRATEGIES
from hyper_parallel.reports.figures import (
    load_figure,
    scaling_figure,
    timeline_figure,
    traffic_figure,
)
from hyper_parallel.reports.report import (
    SCALING_COLUMNS,
    Report,
    counted,
    duration,
    elements,
    scaling_cells,
)

_CONFIG = {"displaylogo": False, "displayModeBar": False, "responsive": True}


def write_html(report: Report, path: str | Path) -> None:
    """Write the page.

    Args:
        report: The report.
        path: Where.
    """
    Path(path).write_text(to_html(report), encoding="utf-8")


def to_html(report: Report) -> str:
    """The page as text.

    Args:
        report: The report.

    Returns:
        HTML with all scripts and styles inside, about 5 MB: most of it is plotly.js.
    """
    folder = files("hyper_parallel.reports")
    template = Template(folder.joinpath("page.html").read_text(encoding="utf-8"))
    simulation = report.simulation
    return template.substitute(
        title=escape(report.title),
        hardware=escape(report.hardware.name),
        source=escape(report.hardware.source),
        mesh=escape(report.mesh_text),
        facts=escape(
            f"{counted(simulation.num_params, 'parameter')}, "
            f"{counted(simulation.num_matrices, 'matrix', 'matrices')}, "
            f"{elements(simulation.num_elements)}, "
            f"{counted(simulation.num_buckets, 'bucket')} of at most "
            f"{quantity(simulation.bucket_bytes, 'B')}"
        ),
        headlines="\n".join(
            f'<div class="headline"><div class="value">{escape(headline.value)}</div>'
            f'<div class="label">{escape(headline.label)}</div>'
            f'<div class="note">{escape(headline.note)}</div></div>'
            for headline in report.headlines()
        ),
        plots="\n".join(_plots(report)),
        scaling=_scaling(report) if report.scaling else "",
        choices="\n".join(_choice(choice) for choice in report.choices),
        strategies="\n".join(
            f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in STRATEGIES.items()
        ),
        plotly=get_plotlyjs(),
    )


def _plots(report: Report) -> list[str]:
    busiest = report.simulation.busiest
    shown = [
        (
            "load",
            "Work on each rank",
            f"The busiest has {report.simulation.imbalance:.2f} times the mean.",
            load_figure(report),
        ),
        (
            "timeline",
            f"Step of rank {busiest.rank}, the busiest",
            "While a bucket is orthogonalized, the next one travels in and the last one back.",
            timeline_figure(report),
        ),
        (
            "traffic",
            f"What rank {busiest.rank} receives",
            "Both ways together, by the mesh axes on which sender and receiver differ.",
            traffic_figure(report),
        ),
    ]
    if report.scaling:
        text = f"The same model with {report.scaling_text}, everything else equal."
        shown.append(("scaling", "More ranks", text, scaling_figure(report)))
    return [_plot(*plot) for plot in shown]


def _plot(name: str, title: str, text: str, figure: go.Figure) -> str:
    body = figure.to_html(
        full_html=False, include_plotlyjs=False, div_id=f"plot-{name}", config=_CONFIG
    )
    return f'<section class="plot"><h2>{escape(title)}</h2><p>{escape(text)}</p>{body}</section>'


def _scaling(report: Report) -> str:
    rows = [(scaling_cells(point), report.is_planned(point)) for point in report.scaling]
    return (
        f'<section class="scaling"><h2>More ranks: {escape(report.scaling_text)}</h2>'
        f"{_table(SCALING_COLUMNS, rows, mark='this plan')}</section>"
    )


def _choice(choice: GroupChoice) -> str:
    mesh = " x ".join(map(str, choice.mesh_shape)) or "1"
    rows = [
        (
            (
                strategy.name,
                duration(strategy.seconds),
                quantity(strategy.flops, "FLOP"),
                quantity(strategy.received_bytes, "B"),
                quantity(strategy.memory_bytes, "B"),
            ),
            i == 0,
        )
        for i, strategy in enumerate(choice.strategies)
    ]
    titles = ("strategy", "time", "operations", "received", "memory")
    shapes = ", ".join(f"{n:,} of {rows} x {cols}" for rows, cols, n in choice.shapes)
    words = " ".join(text for text in (choice.reason, choice.bound, choice.advice) if text)
    return (
        f'<section class="choice"><h3><code>{escape(choice.placements)}</code> on {escape(mesh)}'
        f"</h3><p>{counted(choice.num_params, 'parameter')}, "
        f"{counted(choice.num_matrices, 'matrix', 'matrices')}: "
        f"{escape(shapes)}. {escape(choice.work)}.</p>{_table(titles, rows, mark='chosen')}"
        f"<p>{escape(words)}</p></section>"
    )


def _table(titles: Sequence[str], rows: Sequence[tuple[Sequence[str], bool]], *, mark: str) -> str:
    """Rows of cells; those with True carry a mark."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "\n".join(_row(cells, mark=mark if is_marked else "") for cells, is_marked in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class=scroll>{table}</div>"


def _row(cells: Sequence[str], *, mark: str) -> str:
    first, *rest = map(escape, cells)
    badge = f'<span class="mark">{escape(mark)}</span>' if mark else ""
    body = "".join(f"<td>{cell}</td>" for cell in rest)
    return f"<tr{' class=chosen' if mark else ''}><th>{first}{badge}</th>{body}</tr>"
