# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts under expert parallelism and FSDP: two meshes in one optimizer.

The experts of a layer are stacked in 3-D parameters, ``(experts, in, out)``. Each ``ep`` rank has
some of them, and ``fully_shard`` shards those again over the other ranks (``dp``), by experts or,
with ``--expert-shard-dim 1``, by rows: the second is what you need when a rank has fewer experts
than ``dp`` has ranks. All else is under FSDP over all ranks. Muon sees a stack of matrices, of
which each expert's is orthogonalized once, by one rank.

Shape legend: ``B`` sequences, ``T`` positions, ``D`` width, ``H`` hidden features, ``E`` experts,
``N`` tokens of this rank, ``M`` tokens of all ranks of its ``ep`` group.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.functional import gelu
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs as a script, anywhere

from examples.gpt import GPT, Block, GPTConfig
from examples.small_run import MarkovText, Task, make_parser, run, say
from hyper_parallel import Muon, muon_param_groups


class Experts(nn.Module):
    """The experts that this ``ep`` rank has, each a two-layer MLP.

    Args:
        num_experts: Over all ranks.
        width: ``D``.
        hidden: ``H``.
        ep_mesh: The ``ep`` axis.
    """

    def __init__(self, num_experts: int, width: int, hidden: int, ep_mesh: DeviceMesh) -> None:
        super().__init__()
        self.ep_mesh = ep_mesh
        expand = torch.randn(num_experts, width, hidden) * width**-0.5
        project = torch.randn(num_experts, hidden, width) * hidden**-0.5
        # Every rank drew the same stacks, so nothing need be sent.
        self.expand, self.project = (
            nn.Parameter(distribute_tensor(stack, ep_mesh, [Shard(0)], src_data_rank=None))
            for stack in (expand, project)
        )

    @override
    def forward(self, tokens: Tensor, gates: Tensor) -> Tensor:
        """Map ``(M, D)`` tokens and ``(M, E / ep)`` gates to these experts' part of the output."""
        hidden = gelu(tokens @ self._local(self.expand))  # (E / ep, M, H)
        outputs = hidden @ self._local(self.project)
        return (gates.T.unsqueeze(-1) * outputs).sum(0)

    def _local(self, stack: Tensor) -> Tensor:
        """This rank's experts of a stack that FSDP has gathered."""
        assert isinstance(stack, DTensor)
        local = stack.to_local()
        if local.requires_grad:
            # A loss is a mean over one rank's tokens, and here come those of all ep ranks. FSDP
            # takes the mean of what the dp ranks have.
            local.register_hook(lambda grad: grad / self.ep_mesh.size())
        return local


class MixtureOfExperts(nn.Module):
    """Two experts a token, ``(B, T, D)`` to ``(B, T, D)``.

    Every rank runs its experts on all tokens of its ``ep`` group. That is simple, and wasteful with
    many experts: real dispatch sends a token only to the experts that it has chosen. The exchanges
    are DTensor redistributions, and therefore differentiable.
    """

    def __init__(self, num_experts: int, width: int, ep_mesh: DeviceMesh) -> None:
        super().__init__()
        self.ep_mesh = ep_mesh
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = Experts(num_experts, width, 2 * width, ep_mesh)

    @override
    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)  # (N, D)
        scores, chosen = self.router(tokens).softmax(-1).topk(2)
        gates = scores.new_zeros(len(tokens), self.router.out_features)
        gates = gates.scatter(-1, chosen, scores)  # (N, E)
        our_gates = self._gather(gates).chunk(self.ep_mesh.size(), dim=-1)
        output = self.experts(self._gather(tokens), our_gates[self.ep_mesh.get_local_rank()])
        return self._sum_and_scatter(output).view_as(x)

    def _gather(self, rows: Tensor) -> Tensor:
        """``(N, ...)`` of each rank to ``(M, ...)``; backwards, the ranks' gradients are summed."""
        gathered = DTensor.from_local(rows, self.ep_mesh, [Shard(0)])
        gathered = gathered.redistribute(placements=[Replicate()])
        return gathered.to_local(grad_placements=[Partial()])

    def _sum_and_scatter(self, rows: Tensor) -> Tensor:
        """The sum of all ranks' ``(M, D)``, of which each keeps its own ``(N, D)``."""
        summed = DTensor.from_local(rows, self.ep_mesh, [Partial()])
        return summed.redistribute(placements=[Shard(0)]).to_local()


def shard(model: GPT, dp_mesh: DeviceMesh, world_mesh: DeviceMesh, expert_dim: int) -> None:
    """Apply ``fully_shard``: experts over ``dp``, all else over all ranks.

    Args:
        model: Its blocks have a ``MixtureOfExperts`` each.
        dp_mesh: The ranks that have the same experts.
        world_mesh: All ranks.
        expert_dim: Dim of the stacks to shard over ``dp_mesh``: 0 is experts, 1 is rows.
    """
    for block in model.blocks:
        assert isinstance(block, Block)
        assert isinstance(block.mlp.experts, Experts)
        fully_shard(block.mlp.experts, mesh=dp_mesh, shard_placement_fn=lambda _: Shard(expert_dim))
        fully_shard(block, mesh=world_mesh)
    fully_shard(model, mesh=world_mesh)


def build(arguments: argparse.Namespace, device: torch.device) -> Task:
    """Return model, optimizer and data, on each rank."""
    num_ranks = dist.get_world_size()
    ep_size = min(arguments.ep, num_ranks)
    mesh = init_device_mesh(
        device.type, (num_ranks // ep_size, ep_size), mesh_dim_names=("dp", "ep")
    )
    world_mesh = init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("world",))

    torch.manual_seed(arguments.seed)
    config = GPTConfig(context=32, width=arguments.width, num_layers=2, num_heads=4)
    model = GPT(config)
    for block in model.blocks:
        block.mlp = MixtureOfExperts(arguments.experts, config.width, mesh["ep"])
    shard(model.to(device), mesh["dp"], world_mesh, arguments.expert_shard_dim)

    groups = muon_param_groups(model, adamw={"lr": arguments.adamw_lr}, routers="adamw")
    say(f"{groups}\n")
    optimizer = Muon(
        groups,
        lr=arguments.lr,
        adjust_lr_fn="match_rms_adamw",
        ns_dtype=getattr(torch, arguments.ns_dtype),
    )
    text = MarkovText(seed=arguments.seed, rows=arguments.batch, length=config.context)
    return Task(model=model, optimizer=optimizer, batch_of=text.batch)


def parser() -> argparse.ArgumentParser:
    """Return the parser of this example's options."""
    options = make_parser("moe.py", "Train a small mixture of experts under EP x FSDP.")
    options.add_argument("--experts", type=int, default=8, help="experts a layer")
    options.add_argument("--ep", type=int, default=2, help="ranks that split the experts")
    options.add_argument(
        "--expert-shard-dim",
        type=int,
        choices=(0, 1),
        default=0,
        help="what FSDP shards of a stack of experts: 0 is experts, 1 is rows",
    )
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run(parser(), build, argv)


if __name__ == "__main__":
    main()
