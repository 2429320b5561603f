# SPDX-License-Identifier: Apache-2.0
"""Results as text for a person."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.steps_contenders import CONTENDERS
from benchmarks.steps_profile import PHASES

_HEADER = (
    "",
    "ms",
    "ratio",
    "quartiles",
    "core ms",
    "core ratio",
    "FLOPs, share",
    "received MB",
    "collectives",
    "peak MB",
    "distance",
    "error",
)


def markdown(report: Mapping[str, Any]) -> str:
    """Format a whole report.

    Args:
        report: What ``steps.py`` writes as JSON.

    Returns:
        Markdown, aligned so that it can be read as it is.
    """
    lines = ["# Optimizer steps, beside each other", ""]
    machine, versions = report["machine"], report["versions"]
    lines += [
        f"- {report['date']}, `{report['command']}`",
        f"- {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; "
        f"load average {machine['load_average']} before the run; {report['ranks']} gloo ranks with "
        "one thread each",
        "- " + ", ".join(f"{name} {version}" for name, version in versions.items()),
        "",
        "`ms`: median over rounds of the slowest rank; `ratio`: median over rounds of that, to "
        "`gather and repeat` in the same round, with its quartiles; `core ms` and `core ratio`: "
        "the same for the time that all ranks together spend on cores, which other programs "
        "disturb less. FLOPs on the busiest rank, as "
        "a share of what one process needs for each matrix once; bytes that the rank with most "
        "receives from others; collectives that it takes part in; most new memory alive at once. "
        "Distance of the first displacement from that of one process with whole float32 tensors, "
        "for the parameter that is furthest off.",
        "",
    ]
    for scenario in report["scenarios"]:
        lines += scenario_lines(scenario)
    if report["growth"]:
        lines += _growth_lines(report["growth"])
    if report["profile"]:
        lines += _profile_lines(report["profile"])
    return "\n".join(lines).rstrip() + "\n"


def scenario_lines(scenario: Mapping[str, Any]) -> list[str]:
    """Format one scenario.

    Args:
        scenario: Its part of the report.

    Returns:
        A heading, what is stepped on, and a table.
    """
    mesh = " x ".join(map(str, scenario["mesh"]))
    return [
        f"## {scenario['title']}",
        "",
        f"{scenario['what']}. Mesh {mesh}; {scenario['matrices']} matrices, "
        f"{scenario['whole_bytes'] / 1e6:.2f} MB in bfloat16, "
        f"{scenario['one_process_flops'] / 1e9:.1f} GFLOP. One process in bfloat16 is "
        f"{scenario['one_process_bf16_distance']:.1e} off.",
        "",
        *_table(_HEADER, [_row(result) for result in scenario["contenders"]]),
        "",
    ]


def _row(result: Mapping[str, Any]) -> tuple[str, ...]:
    title = result["title"]
    if result["error"] is not None:
        return (title, *["-"] * 10, f"`{_short(result['error'])}`")
    ratio, quartiles = result["ratio"], result["ratio_quartiles"]
    return (
        title,
        f"{result['ms']:.1f}",
        "-" if ratio is None else f"{ratio:.2f}",
        "-" if ratio is None else f"{quartiles[0]:.2f} to {quartiles[1]:.2f}",
        f"{result['core_ms']:.0f}",
        "-" if ratio is None else f"{result['core_ratio']:.2f}",
        f"{result['flops_share']:.3f}",
        f"{result['received_bytes'] / 1e6:.2f}",
        str(result["collectives"]),
        f"{result['peak_bytes'] / 1e6:.2f}",
        f"{result['distance']:.1e}",
        "",
    )


def _short(error: str) -> str:
    text = error.replace("|", "/").replace("`", "'")
    return text if len(text) <= 160 else text[:157] + "..."


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (cell.ljust(w) for cell, w in zip(cells, widths, strict=True))
        return "| " + " | ".join([first, *rest]) + " |"

    return [line(header), line(["-" * max(3, w) for w in widths]), *map(line, rows)]


def _growth_lines(growth: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    lines = ["## Growth", ""]
    for title, axis, points in (
        ("FSDP, the same work on more ranks", "ranks", growth["ranks"]),
        ("FSDP, more blocks on the same ranks", "blocks", growth["work"]),
    ):
        names = [result["name"] for result in points[0]["contenders"]]
        rows = []
        for name in names:
            results = [
                next(r for r in point["contenders"] if r["name"] == name) for point in points
            ]
            rows.append(
                (CONTENDERS[name].title, *("-" if r["error"] else _growth_cell(r) for r in results))
            )
        header = (f"{title}: {axis}", *(str(point[axis]) for point in points))
        lines += [*_table(header, rows), ""]
    lines += ["Each cell: ms, ratio, share of FLOPs on the busiest rank, MB received.", ""]
    return lines


def _growth_cell(result: Mapping[str, Any]) -> str:
    ratio = "-" if result["ratio"] is None else f"{result['ratio']:.2f}"
    return (
        f"{result['ms']:.0f}, {ratio}, {result['flops_share']:.2f}, "
        f"{result['received_bytes'] / 1e6:.2f}"
    )


def _profile_lines(profiles: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for phase, what in PHASES.items():
        cells = []
        for p in profiles:
            wall, core = p["wall_ms"], p["core_ms"]
            cells.append(f"{wall[phase] / sum(wall.values()):.0%}, {core[phase]:.2f}")
        rows.append((f"{phase}: {what}", *cells))
    rows.append(
        (
            "total: wall ms, ms on a core",
            *(
                f"{sum(p['wall_ms'].values()):.1f}, {sum(p['core_ms'].values()):.2f}"
                for p in profiles
            ),
        )
    )
    rows.append(
        (
            "other threads (gloo): ms on a core",
            *(f"{p['exchange_threads_ms']:.2f}" for p in profiles),
        )
    )
    header = ("a step of ours", *(p["title"] for p in profiles))
    return [
        "## Where a step of ours spends its time",
        "",
        "Mean over ranks. Each cell: share of wall time, and ms that the rank's thread spends on a "
        "core. Where ranks outnumber cores, the wall time of a phase contains that of other ranks.",
        "",
        *_table(header, rows),
        "",
    ]
