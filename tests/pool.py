# SPDX-License-Identifier: Apache-2.0
"""Gloo ranks that stay alive between cases, so that a case costs milliseconds."""

import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.dist import CONTEXT, Failure


class RankPool:
    """``world_size`` processes in one gloo group that run one function after another.

    Args:
        world_size: Number of processes.
        timeout_s: Timeout of the process group, and of a case.
    """

    def __init__(self, world_size: int, timeout_s: float = 30) -> None:
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        pipes = [CONTEXT.Pipe() for _ in range(world_size)]
        self._pipes = [ours for ours, _ in pipes]
        self._ranks = [
            CONTEXT.Process(
                target=_serve, args=(rank, world_size, store, theirs, timeout_s), daemon=True
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._ranks, pipes, strict=True):
            process.start()
            theirs.close()

    def run(self, body: Callable[..., Any], *args: object) -> list[Any]:
        """Run ``body(*args)`` on every rank.

        Args:
            body: Module-level function; returns plain Python values.
            *args: Picklable arguments.

        Returns:
            The return values in rank order.

        Raises:
            AssertionError: If a rank fails, hangs or is gone; the pool is closed then.
        """
        for pipe in self._pipes:
            pipe.send((body, args))
        values: list[Any] = []
        for rank, pipe in enumerate(self._pipes):
            try:
                arrived = pipe.poll(2 * self._timeout_s)
                values.append(pipe.recv() if arrived else Failure("Hang", "", f"rank {rank} hangs"))
            except EOFError:
                values.append(Failure("Died", "", f"rank {rank} died"))
        for rank, value in enumerate(values):
            if isinstance(value, Failure):
                self.close()
                raise AssertionError(f"rank {rank} failed:\n{value.trace}")
        return values

    def close(self) -> None:
        """End the processes."""
        for process in self._ranks:
            process.kill()
            process.join()
        self._folder.cleanup()


class Pools:
    """One pool per world size, started when first needed and replaced after a failure."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def run(self, world_size: int, body: Callable[..., Any], *args: object) -> list[Any]:
        """Run ``body(*args)`` on ``world_size`` ranks; see :meth:`RankPool.run`."""
        pool = self._pools.get(world_size)
        if pool is None:
            pool = self._pools[world_size] = RankPool(world_size)
        try:
            return pool.run(body, *args)
        except AssertionError:
            del self._pools[world_size]
            raise

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


@contextmanager
def pools() -> Iterator[Pools]:
    """Pools that end with the block."""
    opened = Pools()
    try:
        yield opened
    finally:
        opened.close()


def _serve(rank: int, world_size: int, store: str, pipe: Connection, timeout_s: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    while True:
        try:
            body, args = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            pipe.send(body(*args))
        except BaseException as error:  # noqa: BLE001 -- the parent reports it
            pipe.send(Failure(type(error).__name__, str(error), traceback.format_exc()))
