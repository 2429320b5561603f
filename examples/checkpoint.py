# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run, each rank its shards, by ``torch.distributed.checkpoint``.

A checkpoint is written to a folder whose name ends in ``.partial``, with a checksum of each file,
and renamed when every rank has written its part. Whatever dies before, the checkpoints from before
are as they were. Loading takes the newest one whose files are what was written.
"""

import hashlib
import shutil
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from hyper_parallel.core.optimizer import OlderCheckpointPlanner

_NUM_KEPT = 2
_PARTIAL = ".partial"
_CHECKSUMS = "SHA256SUMS"  # as sha256sum -c reads it


@dataclass(kw_only=True)
class TrainingState(Stateful):
    """All of a run that changes from step to step. Batches are a function of ``step``.

    Attributes:
        model: Sharded; saved and loaded as it lies, on this or another number of ranks.
        optimizer: Of all parameters of ``model``.
        scheduler: Of ``optimizer``.
        step: Optimizer steps done.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    step: int = 0

    @override
    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        scheduler = self.scheduler.state_dict()
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": self.step}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]


@dataclass(frozen=True)
class PendingCheckpoint:
    """A checkpoint that is being written while the run goes on.

    Attributes:
        folder: Where it will be.
        group: The group over which the writers agree.
        response: What ``async_save`` returned.
    """

    folder: Path
    group: dist.ProcessGroup
    response: Future[Any]

    def finish(self) -> None:
        """Wait until it is written, and let it count. Every rank calls.

        Raises:
            RuntimeError: On every rank, if one of them could not write its part.
        """
        try:
            self.response.result()
            _commit(self.folder, self.group)
        except (Exception, CheckpointException) as error:
            raise RuntimeError(_not_written(self.folder)) from error


def save_checkpoint(state: TrainingState, run_dir: Path) -> None:
    """Write a checkpoint of this step and drop all but the newest two. Every rank calls.

    Args:
        state: Not modified.
        run_dir: Folder of the run, the same for every rank.

    Raises:
        RuntimeError: On every rank, if one of them could not write its part: the disk is full, or
            the rank is gone. The checkpoints from before are as they were.
    """
    folder = _folder_of(state.step, run_dir)
    try:
        save({"training": state}, checkpoint_id=_partial(folder))
        _commit(folder, None)
    except (Exception, CheckpointException) as error:
        raise RuntimeError(_not_written(folder)) from error


def start_checkpoint(
    state: TrainingState, run_dir: Path, group: dist.ProcessGroup
) -> PendingCheckpoint:
    """Begin to write a checkpoint of this step; steps may go on meanwhile. Every rank calls.

    Args:
        state: Copied before this returns.
        run_dir: Folder of the run, the same for every rank.
        group: A gloo group of all ranks that nothing else uses, such as ``dist.new_group`` makes:
            on the group of the steps, messages of both would meet.

    Returns:
        Call its ``finish`` before the next checkpoint; until then this one does not count.
    """
    folder = _folder_of(state.step, run_dir)
    response = async_save({"training": state}, checkpoint_id=_partial(folder), process_group=group)
    assert isinstance(response, Future)
    return PendingCheckpoint(folder, group, response)


def load_checkpoint(state: TrainingState, run_dir: Path) -> Path:
    """Load the newest checkpoint whose files are whole. Every rank calls.

    Args:
        state: Overwritten in place.
        run_dir: Folder of the run, the same for every rank.

    Returns:
        Folder of the checkpoint.

    Raises:
        ValueError: If there is none; the message names the files that are not as they were written.
    """
    damages: list[str] = []
    for folder in reversed(_complete(run_dir)):
        damage = _damage(folder)
        if not damage:
            planner = OlderCheckpointPlanner()  # a version without one of today's settings
            load({"training": state}, checkpoint_id=folder, planner=planner)
            return folder
        damages += damage
        if dist.get_rank() == 0:
            print(f"{damage[0]}; trying the checkpoint before", flush=True)
    raise ValueError(f"no checkpoint in {run_dir} can be loaded: {'; '.join(damages) or 'none'}")


def newest_checkpoint(run_dir: Path) -> Path:
    """Find the checkpoint of the latest step that was written to its end.

    Args:
        run_dir: Folder of the run.

    Returns:
        Folder of the checkpoint.

    Raises:
        ValueError: If there is none.
    """
    complete = _complete(run_dir)
    if not complete:
        raise ValueError(f"--resume: no checkpoint in {run_dir}; start anew with another --run-dir")
    return complete[-1]


def _folder_of(step: int, run_dir: Path) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}"


def _partial(folder: Path) -> Path:
    return folder.with_name(folder.name + _PARTIAL)


def _complete(run_dir: Path) -> list[Path]:
    folders = (path.parent for path in run_dir.glob("checkpoints/*/.metadata"))
    return sorted(folder for folder in folders if folder.suffix != _PARTIAL)


def _not_written(folder: Path) -> str:
    return (
        f"checkpoint {folder} was not written; those from before are as they were. The cause is "
        "above: make room on the disk, or start the run again from the newest checkpoint"
    )


def _commit(folder: Path, group: dist.ProcessGroup | None) -> None:
    """Rename a checkpoint that all ranks have written, and drop those that are not kept."""
    checksums = _gather(_share_of(_files(_partial(folder))), group)
    if dist.get_rank() == 0:
        lines = [f"{digest}  {name}\n" for name, digest in sorted(checksums.items())]
        (_partial(folder) / _CHECKSUMS).write_text("".join(lines))
        if folder.exists():  # of a run that was begun again without --resume
            shutil.rmtree(folder)
        _partial(folder).rename(folder)
        complete = _complete(folder.parents[1])
        for old in complete[: complete.index(folder) + 1][:-_NUM_KEPT]:
            shutil.rmtree(old)
        for rest in folder.parent.glob(f"*{_PARTIAL}"):
            shutil.rmtree(rest)
    dist.barrier(group)  # nobody looks for it before it is there


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != _CHECKSUMS)


def _share_of(paths: list[Path]) -> dict[str, str]:
    """Checksums of this rank's share of the files."""
    share = paths[dist.get_rank() :: dist.get_world_size()]
    digests = {}
    for path in share:
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _gather(digests: dict[str, str], group: dist.ProcessGroup | None) -> dict[str, str]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, digests, group)
    return {name: digest for part in gathered for name, digest in part.items()}


def _damage(folder: Path) -> list[str]:
    """What is wrong with the files of a checkpoint; the same on every rank."""
    if not (folder / _CHECKSUMS).exists():
        return []  # written before there were checksums
    lines = (folder / _CHECKSUMS).read_text().splitlines()
    due = {line[66:]: line[:64] for line in lines}
    there = [folder / name for name in sorted(due) if (folder / name).is_file()]
    have = _gather(_share_of(there), None)
    return [
        f"{folder / name} is {'not as it was written' if name in have else 'missing'}"
        for name in due
        if have.get(name) != due[name]
    ]
