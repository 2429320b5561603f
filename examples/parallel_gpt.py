# SPDX-License-Identifier: Apache-2.0
"""One GPT, six ways to spread it over ranks, and the optimizer is built the same for each.

``--layout`` is one of ``ddp``, ``fsdp`` (``fully_shard``), ``hsdp`` (replicas of FSDP groups),
``tp`` (``parallelize_module``), ``fsdp_tp`` (``fully_shard`` over tensor parallelism: the matrices
are then sharded twice, often along the same dim) and ``hsdp_tp`` (all three). The loss is the same
in all of them, and on any number of ranks.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs as a script, anywhere

from examples.gpt import GPT, Block, GPTConfig
from examples.small_run import MarkovText, Task, make_parser, run
from hyper_parallel import Muon, muon_param_groups

LAYOUTS = {
    "ddp": ("dp_replicate",),
    "fsdp": ("dp_shard",),
    "hsdp": ("dp_replicate", "dp_shard"),
    "tp": ("tp",),
    "fsdp_tp": ("dp_shard", "tp"),
    "hsdp_tp": ("dp_replicate", "dp_shard", "tp"),
}
"""The mesh axes of each layout, outermost first: tensor parallelism wants the fastest links."""


def make_mesh(layout: str, device_type: str) -> DeviceMesh:
    """Give each axis of a layout two ranks, and what is left over to ``dp_shard``.

    Args:
        layout: One of ``LAYOUTS``.
        device_type: ``"cpu"`` or ``"cuda"``.

    Returns:
        A mesh of all ranks, its axes named.

    Raises:
        ValueError: If there are too few ranks, or an odd number of them.
    """
    axes, num_ranks = LAYOUTS[layout], dist.get_world_size()
    sizes = dict.fromkeys(axes, min(2, num_ranks))
    grows = "dp_shard" if "dp_shard" in axes else axes[0]
    sizes[grows] = max(1, num_ranks // math.prod(sizes[axis] for axis in axes if axis != grows))
    if math.prod(sizes.values()) != num_ranks:
        raise ValueError(f"layout {layout} does not fit {num_ranks} ranks: it would be {sizes}")
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=axes)


def apply_tensor_parallel(model: GPT, mesh: DeviceMesh) -> None:
    """Split attention heads, hidden features and the token embedding over ``mesh``.

    Args:
        model: Its matrices become DTensors.
        mesh: The tensor parallel axis. Its size divides the number of heads.

    Raises:
        ValueError: If it does not.
    """
    block_plan: dict[str, ParallelStyle] = {
        "attention.query": ColwiseParallel(),  # Shard(0): rows of the weight, whole heads
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.project": RowwiseParallel(),  # Shard(1): columns, and a sum over ranks
        "mlp.expand": ColwiseParallel(),
        "mlp.project": RowwiseParallel(),
    }
    for block in model.blocks:
        assert isinstance(block, Block)
        if block.attention.num_heads % mesh.size():
            raise ValueError(f"{block.attention.num_heads} heads for {mesh.size()} ranks")
        block.attention.num_heads //= mesh.size()  # of this rank
        parallelize_module(block, mesh, block_plan)
    # By features, not by vocabulary. Position table, head and norms stay whole on every rank.
    parallelize_module(
        model, mesh, {"token_embedding": ColwiseParallel(output_layouts=Replicate())}
    )


def apply_fsdp(model: GPT, mesh: DeviceMesh) -> None:
    """Shard each block, then the rest, over a 1-D mesh, or over the last axis of a 2-D one."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def spread(model: GPT, layout: str, mesh: DeviceMesh) -> nn.Module:
    """Return the model in its layout. Tensor parallelism comes first, as ``fully_shard`` asks."""
    axes = LAYOUTS[layout]
    if "tp" in axes:
        apply_tensor_parallel(model, mesh["tp"])
    data_axes = tuple(axis for axis in axes if axis != "tp")
    if "dp_shard" in data_axes:
        apply_fsdp(model, mesh[data_axes] if data_axes != axes else mesh)
    return DistributedDataParallel(model) if layout == "ddp" else model


def build(arguments: argparse.Namespace, device: torch.device) -> Task:
    """Return model, optimizer and data, on each rank."""
    torch.manual_seed(arguments.seed)  # every rank draws the same weights, then keeps its part
    config = GPTConfig(context=32, width=arguments.width, num_layers=2, num_heads=4)
    mesh = make_mesh(arguments.layout, device.type)
    model = spread(GPT(config).to(device), arguments.layout, mesh)
    optimizer = Muon(
        muon_param_groups(model, adamw={"lr": arguments.adamw_lr}),
        lr=arguments.lr,
        adjust_lr_fn="match_rms_adamw",
        ns_dtype=getattr(torch, arguments.ns_dtype),
        # DDP's parameters are plain tensors, and do not say themselves where their replicas are.
        replicate_mesh=mesh if arguments.layout == "ddp" else None,
    )
    text = MarkovText(seed=arguments.seed, rows=arguments.batch, length=config.context)
    tp_size = mesh["tp"].size() if "tp" in LAYOUTS[arguments.layout] else 1
    return Task(model=model, optimizer=optimizer, batch_of=text.batch, model_ranks=tp_size)


def parser() -> argparse.ArgumentParser:
    """Return the parser of this example's options."""
    options = make_parser("parallel_gpt.py", "Train a small GPT in one of six parallel layouts.")
    options.add_argument("--layout", choices=LAYOUTS, default="fsdp", help="how to spread it")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run(parser(), build, argv)


if __name__ == "__main__":
    main()
