# SPDX-License-Identifier: Apache-2.0
"""A small model that an ``ndim`` or name test sorts wrongly, and ways to ask how it was sorted."""

import warnings
from typing import Any

import torch
from torch import nn

from hyper_parallel.core.optimizer.param_groups import MuonParamGroups, muon_param_groups


class Experts(nn.Module):
    def __init__(self, num_experts: int, rows: int, cols: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(num_experts, rows, cols))
        self.w1_bias = nn.Parameter(torch.zeros(num_experts, cols))


class MoE(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4, bias=False)
        self.experts = Experts(4, width, 6)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, width)
        self.gate_proj = nn.Linear(width, 3 * width, bias=False)
        self.moe = MoE(width)
        self.gain = nn.Parameter(torch.zeros(width, 1, 1))


class Model(nn.Module):
    """Names that mislead: a table that is an embedding, outputs that are hidden."""

    def __init__(self, width: int = 8, vocabulary: int = 12) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, width))
        self.stem = nn.Conv2d(3, width, 2)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.temperature = nn.Parameter(torch.zeros(()))
        self.value = nn.Linear(width, 1)
        self.proj = nn.Linear(width, vocabulary, bias=False)
        self.proj.weight = self.table.weight


MUON = {
    "stem.weight",
    *(f"layers.{i}.{name}.weight" for i in range(2) for name in ("output", "gate_proj")),
    *(f"layers.{i}.moe.{name}" for i in range(2) for name in ("gate.weight", "experts.w1")),
}


def names(groups: MuonParamGroups, algorithm: str) -> list[str]:
    return [fqn for g in groups if g["algorithm"] == algorithm for fqn, _ in g["params"]]


def reasons(groups: MuonParamGroups) -> dict[str, str]:
    return {record.fqn: f"{record.algorithm}: {record.reason}" for record in groups.report}


def algorithms(model: nn.Module, **options: Any) -> dict[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # small models without any matrix
        groups = muon_param_groups(model, **options)
    return {record.fqn: record.algorithm for record in groups.report}
