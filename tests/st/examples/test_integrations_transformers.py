# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's ``Trainer``: on one process and under FSDP2, and again from its checkpoint."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from examples.text_data import load_text
from tests.checkpoint_runs import state_of, whole
from tests.dist import run_ranks

pytest.importorskip("transformers", reason="pip install 'hyper-parallel[integrations]'")
pytest.importorskip("accelerate", reason="pip install 'hyper-parallel[integrations]'")

pytestmark = pytest.mark.dist

TEXT = Path(__file__).resolve().parents[3] / "examples"
STEPS, BATCH, SAVED = 6, 4, 3


def new_trainer(folder: Path) -> Any:
    from examples.hf_trainer import CONTEXT, build_trainer

    data = load_text(TEXT, context=CONTEXT)
    return build_trainer(folder, data, steps=STEPS, save_every=SAVED, batch=BATCH)


def distance(tensors: list[Tensor], others: list[Tensor]) -> float:
    pairs = list(zip(tensors, others, strict=True))
    return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)


def by_a_plain_loop(trainer: Any, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """The same steps in a loop of five lines, on whole tensors, with the trainer's schedule."""
    from examples.hf_trainer import build_model

    trainer.model, trainer.optimizer, trainer.lr_scheduler = build_model(), None, None
    optimizer = trainer.create_optimizer()
    schedule: LRScheduler = trainer.create_scheduler(STEPS, optimizer)
    for batch in batches:
        trainer.model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return list(state_of(trainer.model, optimizer))


def watch(trainer: Any) -> list[float]:
    """Train; the loss of each step. Every parameter moves, and the loss falls."""
    from examples.hf_trainer import losses

    start = [whole(p) for p in trainer.model.parameters()]
    trainer.train()
    moved = [
        not torch.equal(a, whole(p)) for a, p in zip(start, trainer.model.parameters(), strict=True)
    ]
    assert all(moved)  # matrices by Muon, embeddings, norms and head by AdamW
    curve = losses(trainer)
    assert len(curve) == STEPS
    assert curve[-1] < curve[0] - 0.1
    return curve


def fsdp2(folder: Path) -> list[float]:
    from examples.hf_trainer import losses

    rank, world_size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    trainer = new_trainer(folder / "run")
    curve = watch(trainer)
    assert all(isinstance(p, DTensor) for p in trainer.model.parameters())
    optimizer = trainer.optimizer.optimizer
    assert "0-1    direct" in str(optimizer.plan)  # the plan is of the shards
    after = list(state_of(trainer.model, optimizer))

    again = new_trainer(folder / "again")
    again.train(resume_from_checkpoint=str(folder / "run" / f"checkpoint-{SAVED}"))
    assert losses(again) == curve
    resumed = list(state_of(again.model, again.optimizer.optimizer))
    assert all(map(torch.equal, resumed, after))  # bit by bit
    if rank == 0:
        torch.save(after, folder / "fsdp2.pt")
    return curve


def test_trainer_on_one_process_and_under_fsdp2(tmp_path: Path) -> None:
    """Both fall, resume to the same bits, and agree with each other and with a plain loop."""
    curves = run_ranks(2, fsdp2, tmp_path, timeout_s=100)
    assert curves[0] == curves[1]
    alone = run_ranks(1, one_process, tmp_path, timeout_s=100)[0]
    assert alone == pytest.approx(curves[0], rel=1e-4)


def one_process(folder: Path) -> list[float]:
    dist.destroy_process_group()
    trainer = new_trainer(folder / "alone")
    batches: list[dict[str, Tensor]] = []
    training_step = trainer.training_step

    def recorded(model: nn.Module, inputs: dict[str, Tensor], *rest: Any) -> Tensor:
        batches.append({name: value.clone() for name, value in inputs.items()})
        return training_step(model, inputs, *rest)

    trainer.training_step = recorded
    curve = watch(trainer)
    after = list(state_of(trainer.model, trainer.optimizer))
    again = new_trainer(folder / "alone again")
    again.train(resume_from_checkpoint=str(folder / "alone" / f"checkpoint-{SAVED}"))
    assert all(map(torch.equal, state_of(again.model, again.optimizer), after))
    assert distance(torch.load(folder / "fsdp2.pt"), after) < 1e-3
    assert len(batches) == STEPS
    assert distance(by_a_plain_loop(trainer, batches), after) < 1e-3
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    return curve
