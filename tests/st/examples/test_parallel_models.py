# SPDX-License-Identifier: Apache-2.0
"""Real models in real layouts, 20 steps each, against the same example on one process.

Everything is computed in float64, Newton-Schulz too. Ranks then differ from one process in the
order of sums alone, and the tolerances can be far below what any mistake would cause.
"""

import hashlib
import importlib
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from examples.small_run import train
from hyper_parallel import Muon
from tests.pool import Pools, pools

pytestmark = pytest.mark.dist

NUM_STEPS = 20
COUNTED_STEPS = (1, NUM_STEPS - 1)  # counting is slow, and ranks compare plans once, in step 0
TINY = ("--width=32", "--batch=16", "--ns-dtype=float64")

LOSS_TOLERANCE = 1e-12
"""Relative. Seen: 5e-16. Float64 rounds at 1e-16, and 20 steps amplify it little."""

GRADIENT_TOLERANCE = 1e-12
"""Of its norm."""

WEIGHT_TOLERANCE = 1e-10
"""Of the distance that a parameter has moved. Seen: 2e-13. One wrong element costs 1e-3 or more."""


@dataclass(frozen=True)
class Trained:
    """What a rank saw.

    Attributes:
        losses: Of each step.
        before: Whole weights before the first step, by name.
        gradients: Whole gradients in the first step. Muon ignores their scale; a test should not.
        after: Whole weights at the end.
        shards: For each parameter, what this rank holds: a hash of which elements, and of bits.
        trainable: Names of the parameters that are trained.
        collectives: How many ran in each of ``COUNTED_STEPS``.
        planned: How many the plan says.
        printed: What the example printed.
    """

    losses: list[float]
    before: dict[str, NDArray[np.float64]]
    gradients: dict[str, NDArray[np.float64]]
    after: dict[str, NDArray[np.float64]]
    shards: dict[str, tuple[str, str]]
    trainable: set[str]
    collectives: list[int]
    planned: int
    printed: str


def train_here(name: str, argv: tuple[str, ...]) -> Trained:
    """Train an example on this rank, in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        return _train_here(name, argv)
    finally:
        torch.set_default_dtype(torch.float32)


def _train_here(name: str, argv: tuple[str, ...]) -> Trained:
    example = importlib.import_module(f"examples.{name}")
    arguments = example.parser().parse_args([*TINY, *argv])
    with redirect_stdout(io.StringIO()) as printed:
        task = example.build(arguments, torch.device("cpu"))
        # DDP puts its own name before all others.
        parameters = {n.removeprefix("module."): p for n, p in task.model.named_parameters()}
        before = {name: whole(parameter) for name, parameter in parameters.items()}
        with watched_steps(task.optimizer, parameters) as (gradients, collectives):
            losses = train(task, steps=NUM_STEPS)
    return Trained(
        losses=losses,
        before=before,
        gradients=gradients,
        after={name: whole(parameter) for name, parameter in parameters.items()},
        shards={name: shard(parameter) for name, parameter in parameters.items()},
        trainable={name for name, parameter in parameters.items() if parameter.requires_grad},
        collectives=collectives,
        planned=task.optimizer.plan.num_collectives,
        printed=printed.getvalue(),
    )


@contextmanager
def watched_steps(
    optimizer: Muon, parameters: dict[str, nn.Parameter]
) -> Iterator[tuple[dict[str, NDArray[np.float64]], list[int]]]:
    """Keep the gradients of the first step; count collectives in each of ``COUNTED_STEPS``."""
    gradients: dict[str, NDArray[np.float64]] = {}
    counts: list[int] = []
    modes = [CommDebugMode() if step in COUNTED_STEPS else None for step in range(NUM_STEPS)]
    started, stopped = iter(modes), iter(modes)

    def start(*_: object) -> None:
        if not gradients:
            gradients.update(
                {name: whole(p.grad) for name, p in parameters.items() if p.grad is not None}
            )
        if mode := next(started):
            mode.__enter__()

    def stop(*_: object) -> None:
        if mode := next(stopped):
            mode.__exit__(None, None, None)
            counts.append(mode.get_total_counts())

    handles = [optimizer.register_step_pre_hook(start), optimizer.register_step_post_hook(stop)]
    yield gradients, counts
    for handle in handles:
        handle.remove()


def whole(tensor: Tensor) -> NDArray[np.float64]:
    """The whole tensor, on every rank; a copy."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return np.array(tensor.numpy())


def shard(parameter: nn.Parameter) -> tuple[str, str]:
    """Hashes of which elements this rank holds, by torch's own cut, and of their bits."""
    tensor = parameter.detach()
    index = torch.arange(tensor.numel()).view(tensor.shape)
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        index = distribute_tensor(index, mesh, placements, src_data_rank=None).to_local()
        tensor = tensor.to_local()
    return digest(index), digest(tensor)


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


Train = Callable[[int, str, tuple[str, ...]], list[Trained]]


@pytest.fixture(scope="module")
def train_on() -> Iterator[Train]:
    """Trains an example on a number of ranks; the run on one rank is kept for other layouts."""
    opened: Pools
    kept: dict[tuple[str, tuple[str, ...]], list[Trained]] = {}
    with pools() as opened:

        def run(num_ranks: int, name: str, argv: tuple[str, ...]) -> list[Trained]:
            if num_ranks > 1:
                return opened.run(num_ranks, train_here, name, argv)
            if (name, argv) not in kept:
                kept[name, argv] = opened.run(1, train_here, name, argv)
            return kept[name, argv]

        yield run


@dataclass(frozen=True, kw_only=True)
class Case:
    """An example on some ranks, and what it is compared with.

    Attributes:
        name: The example.
        argv: Options on many ranks.
        alone: Options on one process.
        layouts: What the printed plan must name, so that the options do what they say: placements
            and shape of the mesh.
        num_ranks: Number of ranks.
    """

    name: str
    argv: tuple[str, ...]
    alone: tuple[str, ...] = ()
    layouts: tuple[str, ...]
    num_ranks: int = 4


def gpt(layout: str, *layouts: str, num_ranks: int = 4) -> Case:
    """A layout of the GPT; on one process, its parameters are plain tensors."""
    return Case(
        name="parallel_gpt",
        argv=(f"--layout={layout}",),
        alone=("--layout=ddp",),
        layouts=layouts,
        num_ranks=num_ranks,
    )


UNEVEN = ("--width=18",)  # 18 rows of a kernel on 4 ranks: 5, 5, 5 and 3
FROZEN = ("--freeze-embedding",)
CASES = {
    "ddp": gpt("ddp", "R on 4"),
    "fsdp": gpt("fsdp", "S(0) on 4"),
    "hsdp": gpt("hsdp", "R S(0) on 2x2"),
    "tp": gpt("tp", "S(0) on 4", "S(1) on 4"),
    "fsdp_tp": gpt("fsdp_tp", "S(0/2) S(0) on 2x2", "S(0) S(1) on 2x2"),
    "hsdp_tp": gpt("hsdp_tp", "R S(0/2) S(0) on 2x2x2", "R S(0) S(1) on 2x2x2", num_ranks=8),
    "moe by experts": Case(
        name="moe", argv=("--expert-shard-dim=0",), layouts=("S(0/2) S(0) on 2x2", "S(0) on 4")
    ),
    "moe by rows": Case(
        name="moe", argv=("--expert-shard-dim=1",), layouts=("S(1) S(0) on 2x2", "S(0) on 4")
    ),
    "moe, ep 4": Case(name="moe", argv=("--ep=4",), layouts=("S(0/4) S(0) on 1x4", "S(0) on 4")),
    "convnet": Case(name="convnet", argv=UNEVEN, alone=UNEVEN, layouts=("S(0) on 4",)),
    "lora": Case(name="lora", argv=(), layouts=("S(0) on 4",)),
    "lora, frozen embedding": Case(name="lora", argv=FROZEN, alone=FROZEN, layouts=("S(0) on 4",)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_many_ranks_train_as_one_process_does(case: Case, train_on: Train) -> None:
    (alone,) = train_on(1, case.name, case.alone)
    ranks = train_on(case.num_ranks, case.name, case.argv)
    first = ranks[0]

    lines = first.printed.splitlines()
    assert lines[-1].startswith(f"step   {NUM_STEPS - 1}  loss ")
    assert {" on ".join(re.split(" {2,}", line)[:2]) for line in lines} >= set(case.layouts)

    assert alone.losses[-1] < alone.losses[0] - 0.2  # it learns
    for trained in ranks:
        assert trained.losses == pytest.approx(alone.losses, rel=LOSS_TOLERANCE, abs=0)
    assert first.after.keys() == alone.after.keys()
    assert first.trainable == alone.trainable == alone.gradients.keys() == first.gradients.keys()
    for parameter, gradient in alone.gradients.items():
        error = float(np.linalg.norm(first.gradients[parameter] - gradient))
        assert error <= GRADIENT_TOLERANCE * np.linalg.norm(gradient), parameter
    for parameter, due in alone.after.items():
        start = alone.before[parameter]
        np.testing.assert_array_equal(first.before[parameter], start)
        if parameter not in alone.trainable:
            np.testing.assert_array_equal(first.after[parameter], start)
            continue
        moved = float(np.linalg.norm(due - start))
        assert moved > 1e-3, f"{parameter} was not trained"
        error = float(np.linalg.norm(first.after[parameter] - due))
        assert error <= WEIGHT_TOLERANCE * moved, f"{parameter}: {error / moved}"

    # Whatever makes them replicas: DDP, HSDP, or tensor parallelism that leaves a norm whole.
    for parameter in first.after:
        bits: dict[str, set[str]] = {}
        for trained in ranks:
            elements, value = trained.shards[parameter]
            bits.setdefault(elements, set()).add(value)
        assert all(len(values) == 1 for values in bits.values()), f"{parameter}: replicas differ"

    for trained in ranks:
        assert trained.collectives == [trained.planned] * len(COUNTED_STEPS)


@pytest.mark.parametrize("name", ["parallel_gpt", "moe", "convnet", "lora"])
def test_an_example_runs_as_a_script_on_one_process(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    example = importlib.import_module(f"examples.{name}")
    example.main(["--steps=2", "--width=32"])
    assert not dist.is_initialized()
    printed = capsys.readouterr().out
    assert "Muon plan of rank 0" in printed
    assert "step    1  loss " in printed
