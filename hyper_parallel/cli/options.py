# SPDX-License-Identifier: Apache-2.0
"""Arguments that more than one command takes, and what they are read into."""

import sys
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from hyper_parallel.core.optimizer.coefficients import PRESETS, Coefficients
from hyper_parallel.models.errors import InputError, unknown
from hyper_parallel.models.mesh_axes import Parallelism, parse_mesh
from hyper_parallel.models.model_param import Model
from hyper_parallel.models.overrides import override
from hyper_parallel.models.sources import load_model

ModelArgument: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A preset (llama3-8b, qwen3-30b-a3b, deepseek-v3, kimi-k2, gpt2, ...), a Hugging Face "
        "config.json, a JSON list of names, shapes and placements, or module:function that "
        "returns a torch.nn.Module.",
    ),
]
MeshOption: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="AXIS=SIZE,...",
        help="Sizes of pp, dp_replicate, dp_shard, cp, tp (their product is the number of ranks) "
        "and ep (which divides dp_shard * cp * tp).",
    ),
]
WorldSizeOption: TypeAlias = Annotated[
    int | None, typer.Option(help="What the sizes must multiply to.")
]
StageOption: TypeAlias = Annotated[
    int | None, typer.Option(help="Pipeline stage; the one with the most work by default.")
]
PlacementOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN=AXIS:P,...",
        help="Placements of the parameters that a glob matches: R, S(dim) or S(dim/split_factor) "
        "by axis. May be repeated; later ones win.",
    ),
]
ViewOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN=VIEW",
        help="What a matrix is: flatten, heads:N, split:rows,rows,... or none. May be repeated.",
    ),
]
JsonOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--json", metavar="[FILE]", help="JSON, to a file or to standard output."),
]


def read_model(
    model: str,
    mesh: str,
    *,
    world_size: int | None,
    placement: list[str] | None,
    view: list[str] | None,
) -> tuple[Model, Parallelism]:
    """The model and the axes that options describe.

    Args:
        model: See ``ModelArgument``.
        mesh: See ``MeshOption``.
        world_size: See ``WorldSizeOption``.
        placement: See ``PlacementOption``.
        view: See ``ViewOption``.

    Returns:
        Both.

    Raises:
        InputError: If one of them cannot be read.
    """
    parallelism = parse_mesh(mesh, world_size)  # first: it is cheap, a model may not be
    return override(load_model(model), placement or [], view or []), parallelism


def read_rank(text: str) -> int | None:
    """A rank, or None for the busiest."""
    if text == "busiest":
        return None
    if not text.isdecimal():
        raise InputError(f"--rank must be a global rank or 'busiest', got {text!r}")
    return int(text)


def read_coefficients(text: str | None) -> Coefficients:
    """Newton-Schulz coefficients: a preset's name or three numbers.

    Args:
        text: The option; torch's own triple if None.

    Returns:
        What ``Muon(ns_coefficients=...)`` takes.

    Raises:
        InputError: If it is neither.
    """
    if text is None:
        return (3.4445, -4.7750, 2.0315)
    if text in PRESETS:
        return text
    if "," not in text:
        raise InputError(
            unknown("--ns-coefficients", text, PRESETS, hint="(or three numbers: a,b,c)")
        )
    try:
        a, b, c = (float(number) for number in text.split(","))
    except ValueError:
        raise InputError(f"--ns-coefficients: expected a,b,c, got {text!r}") from None
    return (a, b, c)


def choice(option: str, given: str, known: tuple[str, ...]) -> str:
    """One of a few words.

    Args:
        option: Name of the option.
        given: What was given.
        known: The words.

    Returns:
        The word.

    Raises:
        InputError: If it is none of them.
    """
    if given not in known:
        raise InputError(unknown(option, given, known))
    return given


def write_text(target: str, text: str) -> None:
    """Write to a file, or to standard output if the target is ``-``."""
    if target == "-":
        sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
        return
    Path(target).write_text(text, encoding="utf-8")
