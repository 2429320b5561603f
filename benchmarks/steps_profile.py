# SPDX-License-Identifier: Apache-2.0
"""Where a step of ours spends its time: the executor's phases, timed from outside."""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from benchmarks.steps_ranks import GRAD_SEED, WARM_UP, Entry
from benchmarks.steps_work import Job, make_mesh, whole_tensors, work_of
from hyper_parallel import Muon
from hyper_parallel.core.optimizer.executor import Executor
from hyper_parallel.core.optimizer.local_step import LocalStep

PHASES = {
    "direction": "momentum and gradient to direction (`LocalStep.prepare`)",
    "pack": "directions into packets and matrices (`Executor._prepare`, `_packet`, `_start`)",
    "send": "headers, and starting an exchange (`Executor._send`)",
    "wait": "until an exchange has arrived (`Executor._wait`)",
    "unpack": "pieces into whole matrices (`Executor._gathered`)",
    "orthogonalize": "Newton-Schulz (`LocalStep.compute`)",
    "return": "results into packets (`Executor._compute`, `_orthogonalize`)",
    "apply": "momentum, decay and update (`LocalStep.apply`)",
    "rest": "everything else of `Muon.step`",
}
"""What each phase is; the times of a phase do not include those of another within it."""

_TIMED: list[tuple[type, str, str]] = [
    (LocalStep, "prepare", "direction"),
    (Executor, "_prepare", "pack"),
    (Executor, "_packet", "pack"),
    (Executor, "_start", "pack"),
    (Executor, "_send", "send"),
    (Executor, "_wait", "wait"),
    (Executor, "_gathered", "unpack"),
    (LocalStep, "compute", "orthogonalize"),
    (Executor, "_compute", "return"),
    (Executor, "_orthogonalize", "return"),
    (LocalStep, "apply", "apply"),
    (Muon, "step", "rest"),
]


class _Clock:
    """Self times by phase, as wall time and as this thread's time on a core."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.core: dict[str, float] = defaultdict(float)
        self._inner = [[0.0, 0.0]]

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._inner.append([0.0, 0.0])
        start = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            wall, core = time.perf_counter() - start[0], time.thread_time() - start[1]
            inner_wall, inner_core = self._inner.pop()
            self.wall[phase] += wall - inner_wall
            self.core[phase] += core - inner_core
            self._inner[-1][0] += wall
            self._inner[-1][1] += core


def profile(job: Job, steps: int) -> dict[str, Mapping[str, float]]:
    """Step ours on this rank with all phases timed.

    Args:
        job: The job.
        steps: Steps, after the warm-up.

    Returns:
        Milliseconds a step by phase: ``wall``, ``core`` (this thread on a core) and ``threads``
        (``total`` alone: cores used by other threads of the process, which are gloo's).
    """
    work = work_of(job)
    entry = Entry("ours", work, make_mesh(work), whole_tensors(work, GRAD_SEED))
    for _ in range(WARM_UP):
        entry.refresh()
        entry.step()
    clock = _Clock()
    threads = 0.0
    with ExitStack() as stack:
        for owner, method, phase in _TIMED:
            timed = _timed(getattr(owner, method), clock, phase)
            stack.enter_context(mock.patch.object(owner, method, timed))
        for _ in range(steps):
            entry.refresh()
            dist.barrier()
            all_before, own_before = time.process_time(), time.thread_time()
            entry.step()
            threads += time.process_time() - all_before - (time.thread_time() - own_before)
    return {
        "wall": {phase: 1e3 * clock.wall[phase] / steps for phase in PHASES},
        "core": {phase: 1e3 * clock.core[phase] / steps for phase in PHASES},
        "threads": {"total": 1e3 * threads / steps},
    }


def _timed(method: Callable[..., Any], clock: _Clock, phase: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with clock(phase):
            return method(*args, **kwargs)

    return timed
