# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters on a frozen transformer with tied embeddings, under FSDP.

Each linear layer of the blocks computes ``W x + B A x`` with ``W`` frozen. ``A`` goes to AdamW, as
``muon_param_groups`` decides for adapters; ``B`` goes to Muon by an override. Embedding and head
share one parameter, which is trained by AdamW once, or frozen too with ``--freeze-embedding``.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import linear
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs as a script, anywhere

from examples.gpt import GPT, GPTConfig
from examples.small_run import MarkovText, Task, make_parser, run, say
from hyper_parallel import Muon, muon_param_groups


class LoRALinear(nn.Module):
    """A frozen linear layer with a trainable low-rank adapter, which starts as zero.

    Args:
        base: Its weight is frozen and kept.
        rank: Rows of ``A`` and columns of ``B``.
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(base.weight.detach(), requires_grad=False)
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight) + linear(linear(x, self.lora_A), self.lora_B)


def add_adapters(module: nn.Module, rank: int) -> None:
    """Replace every ``Linear`` below ``module``."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, LoRALinear(child, rank))
        else:
            add_adapters(child, rank)


def build_model(width: int, rank: int, *, freeze_embedding: bool) -> GPT:
    """Return a GPT of which adapters, and perhaps the tied embedding, are trained."""
    model = GPT(GPTConfig(context=32, width=width, num_layers=2, num_heads=4))
    model.head.weight = model.token_embedding.weight
    model.requires_grad_(requires_grad=False)
    model.token_embedding.requires_grad_(not freeze_embedding)
    add_adapters(model.blocks, rank)
    return model


def build(arguments: argparse.Namespace, device: torch.device) -> Task:
    """Return model, optimizer and data, on each rank."""
    torch.manual_seed(arguments.seed)
    model = build_model(
        arguments.width, arguments.rank, freeze_embedding=arguments.freeze_embedding
    ).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # the tied parameter stays one: both its places are in this call

    groups = muon_param_groups(
        model, adamw={"lr": arguments.adamw_lr}, overrides={"*.lora_B": "muon"}
    )
    say(f"{groups}\n")
    optimizer = Muon(
        groups,
        lr=arguments.lr,
        weight_decay=0.0,
        adjust_lr_fn="match_rms_adamw",
        ns_dtype=getattr(torch, arguments.ns_dtype),
    )
    text = MarkovText(seed=arguments.seed, rows=arguments.batch, length=model.config.context)
    return Task(model=model, optimizer=optimizer, batch_of=text.batch)


def parser() -> argparse.ArgumentParser:
    """Return the parser of this example's options."""
    options = make_parser("lora.py", "Train low-rank adapters on a frozen transformer.")
    options.add_argument("--rank", type=int, default=8, help="rank of the adapters")
    options.add_argument(
        "--freeze-embedding", action="store_true", help="train nothing but the adapters"
    )
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run(parser(), build, argv)


if __name__ == "__main__":
    main()
