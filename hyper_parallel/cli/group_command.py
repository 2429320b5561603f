# SPDX-License-Identifier: Apache-2.0
"""``hyper-parallel group``: which parameters need communication, and with whom."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from hyper_parallel.cli.options import (
    JsonOption,
    MeshOption,
    ModelArgument,
    PlacementOption,
    StageOption,
    ViewOption,
    WorldSizeOption,
    read_model,
    write_text,
)
from hyper_parallel.core.optimizer.layout import ParamLayout
from hyper_parallel.core.optimizer.report import ranks_text, table
from hyper_parallel.models.own_words import OwnParam, in_own_words
from hyper_parallel.models.planning import placed_params


def group(
    model: ModelArgument,
    mesh: MeshOption,
    *,
    world_size: WorldSizeOption = None,
    rank: Annotated[
        int | None, typer.Option(help="Global rank; the first of the stage by default.")
    ] = None,
    stage: StageOption = None,
    placement: PlacementOption = None,
    view: ViewOption = None,
    json_target: JsonOption = None,
) -> None:
    """Group Muon's parameters by the communication that their matrices need.

    A matrix that lies whole on a rank needs none. All others are grouped by mesh, number of dims
    and placements; a replicate group is the ranks that hold the same shard as the rank.

    \b
    Examples:
      hyper-parallel group llama3-8b --mesh dp_replicate=2,dp_shard=4 --rank 2
      hyper-parallel group qwen3-30b-a3b --mesh dp_shard=16,ep=8 --json
    """  # noqa: D301 -- shown by --help; \b keeps the lines of the examples apart
    from hyper_parallel.core.optimizer.param_grouping import group_parameters_by_sharding

    described, parallelism = read_model(
        model, mesh, world_size=world_size, placement=placement, view=view
    )
    at, placed = placed_params(described, parallelism, rank=rank, stage=stage)
    here = at * parallelism.ranks_per_stage if rank is None else rank
    params = in_own_words([p for p in placed if p.param.algorithm == "muon"], here)
    no_comm, groups = group_parameters_by_sharding(params)
    layouts = {p.param.name: p.layout for p in placed}
    if json_target is not None:
        value = {
            "model": described.name,
            "rank": here,
            "no_comm": [_param_json(param, layouts) for param in no_comm],
            "comm_groups": [
                {
                    "params": [_param_json(param, layouts) for param in found.params],
                    "shard_dims": sorted(found.shard_info.shard_dims),
                    "replicate_mesh_dims": found.shard_info.replicate_mesh_dims,
                    "replicate_group": found.replicate_group,
                }
                for found in groups
            ],
        }
        write_text(json_target, json.dumps(value, indent=1))
    if json_target == "-":
        return
    typer.echo(
        f"{described.name} as rank {here} of {parallelism.world_size} sees it: "
        f"{len(no_comm)} parameters without communication, {len(params) - len(no_comm)} in "
        f"{len(groups)} groups\n"
    )
    rows = [("no_comm", "", "", str(len(no_comm)), "")] if no_comm else []
    blocks = [("no_comm", no_comm)] if no_comm else []
    for number, found in enumerate(groups):
        first = found.params[0]
        rows.append(
            (
                f"comm group {number}",
                _mesh_text(first),
                layouts[first.name].placements_text(),
                str(len(found.params)),
                ranks_text(found.replicate_group),
            )
        )
        blocks.append((f"comm group {number}", found.params))
    typer.echo("\n".join(table(("group", "mesh", "placements", "parameters", "replicates"), rows)))
    for title, members in blocks:
        typer.echo(f"\n{title}")
        typer.echo("\n".join(f"  {line}" for line in _names(members)))


def _param_json(param: OwnParam, layouts: dict[str, ParamLayout]) -> dict[str, Any]:
    return {
        "name": param.name,
        "shape": list(param.shape),
        "mesh": dict(zip(param.device_mesh.names, param.device_mesh.mesh_shape, strict=True)),
        "placements": layouts[param.name].placements_text().split(),
    }


def _mesh_text(param: OwnParam) -> str:
    mesh = param.device_mesh
    return ", ".join(f"{n}={s}" for n, s in zip(mesh.names, mesh.mesh_shape, strict=True))


def _names(params: Sequence[OwnParam]) -> Iterable[str]:
    """One line for parameters that differ in their numbers only."""
    alike: dict[tuple[str, tuple[int, ...]], int] = {}
    for param in params:
        key = re.sub(r"(?<=\.)\d+(?=\.)", "*", param.name), param.shape
        alike[key] = alike.get(key, 0) + 1
    for (name, shape), count in alike.items():
        times = f" ({count} of them)" if count > 1 else ""
        yield f"{name} {'x'.join(map(str, shape))}{times}"
