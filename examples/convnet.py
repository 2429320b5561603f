# SPDX-License-Identifier: Apache-2.0
"""A convolutional net under FSDP: each kernel is one matrix, ``out x (in * height * width)``.

``muon_param_groups`` finds the convolutions by their type and gives them ``matrix_view="flatten"``;
the printed table says so. FSDP shards output channels, here unevenly on purpose: 18 channels on 4
ranks are 5, 5, 5 and 3.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import interpolate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs as a script, anywhere

from examples.small_run import Batch, Task, make_parser, run, say
from hyper_parallel import Muon, muon_param_groups

NUM_CLASSES = 10


class Blobs:
    """Images ``(3, 16, 16)`` of ten coarse patterns, each under noise of its own.

    Args:
        seed: Seed of the patterns and of the batches.
        rows: Images in a batch, over all ranks.
    """

    def __init__(self, *, seed: int, rows: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        coarse = torch.randn(NUM_CLASSES, 3, 4, 4, generator=generator)
        self._patterns = interpolate(coarse, scale_factor=4, mode="bilinear")
        self._seed, self._rows = seed, rows

    def batch(self, step: int) -> Batch:
        """Return the global batch of a step: images and their classes."""
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + step)
        classes = torch.randint(NUM_CLASSES, (self._rows,), generator=generator)
        noise = torch.randn(self._rows, 3, 16, 16, generator=generator)
        return self._patterns[classes] + 2 * noise, classes


def conv_block(num_in: int, num_out: int, *, stride: int) -> nn.Sequential:
    """Return convolution, norm and nonlinearity.

    The norm is over channels of one image. A batch norm would see another batch on each rank, and
    the loss would depend on their number.
    """
    return nn.Sequential(
        nn.Conv2d(num_in, num_out, kernel_size=3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(1, num_out),
        nn.GELU(),
    )


def build_model(width: int) -> nn.Sequential:
    """Return a net from ``(B, 3, 16, 16)`` images to ``(B, 10)`` logits."""
    return nn.Sequential(
        conv_block(3, width, stride=1),
        conv_block(width, 2 * width, stride=2),
        conv_block(2 * width, 2 * width, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Sequential(nn.Linear(2 * width, 4 * width), nn.GELU()),
        nn.Linear(4 * width, NUM_CLASSES),
    )


def build(arguments: argparse.Namespace, device: torch.device) -> Task:
    """Return model, optimizer and data, on each rank."""
    torch.manual_seed(arguments.seed)
    model = build_model(arguments.width).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for stage in model:
        if isinstance(stage, nn.Sequential):
            fully_shard(stage, mesh=mesh)
    fully_shard(model, mesh=mesh)

    # Nothing tells the last Linear from a hidden one, so it is named here: heads are AdamW's.
    head = f"{len(model) - 1}.*"
    groups = muon_param_groups(model, adamw={"lr": arguments.adamw_lr}, overrides={head: "adamw"})
    say(f"{groups}\n")
    optimizer = Muon(
        groups,
        lr=arguments.lr,
        adjust_lr_fn="match_rms_adamw",
        ns_dtype=getattr(torch, arguments.ns_dtype),
    )
    images = Blobs(seed=arguments.seed, rows=arguments.batch)
    return Task(model=model, optimizer=optimizer, batch_of=images.batch)


def parser() -> argparse.ArgumentParser:
    """Return the parser of this example's options."""
    options = make_parser("convnet.py", "Train a small convolutional net with fully_shard.")
    options.set_defaults(width=18, batch=64)
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run(parser(), build, argv)


if __name__ == "__main__":
    main()
