# SPDX-License-Identifier: Apache-2.0
"""Hugging Face ``Trainer`` with Muon: a small Llama on text bytes, on one process or under FSDP2.

One process, or several, by the same file::

    python examples/hf_trainer.py
    torchrun --nproc-per-node 2 examples/hf_trainer.py

All that is ours is :meth:`MuonTrainer.create_optimizer`. ``accelerate`` takes an optimizer that is
built already, shards the model, and exchanges the parameters in the optimizer's groups for their
shards, in place. Muon sees that and plans anew, so nothing has to be told twice.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import (  # type: ignore[import-untyped]
    DistributedType,
    FullyShardedDataParallelPlugin,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs as a script, anywhere

from examples.text_data import TextData, load_text
from hyper_parallel import Muon, muon_param_groups

CONTEXT = 32  # bytes a sequence
LR, ADAMW_LR = 0.02, 3e-3


class TextRows(Dataset[dict[str, Tensor]]):
    """Sequences of text, each a function of its number.

    Args:
        data: Where they are cut from.
        num_rows: How many there are.
    """

    def __init__(self, data: TextData, num_rows: int) -> None:
        rows = data.batch("train", index=0, seed=0, size=num_rows, context=CONTEXT)
        self._rows = torch.from_numpy(rows[:, :-1])

    def __len__(self) -> int:
        return len(self._rows)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


class MuonTrainer(Trainer):
    """A ``Trainer`` whose optimizer is Muon for hidden matrices and AdamW for the rest."""

    @override
    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        if self.optimizer is None:
            assert self.model is not None
            with warnings.catch_warnings():
                # Whole parameters on several ranks are usually a mistake; here they are replaced.
                warnings.filterwarnings("ignore", message=".* trainable parameters are plain")
                groups = muon_param_groups(
                    self.model if model is None else model,
                    adamw={"lr": ADAMW_LR, "weight_decay": self.args.weight_decay},
                )
            self.optimizer = Muon(
                groups,
                lr=self.args.learning_rate,
                weight_decay=self.args.weight_decay,
                ns_dtype=torch.float32,
            )
        return self.optimizer


class ShardedOnCPU(MuonTrainer):
    """The same where there is no GPU.

    ``accelerate`` shards on accelerators only; on CPUs it ignores the settings of FSDP and uses
    DDP. Its FSDP2 code runs on gloo as well once it is told to.
    """

    @override
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.state.distributed_type = DistributedType.FSDP
        self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            **self.args.fsdp_plugin_args
        )
        self.is_fsdp_enabled = True


def build_model() -> LlamaForCausalLM:
    """Return a Llama with random weights, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    return LlamaForCausalLM(config)


def build_trainer(
    folder: Path, data: TextData, *, steps: int, save_every: int, batch: int
) -> MuonTrainer:
    """Return a trainer, sharded by FSDP2 if there is more than one process.

    Args:
        folder: Checkpoints go here.
        data: Text to train on.
        steps: Optimizer steps.
        save_every: Steps between checkpoints.
        batch: Sequences a step, over all processes.
    """
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    sharding: dict[str, Any] = {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
        },
    }
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=not torch.cuda.is_available(),
        max_steps=steps,
        per_device_train_batch_size=batch // num_processes,
        learning_rate=LR,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        logging_steps=1,
        save_steps=save_every,
        report_to=[],
        seed=0,
        disable_tqdm=True,
        **(sharding if num_processes > 1 else {}),
    )
    kind = ShardedOnCPU if num_processes > 1 and arguments.use_cpu else MuonTrainer
    return kind(model=build_model(), args=arguments, train_dataset=TextRows(data, steps * batch))


def losses(trainer: Trainer) -> list[float]:
    """Return the training loss of each logged step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Hugging Face Trainer with Muon.")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: 60)")
    parser.add_argument("--batch", type=int, default=16, help="sequences a step (default: 16)")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/hf_trainer"), metavar="FOLDER")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="folder of text files")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    arguments = parser.parse_args(argv)
    trainer = build_trainer(
        arguments.run_dir,
        load_text(arguments.data, context=CONTEXT),
        steps=arguments.steps,
        save_every=max(1, arguments.steps // 3),
        batch=arguments.batch,
    )
    trainer.train(resume_from_checkpoint=arguments.resume)
    if trainer.is_world_process_zero():
        print(f"loss {losses(trainer)[0]:.3f} to {losses(trainer)[-1]:.3f}")


if __name__ == "__main__":
    main()
