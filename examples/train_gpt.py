# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT on text bytes, sharded with ``fully_shard``: Muon against AdamW.

One process, or one per core or GPU, by the same file::

    python examples/train_gpt.py
    torchrun --nproc-per-node 2 examples/train_gpt.py --optimizer adamw
    torchrun --nproc-per-node 8 examples/train_gpt.py --mesh dp_replicate=2,dp_shard=4

Weights and batches depend on ``--seed`` alone and each process takes its slice of the global
batch, so any number of processes follows the same training curve. With ``--auto-resume`` the run
may be killed at any moment: the same command goes on from the last complete checkpoint, on as many
processes as there are, and nobody can tell from the weights::

    torchrun --nproc-per-node 2 --max-restarts 10 examples/train_gpt.py --auto-resume
"""

import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs as a script, anywhere

from examples.checkpoint import TrainingState, load_checkpoint, newest_checkpoint, save_checkpoint
from examples.gpt import GPT, GPTConfig, generate
from examples.options import Options, parse_train_options, write_options
from examples.processes import exit_with, start_process_group
from examples.run_log import Record, RunLog
from examples.text_data import Split, TextData, load_text
from hyper_parallel import Muon, muon_param_groups

_ADAMW_BETAS = (0.9, 0.95)
_FINAL_LR = 0.1  # of the peak, where the cosine ends


def build_model(options: Options, device: torch.device) -> GPT:
    """Return the GPT, drawn the same on every rank, then reduced to this rank's shards."""
    torch.manual_seed(options.seed)
    config = GPTConfig(
        context=options.context,
        width=options.width,
        num_layers=options.layers,
        num_heads=options.heads,
        dropout=options.dropout,
    )
    model = GPT(config).to(device)
    mesh = init_device_mesh(
        device.type, tuple(options.mesh.values()), mesh_dim_names=tuple(options.mesh)
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def build_optimizer(model: nn.Module, options: Options) -> tuple[Optimizer, str]:
    """Return one optimizer for the whole model, and in words what it does with each parameter."""
    adamw = {"lr": options.adamw_lr, "betas": _ADAMW_BETAS, "weight_decay": options.weight_decay}
    if options.optimizer == "adamw":
        optimizer = AdamW([{"params": model.parameters(), **adamw}])
        return optimizer, str(optimizer)
    groups = muon_param_groups(model, adamw=adamw)
    muon = Muon(
        groups,
        lr=options.lr,
        weight_decay=options.weight_decay,
        adjust_lr_fn="match_rms_adamw",
        ns_dtype=getattr(torch, options.ns_dtype),
    )
    return muon, f"{groups.report_table()}\n\n{muon.plan}"


def lr_factor(step: int, options: Options) -> float:
    """Return the share of the peak learning rate at ``step``, from 0: warm-up, then cosine."""
    if step < options.warmup:
        return (step + 1) / options.warmup
    progress = (step - options.warmup) / (options.steps - options.warmup)
    return _FINAL_LR + (1 - _FINAL_LR) * (1 + math.cos(math.pi * progress)) / 2


def local_batch(
    data: TextData, split: Split, index: int, *, options: Options, device: torch.device
) -> Tensor:
    """Return this rank's rows of a global batch, ``(batch / ranks, context + 1)`` int64."""
    seed = options.seed if split == "train" else 0  # every run is judged by the same batches
    rows = data.batch(split, index=index, seed=seed, size=options.batch, context=options.context)
    return torch.from_numpy(rows).chunk(dist.get_world_size())[dist.get_rank()].to(device)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next byte, in nats, over this rank's ``batch``."""
    logits = model(batch[:, :-1])
    return cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def global_mean(value: Tensor) -> float:
    """Return the mean over the ranks, which hold equal slices of the global batch."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def seed_step(options: Options, step: int) -> None:
    """Make what this rank draws in a step a function of seed, step and rank: no state to save."""
    entropy = np.random.SeedSequence([options.seed, step, dist.get_rank()])
    torch.manual_seed(int(entropy.generate_state(1)[0]))


def now(device: torch.device) -> float:
    """Return the seconds on a clock, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def train_step(state: TrainingState, batch: Tensor, *, options: Options) -> Record:
    """Return what one optimizer step on this rank's ``batch`` measured."""
    start_s = now(batch.device)
    seed_step(options, state.step)
    lr = state.scheduler.get_last_lr()[0]
    loss = loss_of(state.model, batch)
    loss.backward()
    clip_grad_norm_(state.model.parameters(), options.clip)
    before_s = now(batch.device)
    state.optimizer.step()
    optimizer_s = now(batch.device) - before_s  # with the wait for other ranks
    state.scheduler.step()
    state.optimizer.zero_grad()
    state.step += 1
    mean_loss = global_mean(loss)
    step_s = now(batch.device) - start_s
    return {
        "step": state.step,
        "loss": mean_loss,
        "lr": lr,
        "tokens_per_s": options.batch * options.context / step_s,
        "step_s": step_s,
        "optimizer_s": optimizer_s,
    }


@torch.no_grad()
def validation_loss(model: nn.Module, batches: Sequence[Tensor]) -> float:
    """Return the mean loss over this rank's slices of the validation batches, in nats per byte."""
    model.eval()
    losses = [loss_of(model, batch) for batch in batches]
    model.train()
    return global_mean(torch.stack(losses).mean())


def sample_text(model: nn.Module, options: Options, device: torch.device) -> str:
    """Return two continuations of the prompt. Every rank calls: a forward needs all shards."""
    assert isinstance(model, FSDPModule)
    model.eval()
    model.set_reshard_after_forward(False)  # gather the weights once, not for every byte
    prompt = torch.tensor(list(options.prompt.encode()), device=device)
    rows = generate(
        model,
        prompt.expand(2, -1),
        num_new=options.sample_bytes,
        context=options.context,
        generator=torch.Generator().manual_seed(options.seed),
    )
    texts = [bytes(row).decode(errors="replace") for row in rows.tolist()]
    return "\n".join(f"--- sample {i} ---\n{text}" for i, text in enumerate(texts, 1))


def train(options: Options, data: TextData, device: torch.device) -> None:
    """Train, validate and checkpoint; leave ``metrics.jsonl`` and more in the run's folder.

    Args:
        options: Checked against the number of ranks.
        data: The same text on every rank.
        device: This rank's; there is a process group for it.
    """
    model = build_model(options, device)
    optimizer, plan = build_optimizer(model, options)
    scheduler = LambdaLR(optimizer, lambda step: lr_factor(step, options))
    state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)
    if options.resume or (options.auto_resume and has_checkpoint(options.run_dir)):
        load_checkpoint(state, options.run_dir)
    log = RunLog(
        options.run_dir,
        is_first_rank=dist.get_rank() == 0,
        num_steps=options.steps,
        steps_done=state.step,
        log_every=options.log_every,
    )
    if dist.get_rank() == 0:
        write_options(options)
        (options.run_dir / "plan.txt").write_text(plan + "\n")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    log.say(
        f"{options.optimizer}: {num_parameters:,} parameters, mesh {options.mesh}, "
        f"{len(data.train):,} training bytes in {data.num_files} files"
    )
    validation = [
        local_batch(data, "validation", index, options=options, device=device)
        for index in range(options.eval_batches)
    ]
    with log:
        while state.step < options.steps:
            batch = local_batch(data, "train", state.step, options=options, device=device)
            record = train_step(state, batch, options=options)
            if is_due(state.step, options.eval_every, options):
                record["val_loss"] = validation_loss(model, validation)
            log.add(record)
            if is_due(state.step, options.checkpoint_every, options):
                save_checkpoint(state, options.run_dir)
    log.summarize(num_parameters=num_parameters)
    if options.sample_bytes:
        log.say(sample_text(model, options, device))
    log.say(f"results in {options.run_dir}")


def has_checkpoint(run_dir: Path) -> bool:
    """Return whether a run can be continued."""
    try:
        newest_checkpoint(run_dir)
    except ValueError:
        return False
    return True


def is_due(step: int, every: int, options: Options) -> bool:
    """Return whether ``step`` is a multiple of ``every`` or the last one; never if that is 0."""
    return every > 0 and (step % every == 0 or step == options.steps)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    try:
        options = parse_train_options(argv, world_size=int(os.environ.get("WORLD_SIZE", "1")))
        data = load_text(options.data, context=options.context)
        if options.resume:
            newest_checkpoint(options.run_dir)
        options.run_dir.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        exit_with(error)
    device = start_process_group(timeout_s=options.timeout)
    try:
        train(options, data, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
