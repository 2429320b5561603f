# SPDX-License-Identifier: Apache-2.0
"""What the small examples share: joining the ranks, made-up text, and the training loop.

A batch is drawn for all ranks together and then sliced, so that one process and many follow the
same curve.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hyper_parallel import Muon

Batch = tuple[Tensor, Tensor]  # inputs and targets, one row an example

PRINT_EVERY = 5  # steps


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained.

    Attributes:
        model: Gives the logits of a batch's inputs. Sharded already.
        optimizer: For all of the model's trainable parameters.
        batch_of: The global batch of a step, the same on every rank.
        model_ranks: Ranks that see the same rows, since they share one copy of the model: the
            innermost ones, as tensor parallelism puts them.
    """

    model: nn.Module
    optimizer: Muon
    batch_of: Callable[[int], Batch]
    model_ranks: int = 1


def train(task: Task, *, steps: int) -> list[float]:
    """Train, and print the loss every few steps on rank 0.

    Args:
        task: What to train.
        steps: Optimizer steps.

    Returns:
        The loss of each step, over the global batch.

    Raises:
        ValueError: If the batch cannot be shared equally.
    """
    model, optimizer = task.model, task.optimizer
    device = next(model.parameters()).device
    num_slices = dist.get_world_size() // task.model_ranks
    losses = []
    say(f"{optimizer.plan}\n")
    for step in range(steps):
        inputs, targets = task.batch_of(step)
        if len(inputs) % num_slices:
            raise ValueError(f"a batch of {len(inputs)} rows has no {num_slices} equal slices")
        index = dist.get_rank() // task.model_ranks
        inputs = inputs.chunk(num_slices)[index].to(device)
        targets = targets.chunk(num_slices)[index].to(device)

        loss = cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        losses.append(mean_over_ranks(loss))
        if step % PRINT_EVERY == 0 or step == steps - 1:
            say(f"step {step:4d}  loss {losses[-1]:.4f}")
    return losses


def mean_over_ranks(value: Tensor) -> float:
    """Return the mean over all ranks, which hold equal slices of the global batch."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Join the ranks that ``torchrun`` started, or be the only one.

    Yields:
        This rank's device: its GPU, else the CPU.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


class MarkovText:
    """Endless text whose next byte depends on the last one: 16 letters, learned in a minute.

    Args:
        seed: Seed of the language and of its batches.
        rows: Sequences in a batch, over all ranks.
        length: Bytes that a sequence predicts.
    """

    FIRST_LETTER = ord("a")

    def __init__(self, *, seed: int, rows: int, length: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._next = (2 * torch.randn(16, 16, generator=generator)).softmax(-1)
        self._seed, self._rows, self._length = seed, rows, length

    def batch(self, step: int) -> Batch:
        """Draw the global batch of a step.

        Args:
            step: Number of the step. The same number gives the same batch.

        Returns:
            ``(rows, length)`` int64 bytes, and for each the byte that follows.
        """
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + step)
        letters = [torch.randint(16, (self._rows,), generator=generator)]
        for _ in range(self._length):
            drawn = torch.multinomial(self._next[letters[-1]], 1, generator=generator)
            letters.append(drawn.squeeze(-1))
        text = torch.stack(letters, dim=1) + self.FIRST_LETTER
        return text[:, :-1], text[:, 1:]


def make_parser(script: str, description: str) -> argparse.ArgumentParser:
    """Make a parser with the options that all small examples have.

    Args:
        script: The example's file name.
        description: What the example shows.

    Returns:
        The parser, for the example to add its own options to.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]",
        description=description,
        epilog=f"one process: python examples/{script}; "
        f"several: torchrun --nproc-per-node 4 examples/{script}",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=16, help="rows a step, over all ranks")
    parser.add_argument("--width", type=int, default=64, help="features of the model")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of Muon")
    parser.add_argument("--adamw-lr", type=float, default=0.01, help="learning rate of AdamW")
    parser.add_argument(
        "--ns-dtype",
        choices=("bfloat16", "float32", "float64"),
        default="bfloat16",
        help="precision in which Muon orthogonalizes",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data")
    return parser


def run(
    parser: argparse.ArgumentParser,
    build: Callable[[argparse.Namespace, torch.device], Task],
    argv: Sequence[str] | None,
) -> None:
    """Run an example's command line.

    Args:
        parser: The example's options.
        build: Makes the task on each rank, in its process group.
        argv: Arguments without the program's name. None takes ``sys.argv``.
    """
    arguments = parser.parse_args(argv)
    with process_group() as device:
        train(build(arguments, device), steps=arguments.steps)
