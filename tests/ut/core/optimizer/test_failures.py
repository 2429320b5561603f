# SPDX-License-Identifier: Apache-2.0
"""Failures that others met and that one process can show, each with the value that is right.

Those that need ranks are in ``tests/st/core/optimizer/test_failures.py``.
"""

import ast
import inspect
import pkgutil
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hyper_parallel import Muon, muon_param_groups
from hyper_parallel.core import optimizer as package
from tests.fake_group import fake_process_group
from tests.reference import JORDAN, ReferenceMuon, newton_schulz


@pytest.mark.parametrize(
    ("shape", "tiles"), [((16, 16), (2, 1)), ((16, 16), (1, 2)), ((8, 12), (2, 2))], ids=str
)
def test_shards_orthogonalized_for_themselves_are_far_from_the_whole(
    shape: tuple[int, int], tiles: tuple[int, int]
) -> None:
    """A01, A02: shard by shard the update is another one, so no tolerance in use can hide it."""
    matrix = torch.randn(shape, dtype=torch.float64)
    whole = newton_schulz(matrix, JORDAN)
    rows = [
        torch.cat([newton_schulz(tile, JORDAN) for tile in block.chunk(tiles[1], 1)], 1)
        for block in matrix.chunk(tiles[0])
    ]
    assert float((torch.cat(rows) - whole).norm() / whole.norm()) > 0.4


def test_gate_and_up_are_two_matrices_if_it_is_said() -> None:
    """A16: two projections in one tensor were coupled, and scaled as one of twice the rows."""
    start, grad = torch.randn(24, 8), torch.randn(24, 8)
    moves = []
    for view in (None, ("split", (12, 12))):
        p = nn.Parameter(start.clone())
        p.grad = grad.clone()
        Muon([p], lr=0.1, matrix_view=view, ns_dtype=torch.float64).step()
        moves.append(p.detach() - start)
    halves = ReferenceMuon([h.double().clone() for h in start.chunk(2)], lr=0.1)
    halves.step([h.double() for h in grad.chunk(2)])
    due = torch.cat(halves.params) - start
    assert float((moves[1] - due).norm() / due.norm()) < 1e-5
    assert float((moves[0] - due).norm() / due.norm()) > 0.3


@pytest.mark.parametrize("tag", ["adamw", "muon"])
def test_copies_on_two_stages_are_grouped_alike_by_their_tag(tag: str) -> None:
    """A24: the last stage's copy of an embedding was claimed by Muon, the first stage's not."""
    found = []
    for rank, name in ((0, "table"), (2, "copy")):
        with fake_process_group(4, rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))["data"]
            shared = nn.Embedding(9, 4) if name == "table" else nn.Linear(4, 9, bias=False)
            shared.optimizer_algorithm = tag  # type: ignore[assignment]
            stage = nn.ModuleDict({name: shared, "up": nn.Linear(4, 5, bias=False)})
            for module in stage.values():
                fully_shard(module, mesh=mesh)
            report = {r.fqn: r for r in muon_param_groups(stage).report}
            assert report[f"{name}.weight"].is_distributed
            assert report["up.weight"].algorithm == "muon"
            found.append(report[f"{name}.weight"].algorithm)
    assert found == [tag, tag]


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_state_lies_where_the_local_tensor_lies(algorithm: str) -> None:
    """C20: under offloading the mesh says CUDA, the data is elsewhere, and state followed the mesh.

    The meta device stands for the device that is not the mesh's.
    """
    with fake_process_group(2):
        mesh = init_device_mesh("cuda", (2,))
        local = torch.empty(2, 4, device="meta")
        whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        p = nn.Parameter(whole)
        optimizer = Muon([{"params": [p], "algorithm": algorithm}])
        keys = {"muon": ["momentum_buffer"], "adamw": ["exp_avg", "exp_avg_sq"]}
        for key in keys[algorithm]:
            state = optimizer.state[p][key]
            assert state.to_local().device == local.device
            assert state.to_local().shape == local.shape
            assert state.placements == whole.placements


def test_matrices_on_two_devices_are_refused_by_name() -> None:
    """C20: a part of the weights was offloaded, and kernels met tensors of two devices."""
    params = [("here", torch.ones(4, 8)), ("there", torch.ones(4, 8, device="meta"))]
    with pytest.raises(ValueError, match="one device per rank, got here on cpu, there on meta"):
        Muon([(name, nn.Parameter(value)) for name, value in params])


def test_a_parameter_that_is_not_reduced_is_refused_by_name() -> None:
    """A07: the local part of a sum was taken for the sum."""
    with fake_process_group(2):
        mesh = init_device_mesh("cpu", (2,))
        p = DTensor.from_local(torch.ones(4, 8), mesh, [Partial()], run_check=False)
        with pytest.raises(
            ValueError, match=r"layer\.weight: expected Shard or Replicate, got .*reduce it first"
        ):
            Muon([("layer.weight", nn.Parameter(p))])


def test_a_mesh_on_which_torch_contradicts_itself_is_refused_by_name() -> None:
    """A04: with ranks out of order, torch itself is of two minds about who holds which rows."""
    with fake_process_group(4):
        mesh = DeviceMesh("cpu", [[2, 0], [1, 3]])
        p = DTensor.from_local(torch.ones(4, 8), mesh, [Replicate(), Shard(0)], run_check=False)
        with pytest.raises(ValueError, match=r"layer\.weight: .*do not ascend along axis"):
            Muon([("layer.weight", nn.Parameter(p))])


@pytest.mark.parametrize("name", [m.name for m in pkgutil.iter_modules(package.__path__)])
def test_nothing_reads_the_private_local_part_of_a_dtensor(name: str) -> None:
    """B08: it may still be on its way; ``to_local()`` and plain operators wait for it."""
    source = inspect.getsource(import_module(f"{package.__name__}.{name}"))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            assert node.attr not in {"_local_tensor", "data_ptr"}, f"line {node.lineno}"
