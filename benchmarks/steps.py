# SPDX-License-Identifier: Apache-2.0
"""One optimizer step, ours beside every peer that runs here: ``python -m benchmarks.steps``.

Each scenario gives all contenders the same matrices, gradients and mesh. First each of them steps
alone: what it costs is counted, how far it lands from one process is measured, and an error is its
own; one that leaves its ranks apart or hangs costs the others no more than a new start. Then those
that can run take turns, step by step, on the same ranks, so that whatever else the machine does
falls on all of them alike.
"""

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import torch
from typing_extensions import override

from benchmarks.steps_contenders import CONTENDERS
from benchmarks.steps_measure import Say, measure, profiled
from benchmarks.steps_ranks import WARM_UP
from benchmarks.steps_report import markdown, scenario_lines
from benchmarks.steps_work import NEED_PAIRS, SCENARIOS, Job

SCHEMA = 1
_GROWTH_RANKS = (1, 2, 4, 8)
_GROWTH_BLOCKS = (1, 2, 4, 8, 16)
_GROWTH_ROUNDS = 7
_GROWTH_PEERS = ("ours", "gather", "gather-bf16")  # quick to start at every size


class _Parser(argparse.ArgumentParser):
    """A parser whose complaint is one line."""

    @override
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the command line.

    Args:
        argv: Arguments without the program's name. None takes ``sys.argv``.

    Returns:
        The report, as it is written to ``steps.json``.
    """
    arguments = _parse(argv)
    words = sys.argv[1:] if argv is None else list(argv)
    say: Say = (lambda _: None) if arguments.quiet else _say
    report = _report_head(arguments, shlex.join(["python", "-m", "benchmarks.steps", *words]))
    for name in arguments.scenario:
        job = Job(name, arguments.ranks, arguments.size, eager=arguments.eager)
        scenario = measure(job, arguments.peer, arguments.rounds, say)
        report["scenarios"].append(scenario)
        if not arguments.json:
            print("\n".join(scenario_lines(scenario)), flush=True)
        if arguments.profile:
            report["profile"].append(profiled(job, say))
        _write(report, arguments.output, with_picture=False)  # what is there, is there
    if arguments.growth:
        report["growth"] = _growth(arguments, say)
    if arguments.json:
        print(json.dumps(report, indent=1))
    elif arguments.growth or arguments.profile:
        print(markdown({**report, "scenarios": []}))
    _write(report, arguments.output, with_picture=not arguments.no_picture)
    return report


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="steps.py",
        description="Compare one optimizer step of hyper_parallel with those of its peers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--scenario",
        action="append",
        choices=list(SCENARIOS),
        help="what is stepped on; may be repeated; all if not given",
    )
    add(
        "--peer",
        action="append",
        choices=list(CONTENDERS),
        help="who takes part; may be repeated; all if not given. Ratios need 'gather'",
    )
    add("--ranks", type=int, default=4, help="gloo processes, one thread each")
    add("--rounds", type=int, default=15, help="timed steps of each contender")
    add("--size", type=int, default=256, help="width d that all shapes derive from")
    add("--growth", action="store_true", help="also: ranks 1 to 8, and work x 1 to x 16")
    add("--profile", action="store_true", help="also: where a step of ours spends its time")
    add("--eager", action="store_true", help="without torch.compile, also for peers that use it")
    add("--output", type=Path, help="folder for steps.md, steps.json and the pictures")
    add("--no-picture", action="store_true", help="draw nothing")
    add("--json", action="store_true", help="print JSON in place of tables")
    add("--quiet", action="store_true", help="say nothing on the way")
    arguments = parser.parse_args(argv)
    arguments.scenario = list(dict.fromkeys(arguments.scenario or SCENARIOS))
    arguments.peer = list(dict.fromkeys(arguments.peer or CONTENDERS))
    for name, least in (("ranks", 1), ("rounds", 1), ("size", 8)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(arguments, name)}")
    if arguments.ranks % 2 and set(arguments.scenario) & set(NEED_PAIRS):
        parser.error(f"{', '.join(NEED_PAIRS)} need an even --ranks, got {arguments.ranks}")
    return arguments


def _growth(arguments: argparse.Namespace, say: Say) -> dict[str, Any]:
    rounds = min(arguments.rounds, _GROWTH_ROUNDS)
    size = arguments.size
    peers = [name for name in arguments.peer if name in _GROWTH_PEERS]
    return {
        "ranks": [measure(Job("fsdp", ranks, size), peers, rounds, say) for ranks in _GROWTH_RANKS],
        "work": [
            measure(Job("fsdp", arguments.ranks, size, blocks), peers, rounds, say)
            for blocks in _GROWTH_BLOCKS
        ],
    }


def _report_head(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    versions = {c.package: c.version() for c in CONTENDERS.values()}
    return {
        "schema": SCHEMA,
        "command": command,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "system": f"{platform.system()} {platform.machine()}",
            "load_average": round(os.getloadavg()[0], 1),
        },
        "versions": {"python": platform.python_version(), **versions, "torch": torch.__version__},
        "ranks": arguments.ranks,
        "rounds": arguments.rounds,
        "warm_up": WARM_UP,
        "size": arguments.size,
        "scenarios": [],
        "growth": None,
        "profile": [],
    }


def _cpu() -> str:
    """Name of the processor, and what decides the rate of bfloat16 products on it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (ln.partition(":") for ln in lines)}
    flags = facts.get("flags", "").split()
    units = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return " ".join([facts.get("model name", platform.processor() or "CPU"), *units])


def _write(report: dict[str, Any], folder: Path | None, *, with_picture: bool) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "steps.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "steps.md").write_text(markdown(report))
    if not with_picture:
        return
    from benchmarks.steps_picture import draw_growth, draw_scenarios  # matplotlib is an extra

    draw_scenarios(report, folder / "steps.png")
    if report["growth"]:
        draw_growth(report, folder / "steps_growth.png")


def _say(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
