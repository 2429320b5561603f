# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run, each rank its shards, by ``torch.distributed.checkpoint``."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

_NUM_KEPT = 2


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


def save_checkpoint(state: TrainingState, run_dir: Path) -> None:
    """Write a checkpoint of this step and drop all but the newest two. Every rank calls.

    Args:
        state: Not modified.
        run_dir: Folder of the run, the same for every rank.
    """
    folder = run_dir / "checkpoints"
    save({"training": state}, checkpoint_id=folder / f"step_{state.step:08d}")
    if dist.get_rank() == 0:
        for old in sorted(folder.iterdir())[:-_NUM_KEPT]:
            shutil.rmtree(old)


def load_checkpoint(state: TrainingState, run_dir: Path) -> None:
    """Load the newest checkpoint. Every rank calls.

    Args:
        state: Overwritten in place.
        run_dir: Folder of the run, the same for every rank.
    """
    load({"training": state}, checkpoint_id=newest_checkpoint(run_dir))


def newest_checkpoint(run_dir: Path) -> Path:
    """Find the checkpoint of the latest step that was written to its end.

    Args:
        run_dir: Folder of the run.

    Returns:
        Folder of the checkpoint.

    Raises:
        ValueError: If there is none.
    """
    complete = sorted(path.parent for path in run_dir.glob("checkpoints/*/.metadata"))
    if not complete:
        raise ValueError(f"--resume: no checkpoint in {run_dir}; start anew with another --run-dir")
    return complete[-1]
