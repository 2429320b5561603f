# SPDX-License-Identifier: Apache-2.0
"""Command line of the training example. Imports no torch: a wrong option is told at once."""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import override

MESH_AXES = ("dp_replicate", "dp_shard")
_PER_START = {
    "run_dir",
    "resume",
    "auto_resume",
    "timeout",
    "mesh",
}  # may differ when a run is resumed


class OptionParser(argparse.ArgumentParser):
    """A parser that raises on a wrong option, so that one place decides how to end."""

    @override
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to train and how. One field an option of the command line, same name, same unit.

    Attributes:
        auto_resume: Continue ``run_dir`` if it has a checkpoint, else start.
        timeout: Seconds that a rank waits for another.
        mesh: Size of each mesh axis by name, in the order of ``MESH_AXES``.
        batch: Sequences a step, over all ranks.
    """

    optimizer: str
    data: Path | None
    run_dir: Path
    resume: bool
    auto_resume: bool
    timeout: int
    mesh: dict[str, int]
    width: int
    layers: int
    heads: int
    context: int
    steps: int
    warmup: int
    batch: int
    lr: float
    adamw_lr: float
    weight_decay: float
    clip: float
    dropout: float
    ns_dtype: str
    seed: int
    eval_every: int
    eval_batches: int
    log_every: int
    checkpoint_every: int
    prompt: str
    sample_bytes: int


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every run of a comparison has in common.

    Args:
        parser: Receives the options, in named groups.
    """
    group = parser.add_argument_group("data and model")
    group.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="folder of text files, read as bytes (default: the Python standard library's source)",
    )
    _add_int(group, "--width", 256, "features of the residual stream")
    _add_int(group, "--layers", 4, "transformer blocks")
    _add_int(group, "--heads", 4, "attention heads per block; divides the width")
    _add_int(group, "--context", 128, "bytes a sequence")

    group = parser.add_argument_group("training")
    _add_int(group, "--steps", 200, "optimizer steps")
    _add_int(group, "--warmup", 20, "steps of linear warm-up, before the cosine", least=0)
    _add_int(group, "--batch", 16, "sequences a step, over all processes together")
    # Each is the best of its own sweep at the default sizes: Muon 3e-3 to 2e-2, AdamW 7e-4 to 1e-2.
    _add_float(group, "--lr", 1e-2, "peak learning rate of Muon, for hidden matrices")
    _add_float(group, "--adamw-lr", 1e-3, "peak learning rate of AdamW, for all it trains")
    _add_float(group, "--weight-decay", 0.1, "decay of matrices per unit of learning rate")
    _add_float(group, "--clip", 1.0, "largest norm of the whole gradient")
    group.add_argument(
        "--dropout",
        type=_share,
        default=0.0,
        metavar="X",
        help="share of each block's output that is dropped; its draws depend on seed, step and "
        "rank alone (default: %(default)s)",
    )
    group.add_argument(
        "--ns-dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="precision in which Muon orthogonalizes (default: %(default)s)",
    )
    _add_int(group, "--seed", 0, "seed of weights, batch order and samples", least=0)

    group = parser.add_argument_group("parallelism")
    group.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help="processes per mesh axis, of dp_replicate and dp_shard, such as "
        "dp_replicate=2,dp_shard=4; their product is the number of processes "
        "(default: dp_shard over all of them)",
    )
    _add_int(group, "--timeout", 1800, "seconds a process waits for another before it gives up")

    group = parser.add_argument_group("output")
    _add_int(group, "--eval-every", 25, "steps between validations")
    _add_int(group, "--eval-batches", 8, "batches a validation; always the same ones")
    _add_int(group, "--log-every", 10, "steps between lines when stdout is not a terminal")
    _add_int(group, "--checkpoint-every", 100, "steps between checkpoints; 0 is never", least=0)
    group.add_argument(
        "--prompt", default="def ", metavar="TEXT", help="start of the samples (default: 'def ')"
    )
    _add_int(group, "--sample-bytes", 160, "length of a sample, in bytes; 0 is none", least=0)


def parse_train_options(argv: Sequence[str] | None, *, world_size: int) -> Options:
    """Parse and check the command line of one training run.

    With ``--resume``, or ``--auto-resume`` where there is a run, the options of the run so far are
    the defaults: none need be repeated.

    Args:
        argv: Arguments without the program's name. None takes ``sys.argv``.
        world_size: Number of processes of this run.

    Returns:
        Options that fit each other and ``world_size``.

    Raises:
        ValueError: Naming the option, what it was, and the way out.
    """
    parser = OptionParser(
        usage="%(prog)s [options]",
        description="Train a small byte-level GPT with fully_shard, by Muon or AdamW.",
        epilog="one process: python examples/train_gpt.py; "
        "several: torchrun --nproc-per-node 2 examples/train_gpt.py; "
        "through any failure: torchrun --nproc-per-node 2 --max-restarts 10 "
        "examples/train_gpt.py --auto-resume",
    )
    parser.add_argument(
        "--optimizer",
        choices=("muon", "adamw"),
        default="muon",
        help="muon: Muon for hidden matrices, AdamW for the rest; adamw: AdamW for all "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="FOLDER",
        help="where all results go (default: runs/OPTIMIZER)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue --run-dir from its newest checkpoint"
    )
    parser.add_argument(
        "--auto-resume",
        action="store_true",
        help="continue --run-dir from its newest complete checkpoint, or start if it has none: the "
        "same command starts a run, restarts it after a crash at any moment, and moves it to "
        "another number of processes; weights, optimizer, schedule, batches and random draws go "
        "on as if nothing had happened, and at most --checkpoint-every steps are done again",
    )
    add_training_arguments(parser)
    arguments = parser.parse_args(argv)
    run_dir: Path = arguments.run_dir or Path("runs") / arguments.optimizer
    if arguments.resume or (arguments.auto_resume and _options_path(run_dir).is_file()):
        parser.set_defaults(**read_options(run_dir))
        arguments = parser.parse_args(argv)
    arguments.run_dir = run_dir
    return check_options(arguments, world_size=world_size)


def check_options(arguments: argparse.Namespace, *, world_size: int) -> Options:
    """Turn parsed arguments into options, or say what is wrong with them.

    Args:
        arguments: What the parser gave, with ``optimizer``, ``resume`` and ``run_dir`` set.
        world_size: Number of processes of a training run.

    Returns:
        Options that fit each other and ``world_size``.

    Raises:
        ValueError: Naming the option, what it was, and the way out.
    """
    mesh = _parse_mesh(arguments.mesh, world_size=world_size)
    options = Options(**{**vars(arguments), "mesh": mesh})
    if options.batch % world_size:
        raise ValueError(
            f"--batch {options.batch} cannot be shared equally by {world_size} processes; "
            f"pass a multiple of {world_size}"
        )
    if options.width % options.heads:
        raise ValueError(f"--width {options.width} is not a multiple of --heads {options.heads}")
    if options.warmup >= options.steps:
        raise ValueError(f"--warmup {options.warmup} must be less than --steps {options.steps}")
    if not options.prompt:
        raise ValueError("--prompt is empty; pass at least one character")
    continues = options.resume or options.auto_resume
    if not continues and (options.run_dir / "metrics.jsonl").exists():
        raise ValueError(
            f"--run-dir {options.run_dir} holds a run already; "
            "continue it with --resume, or pass another folder"
        )
    return options


def write_options(options: Options) -> None:
    """Keep the options in the run's folder, for ``--resume``.

    Args:
        options: Written to ``options.json``, without what may change between two starts.
    """
    kept = {name: value for name, value in asdict(options).items() if name not in _PER_START}
    text = json.dumps(kept, default=str, indent=2)
    path = _options_path(options.run_dir)
    draft = path.with_suffix(
        ".draft"
    )  # a run may end at any moment: the file is whole, or not there
    draft.write_text(text + "\n")
    draft.replace(path)


def read_options(run_dir: Path) -> dict[str, Any]:
    """Read back what :func:`write_options` wrote.

    Args:
        run_dir: Folder of the run.

    Returns:
        Values by option name.

    Raises:
        ValueError: If the folder holds no run.
    """
    path = _options_path(run_dir)
    if not path.is_file():
        raise ValueError(f"--resume: no run in {run_dir}; pass its --run-dir, or drop --resume")
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def _options_path(run_dir: Path) -> Path:
    return run_dir / "options.json"


def _parse_mesh(text: str | None, *, world_size: int) -> dict[str, int]:
    if text is None:
        return {"dp_shard": world_size}
    mesh = {}
    for item in text.split(","):
        axis, _, size = item.partition("=")
        if axis not in MESH_AXES or axis in mesh or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"--mesh {text}: expected AXIS=N with AXIS one of {', '.join(MESH_AXES)}, each "
                f"once, and N at least 1; got {item!r}"
            )
        mesh[axis] = int(size)
    if math.prod(mesh.values()) != world_size:
        raise ValueError(
            f"--mesh {text}: the product of its sizes is {math.prod(mesh.values())}, but this run "
            f"has {world_size} processes (WORLD_SIZE); start {math.prod(mesh.values())}, or pass "
            f"sizes whose product is {world_size}"
        )
    return {axis: mesh[axis] for axis in MESH_AXES if axis in mesh}


def whole_number(*, least: int) -> Callable[[str], int]:
    """Make the type of an option that counts.

    Args:
        least: Smallest value allowed.

    Returns:
        Parser of one value, for ``add_argument(type=...)``.
    """

    def parse(value: str) -> int:
        if not value.isdecimal() or int(value) < least:
            raise argparse.ArgumentTypeError(f"{value!r} is not a whole number of {least} or more")
        return int(value)

    return parse


def _finite(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{value!r} is not a finite number of 0 or more")
    return number


def _share(value: str) -> float:
    number = _finite(value)
    if number >= 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a share: 0 or more, less than 1")
    return number


def _add_int(
    group: argparse._ArgumentGroup, flag: str, default: int, text: str, *, least: int = 1
) -> None:
    kind = whole_number(least=least)
    text = f"{text} (default: %(default)s)"
    group.add_argument(flag, type=kind, default=default, metavar="N", help=text)


def _add_float(group: argparse._ArgumentGroup, flag: str, default: float, text: str) -> None:
    text = f"{text} (default: %(default)s)"
    group.add_argument(flag, type=_finite, default=default, metavar="X", help=text)
