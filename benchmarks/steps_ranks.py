# SPDX-License-Identifier: Apache-2.0
"""What each rank runs: the check of one contender, and the race of several."""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.steps_contenders import CONTENDERS, Stepper
from benchmarks.steps_recorder import StepRecorder
from benchmarks.steps_work import Job, Work, cut, local, make_mesh, whole_tensors, work_of

WEIGHT_SEED = 0
GRAD_SEED = 1
WARM_UP = 2  # steps; in the first ones peers compile


@dataclass(frozen=True)
class Counts:
    """What a step costs one rank, and how far it went from where it should.

    Attributes:
        flops: Operations.
        received: Bytes from other ranks.
        collectives: Number of each collective.
        peak: Most bytes of new memory at once.
        distances: For each parameter, the squared distance of this rank's first displacement from
            the right one, and the square of the right one.
    """

    flops: int
    received: float
    collectives: dict[str, int]
    peak: int
    distances: list[tuple[float, float]]


class Entry:
    """A contender with parameters of its own, on one rank.

    Args:
        name: Key of the contender.
        work: What to step on.
        mesh: Of all ranks.
        seen: Whole gradients, the same for all contenders.

    Attributes:
        params: The parameters.
        stepper: The optimizer.
    """

    def __init__(self, name: str, work: Work, mesh: DeviceMesh, seen: Sequence[Tensor]) -> None:
        # Advice to peers about their redistributions, once a rank.
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
        weights = [0.1 * w for w in whole_tensors(work, WEIGHT_SEED)]
        self.params = [
            torch.nn.Parameter(cut(w, spec, mesh))
            for w, spec in zip(weights, work.params, strict=True)
        ]
        self._grads = [cut(g, spec, mesh) for g, spec in zip(seen, work.params, strict=True)]
        self.stepper: Stepper = CONTENDERS[name].build(self.params, mesh)

    def refresh(self) -> None:
        """Give every parameter its gradient anew, since some peers overwrite it."""
        for param, grad in zip(self.params, self._grads, strict=True):
            param.grad = grad.clone()

    def step(self) -> tuple[float, float]:
        """One step; returns its seconds on this rank, by the clock and on a core."""
        clock, core = time.perf_counter(), time.process_time()
        self.stepper.step()
        return time.perf_counter() - clock, time.process_time() - core


def check(job: Job, names: Sequence[str], answer: str) -> list[Counts | str]:
    """Take some contenders' first two steps on this rank, and count the second.

    Args:
        job: The job.
        names: Keys of the contenders.
        answer: File with the displacements of one process.

    Returns:
        For each contender its counts, or the error that it raised in one line.
    """
    work = work_of(job)
    mesh = make_mesh(work)
    grads = whole_tensors(work, GRAD_SEED)
    right = torch.load(answer, mmap=True)
    due = [local(cut(w, s, mesh)).double() for w, s in zip(right, work.params, strict=True)]
    seen: list[Counts | str] = []
    for name in names:
        try:
            seen.append(_counts(Entry(name, work, mesh, grads), due, eager=job.eager))
        except Exception as error:  # noqa: BLE001 -- whatever a peer says is its result
            line = next((ln.strip() for ln in str(error).splitlines() if ln.strip()), "")
            seen.append(f"{type(error).__name__}: {line}".removesuffix(": "))
        dist.barrier()
    return seen


def _counts(entry: Entry, due: Sequence[Tensor], *, eager: bool) -> Counts:
    before = [local(p).clone() for p in entry.params]
    with _uncompiled(when=True):
        entry.refresh()
        entry.step()
        moves = [local(p).double() - b.double() for p, b in zip(entry.params, before, strict=True)]
        entry.refresh()
        with StepRecorder() as recorder:
            entry.step()
    if not eager:  # as it is shipped, too: counting has to do without its compiler
        entry.refresh()
        entry.step()
    return Counts(
        flops=recorder.flops,
        received=recorder.received,
        collectives=dict(recorder.collectives),
        peak=recorder.peak,
        distances=[
            (float((move - d).square().sum()), float(d.square().sum()))
            for move, d in zip(moves, due, strict=True)
        ],
    )


def race(job: Job, names: Sequence[str], rounds: int) -> list[list[tuple[float, float]]]:
    """Step contenders in turn on this rank.

    Args:
        job: The job.
        names: Keys of the contenders.
        rounds: Steps of each, after the warm-up.

    Returns:
        Seconds by contender and round, by the clock and on a core (all threads of this rank).
    """
    work = work_of(job)
    mesh = make_mesh(work)
    seen = whole_tensors(work, GRAD_SEED)
    entries = [Entry(name, work, mesh, seen) for name in names]
    seconds: list[list[tuple[float, float]]] = [[] for _ in names]
    with _uncompiled(when=job.eager):
        for number in range(WARM_UP + rounds):
            for turn in range(len(names)):
                which = (turn + number) % len(names)  # so that nobody always follows the same one
                entries[which].refresh()
                dist.barrier()
                took = entries[which].step()
                if number >= WARM_UP:
                    seconds[which].append(took)
    return seconds


@contextmanager
def _uncompiled(*, when: bool) -> Iterator[None]:
    """Keep ``torch.compile`` out of what is counted: it hides operations from a dispatch mode."""
    if not when or "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
