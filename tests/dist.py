# SPDX-License-Identifier: Apache-2.0
"""Run a function on real gloo ranks, fast enough for every commit.

``forkserver`` imports torch once; a rank is then a fork of that server and costs a tenth of a
second. A rank that fails, dies or hangs is reported, never waited for.
"""

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
# ``tensor.debug`` pulls in everything that DTensor would import in each rank (2 s).
_PRELOAD = [
    "torch.distributed.tensor.debug",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
    "torch.optim",
    "pytest",
    "tests.dist",
]
CONTEXT.set_forkserver_preload(_PRELOAD)


@dataclass(frozen=True)
class Failure:
    """What a rank raised.

    Attributes:
        kind: Class name of the exception.
        message: Its text.
        trace: Its traceback.
    """

    kind: str
    message: str
    trace: str


def run_ranks(
    world_size: int, body: Callable[..., Any], *args: object, timeout_s: float = 60
) -> list[Any]:
    """Run ``body(*args)`` on ``world_size`` gloo ranks.

    Args:
        world_size: Number of processes.
        body: Module-level function. Asserts in the rank; returns plain Python values.
        *args: Picklable arguments.
        timeout_s: Deadline for all ranks together.

    Returns:
        The return values in rank order.

    Raises:
        AssertionError: If a rank fails, with its traceback.
    """
    outcomes = run_ranks_outcomes(world_size, body, *args, timeout_s=timeout_s)
    failed = [rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, Failure)]
    # Who lost the connection to a peer is not the one to blame.
    for rank in sorted(failed, key=lambda r: ("Connection" in outcomes[r].message, r)):
        raise AssertionError(f"rank {rank} failed:\n{outcomes[rank].trace}")
    return outcomes


def run_ranks_outcomes(
    world_size: int,
    body: Callable[..., Any],
    *args: object,
    timeout_s: float = 60,
    group_timeout_s: float = 30,
) -> list[Any]:
    """Like :func:`run_ranks`, with a :class:`Failure` in place of a failing rank's value.

    Args:
        world_size: Number of processes.
        body: Module-level function.
        *args: Picklable arguments.
        timeout_s: Deadline for all ranks together.
        group_timeout_s: Timeout of the default process group.

    Returns:
        Value or :class:`Failure` of each rank, in rank order.

    Raises:
        TimeoutError: If a rank is still running at the deadline: a hang.
    """
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            CONTEXT.Process(
                target=_entry,
                args=(rank, world_size, store, pipes[rank][1], group_timeout_s, body, args),
            )
            for rank in range(world_size)
        ]
        for process, (_, writer) in zip(ranks, pipes, strict=True):
            process.start()
            writer.close()  # so that a rank that dies gives end-of-file here
        pending = {reader: rank for rank, (reader, _) in enumerate(pipes)}
        deadline = time.monotonic() + timeout_s
        try:
            while pending:
                ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"ranks {sorted(pending.values())} hang")
                for reader in ready:
                    assert isinstance(reader, Connection)
                    rank = pending.pop(reader)
                    try:
                        results[rank] = reader.recv()
                    except EOFError:
                        results[rank] = Failure("Died", f"rank {rank} died", f"rank {rank} died")
        finally:
            for process in ranks:
                process.kill()
                process.join()
    return [results[rank] for rank in range(world_size)]


def _entry(
    rank: int,
    world_size: int,
    store: str,
    pipe: Connection,
    group_timeout_s: float,
    body: Callable[..., Any],
    args: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout_s),
        )
        pipe.send(body(*args))
    except BaseException as error:  # noqa: BLE001 -- the parent reports it
        pipe.send(Failure(type(error).__name__, str(error), traceback.format_exc()))
        return
    with suppress(RuntimeError):  # a peer that failed is not there any more
        dist.barrier()  # nobody closes a connection that a peer still reads from
        dist.destroy_process_group()
