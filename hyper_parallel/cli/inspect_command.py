# SPDX-License-Identifier: Apache-2.0
"""``hyper-parallel inspect``: what optimizer state a checkpoint holds."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hyper_parallel.cli.checkpoint import CheckpointSummary, StoredTensor, read_checkpoint
from hyper_parallel.cli.options import JsonOption, write_text
from hyper_parallel.core.optimizer.report import quantity, table


def inspect(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="Folder that torch.distributed.checkpoint.save wrote."
        ),
    ],
    *,
    json_target: JsonOption = None,
) -> None:
    """Show the optimizer state that a distributed checkpoint holds. Only its metadata is read.

    \b
    Examples:
      hyper-parallel inspect runs/demo/checkpoints/step_00000200
      hyper-parallel inspect runs/demo/checkpoints/step_00000200 --json state.json
    """  # noqa: D301 -- shown by --help; \b keeps the lines of the examples apart
    summary = read_checkpoint(checkpoint)
    if json_target is not None:
        write_text(json_target, json.dumps(as_json(summary), indent=1))
    if json_target != "-":
        typer.echo("\n".join(as_text(summary)))


def as_json(summary: CheckpointSummary) -> dict[str, Any]:
    """What a checkpoint holds, as plain values.

    Args:
        summary: What was read.

    Returns:
        State and settings by parameter, weights, totals and what is missing.
    """
    return {
        "path": str(summary.path),
        "state": {
            param: {kind: asdict(tensor) for kind, tensor in kinds.items()}
            for param, kinds in summary.state.items()
        },
        "hyperparameters": summary.options,
        "weights": {name: asdict(tensor) for name, tensor in summary.weights.items()},
        "bytes_by_kind": {kind: _nbytes(found) for kind, found in _by_kind(summary).items()},
        "missing_momentum": summary.missing_momentum,
        "weights_without_state": summary.stateless_weights,
    }


def as_text(summary: CheckpointSummary) -> Iterable[str]:
    """What a checkpoint holds, for a person.

    Args:
        summary: What was read.

    Yields:
        Lines.
    """
    yield f"{summary.path}: {len(summary.state)} parameters with optimizer state"
    yield ""
    kinds = _by_kind(summary)
    rows = [
        (kind, str(len(found)), ", ".join(sorted({t.dtype for t in found})), _size(found))
        for kind, found in kinds.items()
    ]
    rows.append(
        ("weights and others", str(len(summary.weights)), "", _size(summary.weights.values()))
    )
    yield from table(("kind", "tensors", "dtype", "bytes"), rows)
    if summary.state:
        yield ""
        yield from table(
            ("parameter", "state", "shape", "dtype", "chunks", "bytes"),
            [
                (
                    param,
                    kind,
                    "x".join(map(str, tensor.shape)) or "scalar",
                    tensor.dtype,
                    str(tensor.num_chunks),
                    quantity(tensor.nbytes, "B"),
                )
                for param, found in summary.state.items()
                for kind, tensor in found.items()
                if kind != "step"
            ],
        )
    yield ""
    yield from _hyperparameters(summary)
    yield from _missing("without momentum, though in a group of Muon", summary.missing_momentum)
    yield from _missing("weights without optimizer state", summary.stateless_weights)


def _by_kind(summary: CheckpointSummary) -> dict[str, list[StoredTensor]]:
    kinds: dict[str, list[StoredTensor]] = defaultdict(list)
    for found in summary.state.values():
        for kind, tensor in found.items():
            kinds[kind].append(tensor)
    return dict(sorted(kinds.items()))


def _hyperparameters(summary: CheckpointSummary) -> Iterable[str]:
    sets: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for owner, keys in summary.options.items():
        sets[tuple(keys)].append(owner)
    if not sets:
        yield "hyperparameters: none stored"
    for names, owners in sets.items():
        shown = ", ".join(owners[:3]) + (f", ... ({len(owners)})" if len(owners) > 3 else "")
        yield f"hyperparameters stored for {shown}: {', '.join(names)}"


def _missing(what: str, names: Sequence[str]) -> Iterable[str]:
    if names:
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        yield f"{what}: {len(names)}: {shown}"


def _nbytes(found: Iterable[StoredTensor]) -> int:
    return sum(tensor.nbytes for tensor in found)


def _size(found: Iterable[StoredTensor]) -> str:
    return quantity(_nbytes(found), "B")
