# SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning: on one process and with FSDP2, and again from its checkpoint."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from examples.text_data import load_text
from tests.checkpoint_runs import state_of
from tests.dist import run_ranks

pytest.importorskip("lightning", reason="pip install 'hyper-parallel[integrations]'")

# Lightning 2.6 itself uses what torch 2.13 has deprecated.
pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TEXT = Path(__file__).resolve().parents[3] / "examples"
STEPS, BATCH, SAVED = 6, 4, 3


def new_module() -> Any:
    from examples.lightning_gpt import CONFIG, LightningGPT

    data = load_text(TEXT, context=CONFIG.context)
    return LightningGPT(data, steps=STEPS, batch=BATCH)


def fit(folder: Path, *, resume: Path | None = None) -> tuple[list[float], list[Tensor], Any]:
    from examples.lightning_gpt import build_trainer

    module = new_module()
    trainer = build_trainer(folder, steps=STEPS, save_every=SAVED)
    trainer.fit(module, ckpt_path=resume, weights_only=False)
    (optimizer,) = trainer.optimizers
    return module.losses, list(state_of(module, optimizer)), optimizer


def fsdp2(folder: Path) -> list[float]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    losses, after, optimizer = fit(folder / "run")
    assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    assert {group["algorithm"] for group in optimizer.param_groups} == {"muon", "adamw"}
    again, resumed, _ = fit(folder / "again", resume=folder / "run" / f"step={SAVED}.ckpt")
    assert again == losses[SAVED:]
    assert all(map(torch.equal, resumed, after))  # bit by bit
    if rank == 0:
        torch.save(after, folder / "fsdp2.pt")
    return losses


def one_process(folder: Path) -> list[float]:
    dist.destroy_process_group()
    losses, after, _ = fit(folder / "alone")
    again, resumed, _ = fit(folder / "again", resume=folder / "alone" / f"step={SAVED}.ckpt")
    assert again == losses[SAVED:]
    assert all(map(torch.equal, resumed, after))
    plain_losses, plain = by_a_plain_loop()
    assert plain_losses == losses
    assert all(map(torch.equal, plain, after))
    assert distance(torch.load(folder / "fsdp2.pt"), after) < 1e-3
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    return losses


def by_a_plain_loop() -> tuple[list[float], list[Tensor]]:
    module = new_module()
    (optimizer,), (schedule,) = module.configure_optimizers()
    losses = []
    for rows in map(module.rows, range(STEPS)):
        loss = cross_entropy(module.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule["scheduler"].step()
        losses.append(loss.item())
    return losses, list(state_of(module, optimizer))


def distance(tensors: list[Tensor], others: list[Tensor]) -> float:
    pairs = list(zip(tensors, others, strict=True))
    return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)


def test_lightning_on_one_process_and_with_fsdp2(tmp_path: Path) -> None:
    """Both fall, resume to the same bits, and agree with each other and with a plain loop."""
    of_ranks = run_ranks(2, fsdp2, tmp_path, timeout_s=100)
    together = [sum(losses) / 2 for losses in zip(*of_ranks, strict=True)]
    assert together[-1] < together[0] - 0.1
    (alone,) = run_ranks(1, one_process, tmp_path, timeout_s=100)
    assert alone == pytest.approx(together, rel=1e-4)
