# SPDX-License-Identifier: Apache-2.0
"""``hyper-parallel plan``: what a step will cost."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hyper_parallel.cli.options import (
    JsonOption,
    MeshOption,
    ModelArgument,
    PlacementOption,
    StageOption,
    ViewOption,
    WorldSizeOption,
    choice,
    read_coefficients,
    read_model,
    read_rank,
    write_text,
)
from hyper_parallel.core.optimizer.cost_model import ITEMSIZE
from hyper_parallel.core.optimizer.forms import ALL_METHODS
from hyper_parallel.core.optimizer.hardware import Hardware, load_hardware
from hyper_parallel.core.optimizer.hardware_presets import PRESETS
from hyper_parallel.core.optimizer.planner import REPLICA_ROUTES
from hyper_parallel.core.optimizer.report import quantity
from hyper_parallel.core.optimizer.simulation import simulate
from hyper_parallel.models.errors import InputError, unknown
from hyper_parallel.models.planning import (
    PlannedModel,
    PlanSettings,
    data_parallel_axis,
    plan_model,
)
from hyper_parallel.reports.json_file import to_json
from hyper_parallel.reports.report import Report, build_report
from hyper_parallel.reports.terminal import print_report


def plan(  # noqa: PLR0913 -- its arguments are the options
    model: ModelArgument,
    mesh: MeshOption,
    *,
    world_size: WorldSizeOption = None,
    rank: Annotated[str, typer.Option(help="Global rank whose step is told.")] = "busiest",
    stage: StageOption = None,
    placement: PlacementOption = None,
    view: ViewOption = None,
    hardware: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="A preset (a100, h100, h200, b200, mi300x, ascend910b, cpu) or a file that "
            "calibrate wrote.",
        ),
    ] = "h100",
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Compare the strategies of each group, and other sizes."),
    ] = False,
    bucket_mb: Annotated[float, typer.Option(help="Most MiB of one bucket on a rank.")] = 64,
    share_replicas: Annotated[
        str, typer.Option(help="Whether replicas split the work: auto, true or false.")
    ] = "auto",
    shard_momentum: Annotated[
        bool, typer.Option("--shard-momentum", help="Keep momentum once over the replicas.")
    ] = False,
    replica_route: Annotated[
        str, typer.Option(help="How updates reach other replicas: auto, direct or staged.")
    ] = "auto",
    ns_method: Annotated[
        str, typer.Option(help="auto, standard, gram or standard+quack.")
    ] = "auto",
    ns_coefficients: Annotated[
        str | None, typer.Option(help="A preset's name, or a,b,c; torch's by default.")
    ] = None,
    ns_dtype: Annotated[
        str, typer.Option(help="Dtype of the iteration, and on the wire.")
    ] = "bfloat16",
    steps: Annotated[int, typer.Option(help="Newton-Schulz steps.")] = 5,
    json_target: JsonOption = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A page with plots that needs no network.")
    ] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="A picture for slides.")] = None,
) -> None:
    """Plan one optimizer step of a model on any number of ranks, without a GPU.

    The plan is the one that Muon itself would make. FSDP shards over dp_shard (and cp), HSDP
    replicates over dp_replicate, tp cuts projections by their names, ep shares out experts, and pp
    cuts the layers into stages, of which one is planned.

    \b
    Examples:
      hyper-parallel plan llama3-8b --mesh dp_shard=64
      hyper-parallel plan qwen3-32b --mesh dp_replicate=4,dp_shard=64 --hardware h200 --compare
      hyper-parallel plan llama3-405b --mesh dp_replicate=16,dp_shard=128,tp=8 --world-size 16384
      hyper-parallel plan deepseek-v3 --mesh pp=8,dp_shard=256,ep=64 --stage 3
      hyper-parallel plan ./config.json --mesh dp_shard=8,tp=2 --view '*.qkv_proj.weight=heads:96'
      hyper-parallel plan shapes.json --mesh dp_shard=8 --placement '*.router=dp_shard:R' --json
      hyper-parallel plan llama3-70b --mesh dp_shard=64,tp=8 --html plan.html --png plan.png
    """  # noqa: D301, DOC501 -- shown by --help; \b keeps the lines of the examples apart
    machine = _hardware(hardware)
    settings = PlanSettings(
        ns_coefficients=read_coefficients(ns_coefficients),
        ns_steps=steps,
        ns_method=choice("--ns-method", ns_method, ALL_METHODS),
        ns_dtype=choice("--ns-dtype", ns_dtype, tuple(ITEMSIZE)),
        share_replicas=_share_replicas(share_replicas),
        shard_momentum=shard_momentum,
        replica_route=choice("--replica-route", replica_route, REPLICA_ROUTES),
        bucket_bytes=_bucket_bytes(bucket_mb),
        device_type=machine.device_type,
    )
    for target in (html, png, None if json_target in (None, "-") else Path(str(json_target))):
        if target is not None and not target.parent.is_dir():
            raise InputError(f"{target}: there is no directory {target.parent}")
    described, parallelism = read_model(
        model, mesh, world_size=world_size, placement=placement, view=view
    )
    planned = plan_model(described, parallelism, settings, rank=read_rank(rank), stage=stage)
    drawn = html is not None or png is not None
    report = _report(
        planned, machine, settings, with_choices=compare or drawn or json_target is not None
    )
    _write(report, json_target, html, png)
    if json_target != "-":
        typer.echo(summary(planned))
        if rank != "busiest":
            typer.echo(f"{planned.plan}\n")
        print_report(report if compare else replace(report, choices=(), scaling=()))


def _report(
    planned: PlannedModel, machine: Hardware, settings: PlanSettings, *, with_choices: bool
) -> Report:
    mesh = planned.parallelism.dense_mesh(planned.stage)
    if with_choices:
        return build_report(
            planned.plan,
            machine,
            title=planned.model.name,
            axis_names=mesh.names,
            mesh=mesh.layout,
            axis=data_parallel_axis(planned, settings),
        )
    return Report(
        title=planned.model.name,
        hardware=machine,
        simulation=simulate(planned.plan, machine, axis_names=mesh.names, mesh=mesh.layout),
        choices=(),
        scaling=(),
    )


def _write(report: Report, json_target: str | None, html: Path | None, png: Path | None) -> None:
    if json_target is not None:
        write_text(json_target, to_json(report))
    try:
        if html is not None:
            from hyper_parallel.reports.html import write_html

            write_html(report, html)
        if png is not None:
            from hyper_parallel.reports.png import write_png

            write_png(report, png)
    except ImportError as error:
        raise InputError(
            f"pages and pictures need {error.name}: pip install 'hyper-parallel[plan]'"
        ) from None


def _hardware(given: str) -> Hardware:
    path = Path(given)
    if path.suffix == ".json" or path.exists():
        if path.is_dir():
            raise InputError(f"--hardware: {path} is a directory, not a hardware file")
        return load_hardware(path)
    if given not in PRESETS:
        raise InputError(
            unknown("hardware", given, PRESETS, hint="(or give a file from calibrate)")
        )
    return PRESETS[given]


def summary(planned: PlannedModel) -> str:
    """What was planned, in a line or two.

    Args:
        planned: The plan.

    Returns:
        Model, mesh, stage and shares of the two algorithms.
    """
    of_muon = sum(p.param.numel for p in planned.placed if p.param.algorithm == "muon")
    others = sum(p.param.numel for p in planned.placed) - of_muon
    axes = ", ".join(f"{axis}={size}" for axis, size in planned.parallelism.given)
    num_stages = planned.parallelism.size("pp")
    at = f", stage {planned.stage} of {num_stages}" if num_stages > 1 else ""
    return (
        f"{planned.model.name}: {quantity(planned.model.numel, '').strip()} parameters, from "
        f"{planned.model.source}\n"
        f"{axes}: {planned.parallelism.world_size} ranks{at}; "
        f"Muon {quantity(of_muon, '').strip()}, AdamW {quantity(others, '').strip()}\n"
    )


def _share_replicas(text: str) -> bool | str:
    choice("--share-replicas", text, ("auto", "true", "false"))
    return "auto" if text == "auto" else text == "true"


def _bucket_bytes(mebibytes: float) -> int:
    if not 0 < mebibytes < 1e9:
        raise InputError(f"--bucket-mb must be positive, got {mebibytes:g}")
    return max(1, int(mebibytes * 2**20))
