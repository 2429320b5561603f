# SPDX-License-Identifier: Apache-2.0
"""``hyper-parallel inspect`` on checkpoints that real ranks wrote."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hyper_parallel import Muon, muon_param_groups
from hyper_parallel.cli.main import main
from tests.dist import run_ranks

pytestmark = pytest.mark.dist


def write(folder: str) -> None:
    """Save a stepped model and its optimizer, nested, flattened, and with momentum lost."""
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 9))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = Muon(muon_param_groups(model), momentum_dtype=torch.bfloat16)
    model(torch.arange(4)).square().mean().backward()
    optimizer.step()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    states: dict[str, Any] = {
        "nested": get_optimizer_state_dict(model, optimizer),
        "flat": get_optimizer_state_dict(model, optimizer, options=flat),
    }
    states["lost"] = {k: v for k, v in states["flat"].items() if k != _LOST}
    for name, state in states.items():
        weights = get_model_state_dict(model)
        save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/{name}")


_LOST = "state.2.weight.momentum_buffer"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    run_ranks(2, write, str(folder))
    return folder


def inspected(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["inspect", str(path), "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


@pytest.mark.parametrize("form", ["nested", "flat"])
def test_inspect_finds_the_state_of_both_algorithms(
    form: str, checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = inspected(checkpoints / form, capsys)
    momentum = told["state"]["1.weight"]["momentum_buffer"]
    assert momentum == {"shape": [8, 8], "dtype": "bfloat16", "num_chunks": 2, "nbytes": 128}
    assert set(told["state"]["0.weight"]) == {"exp_avg", "exp_avg_sq", "step"}
    assert told["bytes_by_kind"]["momentum_buffer"] == 2 * 128
    assert (told["missing_momentum"], told["weights_without_state"]) == ([], [])
    assert len(told["weights"]) == 7
    assert any("ns_coefficients" in keys for keys in told["hyperparameters"].values())


def test_inspect_names_momentum_that_is_missing(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = inspected(checkpoints / "lost", capsys)
    assert told["missing_momentum"] == ["2.weight"]
    assert told["weights_without_state"] == ["model.2.weight"]
    assert main(["inspect", str(checkpoints / "lost")]) == 0
    text = capsys.readouterr().out
    assert "without momentum, though in a group of Muon: 1: 2.weight" in text
    assert "momentum_buffer  8x8" in text
