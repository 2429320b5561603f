# SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning with Muon: a small GPT on text bytes, on one process or under FSDP2.

One process, or several, by the same file::

    python examples/lightning_gpt.py
    torchrun --nproc-per-node 2 examples/lightning_gpt.py

``ModelParallelStrategy`` calls ``configure_model`` before ``configure_optimizers``: shard in the
first, build Muon in the second, and that is all.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs as a script, anywhere

from examples.gpt import GPT, GPTConfig
from examples.text_data import TextData, load_text
from hyper_parallel import Muon, muon_param_groups

CONFIG = GPTConfig(context=32, width=32, num_layers=2, num_heads=2)


class LightningGPT(lightning.LightningModule):
    """A GPT, sharded where there is a mesh, with one optimizer for all of it.

    Args:
        data: Text to train on.
        steps: Optimizer steps.
        batch: Sequences a step, over all processes.
        lr: Peak learning rate of Muon.
        adamw_lr: Peak learning rate of AdamW.

    Attributes:
        losses: Training loss of each step on this rank.
    """

    def __init__(
        self,
        data: TextData,
        *,
        steps: int,
        batch: int,
        lr: float = 0.02,
        adamw_lr: float = 3e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["data"])
        self.data = data
        torch.manual_seed(0)
        self.model = GPT(CONFIG)
        self.losses: list[float] = []

    @override
    def configure_model(self) -> None:
        if self.device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    @override
    def configure_optimizers(self) -> Any:
        groups = muon_param_groups(self.model, adamw={"lr": self.hparams["adamw_lr"]})
        optimizer = Muon(groups, lr=self.hparams["lr"], ns_dtype=torch.float32)
        schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=self.hparams["steps"])
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    @override
    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(range(self.hparams["steps"]))  # type: ignore[arg-type]

    def rows(self, step: int) -> Tensor:
        """Return this rank's rows of the batch of a step, ``(rows, context + 1)`` int64."""
        batch, context = self.hparams["batch"], CONFIG.context
        rows = self.data.batch("train", index=step, seed=0, size=batch, context=context)
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        return torch.from_numpy(rows).chunk(num_ranks)[rank].to(self.device)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        # Lightning begins the data of an epoch again when it resumes in the middle of one.
        rows = self.rows(self.global_step)
        loss = cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss


def build_trainer(folder: Path, *, steps: int, save_every: int) -> lightning.Trainer:
    """Return a trainer, with FSDP2 if there is more than one process.

    Args:
        folder: Checkpoints go here, as ``step=N.ckpt``.
        steps: Optimizer steps.
        save_every: Steps between checkpoints.
    """
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    device = "gpu" if torch.cuda.is_available() else "cpu"
    sharded = ModelParallelStrategy(data_parallel_size=num_processes, tensor_parallel_size=1)
    checkpoints = ModelCheckpoint(
        dirpath=folder,
        filename="{step}",
        every_n_train_steps=save_every,
        save_top_k=-1,
    )
    return lightning.Trainer(
        accelerator=device,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", num_processes)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy=sharded if num_processes > 1 else "auto",
        max_steps=steps,
        use_distributed_sampler=False,
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="PyTorch Lightning with Muon.")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: 60)")
    parser.add_argument("--batch", type=int, default=16, help="sequences a step (default: 16)")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/lightning"), metavar="FOLDER")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="folder of text files")
    parser.add_argument("--resume", type=Path, metavar="CKPT", help="checkpoint to go on from")
    arguments = parser.parse_args(argv)
    module = LightningGPT(
        load_text(arguments.data, context=CONFIG.context),
        steps=arguments.steps,
        batch=arguments.batch,
    )
    trainer = build_trainer(
        arguments.run_dir, steps=arguments.steps, save_every=max(1, arguments.steps // 3)
    )
    trainer.fit(module, ckpt_path=arguments.resume, weights_only=False)
    if trainer.is_global_zero:
        print(f"loss {module.losses[0]:.3f} to {module.losses[-1]:.3f}")


if __name__ == "__main__":
    main()
