# SPDX-License-Identifier: Apache-2.0
"""Strike a training process at a chosen point of a chosen step, by a real signal.

A process sends the signal to itself, since no other can hit the time between two exchanges of an
optimizer step. What happens is the kernel's doing: nothing is cleaned up, flushed or told.
"""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from examples import train_gpt
from examples.checkpoint import TrainingState
from examples.options import Options
from examples.run_log import Record

PLACES: Final = ("forward", "backward", "step", "save")
_RETURN_EXCHANGE: Final = 2  # of a step with one bucket: pieces to their owner, then updates back


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One blow.

    Attributes:
        step: Optimizer step during which it strikes, from 1. For ``save``, a step that is saved.
        rank: Who is struck.
        place: ``forward``: before the last block; ``backward``: before the first block's gradient;
            ``step``: between the optimizer's two exchanges; ``save``: the rank's tensors are
            written, but the checkpoint is not complete.
        signal: Name of the signal.
    """

    step: int
    rank: int
    place: str
    signal: str = "SIGKILL"


class EventLog:
    """What happened to the processes of a run, one JSON object a line, from all ranks.

    Args:
        path: The file; it outlives the processes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, event: str, **fields: object) -> None:
        """Append an event.

        Args:
            event: What happened: ``start``, ``fault`` or ``error``.
            **fields: More about it.
        """
        line = json.dumps({"event": event, "time_s": time.time(), **fields}) + "\n"
        with self._path.open("a") as file:  # appended in one write: ranks do not mix
            file.write(line)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Read the events of a kind.

        Args:
            kind: As given to :meth:`add`.

        Returns:
            The events, oldest first.
        """
        if not self._path.exists():
            return []
        events = [json.loads(line) for line in self._path.read_text().splitlines()]
        return [event for event in events if event["event"] == kind]


@contextmanager
def armed(faults: Sequence[Fault], log: EventLog) -> Iterator[None]:
    """Let the faults strike that have not struck yet, while ``examples.train_gpt`` trains.

    Args:
        faults: Of all ranks.
        log: Knows which have struck already; told of each before it does, and of the step at which
            rank 0 starts.

    Yields:
        None.
    """
    struck = [event["fault"] for event in log.events("fault")]
    waiting = [fault for fault in faults if asdict(fault) not in struck]
    striker = _Striker(waiting, log)
    with (
        mock.patch.object(train_gpt, "train_step", striker.train_step),
        mock.patch.object(dist, "all_to_all_single", striker.all_to_all_single),
        mock.patch.object(FileSystemWriter, "write_data", striker.write_data),
    ):
        yield


class _Striker:
    """Stands in for the functions at which a fault can strike, and counts."""

    def __init__(self, faults: Sequence[Fault], log: EventLog) -> None:
        self._faults = faults
        self._log = log
        self._step = 0
        self._exchanges = 0
        self._train_step = train_gpt.train_step
        self._all_to_all_single = dist.all_to_all_single
        self._write_data = FileSystemWriter.write_data

    def train_step(self, state: TrainingState, batch: Tensor, *, options: Options) -> Record:
        if not self._step and dist.get_rank() == 0:
            self._log.add("start", step=state.step, world_size=dist.get_world_size())
        self._step, self._exchanges = state.step + 1, 0
        blocks = state.model.get_submodule("blocks")
        assert isinstance(blocks, nn.ModuleList)
        hooks = [
            blocks[-1].register_forward_pre_hook(lambda *_: self._strike("forward")),
            blocks[0].register_forward_hook(self._watch_gradient),
        ]
        try:
            return self._train_step(state, batch, options=options)
        finally:
            for hook in hooks:
                hook.remove()

    def _watch_gradient(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: self._strike("backward"))

    def all_to_all_single(self, *args: Any, **kwargs: Any) -> Any:
        self._exchanges += 1
        if self._exchanges == _RETURN_EXCHANGE:
            self._strike("step")
        return self._all_to_all_single(*args, **kwargs)

    @property
    def write_data(self) -> Any:
        def write_data(writer: FileSystemWriter, *args: Any, **kwargs: Any) -> Any:
            written = self._write_data(writer, *args, **kwargs)
            written.wait()
            self._strike("save")
            return written

        return write_data

    def _strike(self, place: str) -> None:
        here = (self._step, dist.get_rank(), place)
        for fault in self._faults:
            if (fault.step, fault.rank, fault.place) == here:
                self._log.add("fault", fault=asdict(fault), pid=os.getpid())
                os.kill(os.getpid(), signal.Signals[fault.signal])
