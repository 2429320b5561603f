# SPDX-License-Identifier: Apache-2.0
"""Entry point: commands, and errors as one line."""

import os
import sys
from collections.abc import Sequence
from typing import Final

import typer

from hyper_parallel.cli.calibrate_command import calibrate
from hyper_parallel.cli.group_command import group
from hyper_parallel.cli.inspect_command import inspect
from hyper_parallel.cli.plan_command import plan

USAGE_ERROR: Final = 2

app = typer.Typer(
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Muon on sharded models: what a step costs, who works together, what a checkpoint holds.",
    epilog="hyper-parallel COMMAND --help shows the options of a command, with examples.",
)
for command in (plan, group, inspect, calibrate):
    app.command()(command)


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version."),  # noqa: FBT001, FBT003
) -> None:
    """Say what there is if no command is given."""
    if version:
        from hyper_parallel import __version__

        typer.echo(f"hyper-parallel {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: What follows the name of the program; from the process if None.

    Returns:
        0, or 2 after one line on stderr about what has to be corrected.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(_with_json_target(words), prog_name="hyper-parallel", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except (ValueError, OSError) as error:
        return _refuse(str(error))
    except Exception as error:
        # Typer's usage errors; it keeps their class to itself.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return _refuse(message())
    return code if isinstance(code, int) else 0


def _refuse(message: str) -> int:
    typer.echo(f"hyper-parallel: {' '.join(message.split())}", err=True)
    return USAGE_ERROR


def _with_json_target(words: Sequence[str]) -> list[str]:
    """Let ``--json`` stand alone, for standard output; Typer wants a value with every option."""
    told: list[str] = []
    for i, word in enumerate(words):
        told.append(word)
        if word == "--json" and all(
            next_word.startswith("--") for next_word in words[i + 1 : i + 2]
        ):
            told.append("-")
    return told
