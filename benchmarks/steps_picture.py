# SPDX-License-Identifier: Apache-2.0
"""Results as pictures."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib import ticker

from benchmarks.steps_contenders import CONTENDERS

_COLORS = {
    "ours": "#0b6e4f",
    "ours-small": "#5bb89a",
    "gather": "#9b9b9b",
    "gather-bf16": "#4f4f4f",
    "torch": "#d9822b",
    "muon-fsdp2": "#7a4fb5",
    "muonium": "#c03a4b",
}
_MARKERS = {
    "ours": "o",
    "ours-small": "o",
    "gather": "s",
    "gather-bf16": "D",
    "torch": "^",
    "muon-fsdp2": "v",
    "muonium": "P",
}

_PANELS: list[tuple[str, Callable[[Mapping[str, Any], Mapping[str, Any]], float | None]]] = [
    ("time by the clock, of gather and repeat", lambda _, r: r["ratio"]),
    ("time of all ranks on cores, of gather and repeat", lambda _, r: r["core_ratio"]),
    ("FLOPs on the busiest rank, of one process", lambda _, r: r["flops_share"]),
    (
        "received per rank, of all matrices in bfloat16",
        lambda s, r: r["received_bytes"] / s["whole_bytes"],
    ),
    ("collectives a step", lambda _, r: r["collectives"]),
    (
        "peak extra memory, of all matrices in bfloat16",
        lambda s, r: r["peak_bytes"] / s["whole_bytes"],
    ),
    ("distance from one process in float32", lambda _, r: r["distance"]),
]


def draw_scenarios(report: Mapping[str, Any], path: Path) -> None:
    """Draw one panel per metric, with the scenarios along it.

    Args:
        report: What ``steps.py`` writes as JSON.
        path: PNG file to write.
    """
    scenarios = report["scenarios"]
    names = [r["name"] for r in scenarios[0]["contenders"]]
    ran = {r["name"] for s in scenarios for r in s["contenders"] if not r["error"]}
    figure, axes = plt.subplots(4, 2, figsize=(13, 15), sharex=True)
    axes.flat[-1].axis("off")
    for axis, (title, value) in zip(axes.flat, _PANELS, strict=False):
        for offset, name in enumerate(names):
            places, values = [], []
            for number, scenario in enumerate(scenarios):
                result = scenario["contenders"][offset]
                shown = None if result["error"] else value(scenario, result)
                if shown:  # zero has no place on this axis
                    places.append(number + (offset - (len(names) - 1) / 2) * 0.12)
                    values.append(shown)
            if name in ran:
                title_of = CONTENDERS[name].title
                axis.plot(places, values, linestyle="", label=title_of, **_style(name))
        axis.set_title(title, fontsize=11, loc="left")
        axis.set_yscale("log")
        _plain_ticks(axis)
        axis.grid(axis="y", which="both", color="#e6e6e6", linewidth=0.6)
        for edge in range(len(scenarios) - 1):
            axis.axvline(edge + 0.5, color="#eeeeee", linewidth=0.8)
        axis.set_xticks(range(len(scenarios)), [s["title"].replace(", ", ",\n") for s in scenarios])
        axis.tick_params(axis="x", rotation=30, labelbottom=True)
    _finish(figure, report, f"One optimizer step on {report['ranks']} ranks (less is better)")
    _save(figure, axes.flat[0], path)


def draw_growth(report: Mapping[str, Any], path: Path) -> None:
    """Draw time, operations and bytes against ranks, and time against work.

    Args:
        report: What ``steps.py`` writes as JSON.
        path: PNG file to write.
    """
    growth = report["growth"]
    figure, axes = plt.subplots(2, 2, figsize=(12, 9))
    panels: list[tuple[str, str, str, Callable[[Mapping[str, Any]], float]]] = [
        ("ms a step, the same work", "ranks", "ranks", lambda r: r["ms"]),
        ("ms a step, the same ranks", "work", "blocks", lambda r: r["ms"]),
        (
            "FLOPs on the busiest rank, of one process",
            "ranks",
            "ranks",
            lambda r: r["flops_share"],
        ),
        ("MB received per rank", "ranks", "ranks", lambda r: r["received_bytes"] / 1e6),
    ]
    for axis, (title, curve, along, value) in zip(axes.flat, panels, strict=True):
        points: Sequence[Mapping[str, Any]] = growth[curve]
        for number, result in enumerate(points[0]["contenders"]):
            name = result["name"]
            shown = [
                (point[along], value(point["contenders"][number]))
                for point in points
                if point["contenders"][number]["error"] is None
            ]
            shown = [(x, y) for x, y in shown if y]
            if shown:
                axis.plot(*zip(*shown, strict=True), label=CONTENDERS[name].title, **_style(name))
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks([point[along] for point in points], [str(p[along]) for p in points])
        _plain_ticks(axis)
        axis.set_xlabel("ranks" if along == "ranks" else "transformer blocks")
        axis.set_title(title, fontsize=11, loc="left")
        axis.grid(which="both", color="#e6e6e6", linewidth=0.6)
    cores = report["machine"]["cores"]
    _finish(figure, report, f"Growth of one FSDP step ({cores} cores for all ranks)")
    _save(figure, axes.flat[1], path)


def _plain_ticks(axis: Any) -> None:
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(ticker.NullLocator())


def _style(name: str) -> dict[str, Any]:
    return {
        "color": _COLORS[name],
        "marker": _MARKERS[name],
        "markersize": 8 if name == "ours" else 6,
        "zorder": 3 if name == "ours" else 2,
    }


def _finish(figure: Any, report: Mapping[str, Any], title: str) -> None:
    machine = report["machine"]
    figure.suptitle(title, fontsize=14, x=0.01, ha="left")
    note = f"{report['date']}, {machine['cpu']}, torch {report['versions']['torch']}"
    figure.text(0.01, 0.005, note, fontsize=8, color="#777777")


def _save(figure: Any, axis: Any, path: Path) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.0, 0.972),
        ncols=len(labels),
        frameon=False,
        fontsize=10,
    )
    figure.tight_layout(rect=(0, 0.02, 1, 0.94))
    figure.savefig(path, dpi=120)
    plt.close(figure)
