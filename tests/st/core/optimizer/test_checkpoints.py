# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that load anywhere: from every layout to every other, in every way that torch has."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hyper_parallel import Muon
from tests.checkpoint_runs import (
    LAYOUTS,
    assert_state_is,
    build,
    train,
    whole_state,
    whole_weights,
)
from tests.pool import Pools, pools

pytestmark = pytest.mark.dist

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)

# Every kind of layout; enough for the ways that share most of their code with the first one.
KINDS = ("one process", "FSDP 3", "HSDP 2x2, momentum once", "DDP 2", "FSDP x TP 2x2")


def save_sharded(folder: Path, model: nn.Module, optimizer: Muon) -> None:
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp_save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load_sharded(folder: Path, model: nn.Module, optimizer: Muon) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    dcp_load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def save_flat(folder: Path, model: nn.Module, optimizer: Muon) -> None:
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }
    dcp_save(state, checkpoint_id=folder)


def load_flat(folder: Path, model: nn.Module, optimizer: Muon) -> None:
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }
    dcp_load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)


@cache
def background_group() -> dist.ProcessGroup:
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


def save_in_the_background(folder: Path, model: nn.Module, optimizer: Muon) -> None:
    """Steps go on while the files are written; they must hold the state from before.

    The ranks that write agree over a group of their own: on the group of the steps, messages of
    both would meet, and gloo hangs.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    written = async_save(
        {"model": model_state, "optimizer": optimizer_state},
        checkpoint_id=folder,
        process_group=background_group(),
    )
    train(model, optimizer, range(3, 4))
    assert isinstance(written, Future)
    written.result()


def save_raw(folder: Path, model: nn.Module, optimizer: Muon) -> None:
    state = {"model": get_model_state_dict(model), "optimizer": optimizer.state_dict()}
    dcp_save(state, checkpoint_id=folder)


def load_raw(folder: Path, model: nn.Module, optimizer: Muon) -> None:
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": optimizer.state_dict(),
    }
    dcp_load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    optimizer.load_state_dict(state["optimizer"])


def save_whole(folder: Path, model: nn.Module, optimizer: Muon) -> None:
    state = get_state_dict(model, optimizer, options=FULL)
    if dist.get_rank() == 0:
        folder.mkdir()
        torch.save(state, folder / "whole.pt")


def load_whole(folder: Path, model: nn.Module, optimizer: Muon) -> None:
    model_state, optimizer_state = torch.load(folder / "whole.pt", weights_only=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=FULL,
    )


def load_from_rank_0(folder: Path, model: nn.Module, optimizer: Muon) -> None:
    """In two calls: ``set_state_dict`` takes an empty dict for "no model here", and rank 0 waits.

    That is so in torch 2.13, whatever the optimizer.
    """
    model_state, optimizer_state = {}, {}
    if dist.get_rank() == 0:
        model_state, optimizer_state = torch.load(folder / "whole.pt", weights_only=True)
    set_model_state_dict(model, model_state, options=FROM_RANK_0)
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=FROM_RANK_0)


def load_plainly(folder: Path, model: nn.Module, optimizer: Muon) -> None:
    """Whole tensors straight into ``load_state_dict``: each rank cuts its part."""
    model_state, optimizer_state = torch.load(folder / "whole.pt", weights_only=True)
    set_model_state_dict(model, model_state if dist.get_rank() == 0 else {}, options=FROM_RANK_0)
    number = {name: i for i, name in enumerate(optimizer_state["state"])}
    optimizer.load_state_dict(
        {
            "state": {number[name]: state for name, state in optimizer_state["state"].items()},
            "param_groups": [
                {**group, "params": [number[name] for name in group["params"]]}
                for group in optimizer_state["param_groups"]
            ],
        }
    )


Save = Callable[[Path, nn.Module, Muon], None]
SAVES: dict[str, Save] = {
    "sharded": save_sharded,
    "flat": save_flat,
    "background": save_in_the_background,
    "raw": save_raw,
    "whole": save_whole,
}
LOADS: dict[str, tuple[str, Save]] = {
    "get_state_dict, set_state_dict": ("sharded", load_sharded),
    "flattened": ("flat", load_flat),
    "async_save": ("background", load_sharded),
    "state_dict, load_state_dict": ("raw", load_raw),
    "full_state_dict, cpu_offload": ("whole", load_whole),
    "broadcast_from_rank0": ("whole", load_from_rank_0),
    "whole tensors, load_state_dict": ("whole", load_plainly),
}


def save(folder: str, layout: str, ways: list[str]) -> None:
    """Train and save; beside the checkpoints, what state and weights are, and two steps later."""
    model, optimizer = build(LAYOUTS[layout])
    train(model, optimizer, range(3))
    state, weights = whole_state(model, optimizer), whole_weights(model)
    train(model, optimizer, range(3, 5))
    later = whole_weights(model)
    for way in ways:
        Path(folder).mkdir(exist_ok=True)
        model, optimizer = build(LAYOUTS[layout])
        train(model, optimizer, range(3))
        SAVES[way](Path(folder, way), model, optimizer)
    if dist.get_rank() == 0:
        torch.save((state, weights, later), Path(folder, "due.pt"))
    dist.barrier()


def load(folders: dict[str, str], layout: str, way: str, steps: range) -> None:
    """Load each checkpoint into a fresh optimizer and go on."""
    saved_as, load_into = LOADS[way]
    for source, folder in folders.items():
        model, optimizer = build(LAYOUTS[layout], lr=7.0)
        state, weights, later = torch.load(Path(folder, "due.pt"), weights_only=True)
        load_into(Path(folder, saved_as), model, optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01, 0.05], source
        assert_state_is(model, optimizer, state)
        assert_equal(whole_weights(model), weights, source)
        train(model, optimizer, steps)
        if steps and source == layout:
            assert_equal(whole_weights(model), later, source)
        elif steps:
            for name, weight in whole_weights(model).items():
                torch.testing.assert_close(weight, later[name], rtol=1e-5, atol=1e-6)


def assert_equal(have: dict[str, Tensor], due: dict[str, Tensor], source: str) -> None:
    assert have.keys() == due.keys()
    for name in due:
        assert torch.equal(have[name], due[name]), (source, name)


class Checkpoints:
    """Checkpoints of all layouts, written when a test first asks for them."""

    def __init__(self, ranks: Pools, folder: Path) -> None:
        self.ranks = ranks
        self._folder = folder

    def of(self, layout: str) -> str:
        folder = self._folder / layout
        if not (folder / "due.pt").exists():
            ways = list(SAVES) if layout in KINDS else ["sharded"]
            self.ranks.run(LAYOUTS[layout].num_ranks, save, str(folder), layout, ways)
        return str(folder)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoints]:
    with pools() as ranks:
        yield Checkpoints(ranks, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_from_a_checkpoint_of_every_layout(
    checkpoints: Checkpoints, layout: str
) -> None:
    """D01, D03, D05, D07: other ranks, meshes, placements and homes of the momentum.

    State and weights have the same bits after each of the 121 moves. The run that goes on equals
    the uninterrupted one: bit for bit on the layout that it was saved on, and within float32's
    rounding of the gradients elsewhere.
    """
    folders = {source: checkpoints.of(source) for source in LAYOUTS}
    checkpoints.ranks.run(
        LAYOUTS[layout].num_ranks,
        load,
        folders,
        layout,
        "get_state_dict, set_state_dict",
        range(3, 5),
    )


WAYS = [(layout, way) for layout in KINDS for way in list(LOADS)[1:]]
WAYS.remove(("FSDP x TP 2x2", "full_state_dict, cpu_offload"))


@pytest.mark.parametrize(("layout", "way"), WAYS)
def test_every_way_to_save_and_load_keeps_all_bits(
    checkpoints: Checkpoints, layout: str, way: str
) -> None:
    """D03, D10: every way that torch has, from each kind of layout; settings come back too."""
    folders = {source: checkpoints.of(source) for source in KINDS}
    checkpoints.ranks.run(LAYOUTS[layout].num_ranks, load, folders, layout, way, range(0))


def cut_whole_weights(folder: str) -> None:
    model, optimizer = build(LAYOUTS["FSDP x TP 2x2"])
    with pytest.raises(AssertionError) as caught:
        load_whole(Path(folder, "whole"), model, optimizer)
    assert caught.traceback[-1].name == "_shard_tensor"


def test_torch_cannot_cut_whole_tensors_into_uneven_strided_shards(
    checkpoints: Checkpoints,
) -> None:
    """``full_state_dict`` on FSDP over column-wise TP, if rows do not divide: torch 2.13 raises.

    ``distribute_tensor`` scatters strided shards of one size only; the weights fail as the state
    would. Ways round it, which the test above holds: ``broadcast_from_rank0``, sharded checkpoints,
    and for the state ``load_state_dict`` with whole tensors.
    """
    folder = checkpoints.of("FSDP x TP 2x2")
    checkpoints.ranks.run(4, cut_whole_weights, folder)
