# SPDX-License-Identifier: Apache-2.0
"""``hyper-parallel calibrate``: measure this machine."""

from pathlib import Path
from typing import Annotated

import typer

from hyper_parallel.core.optimizer.hardware import save_hardware
from hyper_parallel.core.optimizer.report import quantity
from hyper_parallel.models.errors import InputError


def calibrate(
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Hardware file to write.")
    ] = Path("hardware.json"),
    ranks: Annotated[
        int | None, typer.Option(help="Ranks of a node; one per GPU, or per core, by default.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long it may take, about; at least 20.")] = 45,
    name: Annotated[str | None, typer.Option(help="What to call it; this machine's name.")] = None,
) -> None:
    """Measure matrix products, memory and exchanges of this machine, for plan --hardware FILE.

    \b
    Examples:
      hyper-parallel calibrate -o laptop.json
      hyper-parallel plan gpt2 --mesh dp_shard=4 --hardware laptop.json
    """  # noqa: D301, DOC501 -- shown by --help; \b keeps the lines of the examples apart
    if not output.parent.is_dir():
        raise InputError(f"{output}: there is no directory {output.parent}")
    from hyper_parallel.calibration.calibrate import calibrate as measure

    hardware = measure(
        ranks,
        budget_s=seconds,
        name=name,
        progress=lambda what, done: typer.echo(f"{done:4.0%}  {what}", err=True),
    )
    save_hardware(hardware, output)
    for dtype, rate in hardware.matrix_rates.items():
        typer.echo(f"{dtype}: up to {quantity(rate.peak_flops_per_s, 'FLOP/s')} a rank")
    typer.echo(f"memory: {quantity(hardware.memory_bytes_per_s, 'B/s')} a rank")
    typer.echo(f"exchange: {quantity(hardware.within_node.bytes_per_s, 'B/s')} a rank")
    typer.echo(f"written to {output}")
