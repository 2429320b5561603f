# SPDX-License-Identifier: Apache-2.0
"""What a killed rank, a full disk and a damaged file leave: the checkpoint before, whole.

Two FSDP ranks save after step 2, train to step 4 and fail while they save again. What a fault costs
is the two steps since the last checkpoint; of the state, nothing is lost.
"""

import os
import resource
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from examples import checkpoint
from examples.checkpoint import (
    TrainingState,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
    start_checkpoint,
)
from tests.checkpoint_runs import (
    LAYOUTS,
    State,
    assert_state_is,
    build,
    train,
    whole_state,
    whole_weights,
)
from tests.dist import Failure, run_ranks_outcomes
from tests.pool import Pools

pytestmark = pytest.mark.dist

SECONDS_TO_AN_ERROR = 20.0
"""Most that the others may take to say that a rank is gone; 0.1 s on an idle machine."""

Due = tuple[State, dict[str, Any], float]


def new_run(layout: str) -> TrainingState:
    model, optimizer = build(LAYOUTS[layout])
    scheduler: LRScheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)


def go_on(state: TrainingState, num_steps: int) -> None:
    for number in range(state.step, state.step + num_steps):
        train(state.model, state.optimizer, range(number, number + 1))
        state.scheduler.step()
    state.step += num_steps


def what_is(state: TrainingState) -> Due:
    due = whole_state(state.model, state.optimizer), whole_weights(state.model)
    return *due, float(state.scheduler.get_last_lr()[0])


@cache
def own_group() -> dist.ProcessGroup:
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


def save_in_background(state: TrainingState, run_dir: Path) -> None:
    start_checkpoint(state, run_dir, own_group()).finish()


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(function: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **options: Any) -> Any:
        value = function(*args, **options)
        then()
        return value

    return both


def no_room() -> None:
    """No file of this process may grow beyond 2 kB; writing more is an OSError."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


FAULTS: dict[str, tuple[int, str, Callable[..., Any]]] = {
    "killed before it writes": (1, "write_data", die),
    "killed after it wrote": (1, "write_data", after(FileSystemWriter.write_data, die)),
    "killed before all is known": (0, "finish", die),
    "killed before the rename": (0, "finish", after(FileSystemWriter.finish, die)),
    "no room on the disk": (1, "write_data", FileSystemWriter.write_data),
}


def fail_while_saving(run_dir: str, fault: str, in_background: bool) -> float:
    """What a rank goes through; seconds until it knew, for one that lives."""
    rank, method, instead = FAULTS[fault]
    state = new_run("FSDP 2")
    go_on(state, 2)
    save_checkpoint(state, Path(run_dir))
    due = what_is(state)
    if dist.get_rank() == 0:
        torch.save(due, Path(run_dir, "due.pt"))
    go_on(state, 2)
    own_group()
    dist.barrier()
    started = time.monotonic()
    if dist.get_rank() == rank and fault.startswith("no room"):
        no_room()
    elif dist.get_rank() == rank:
        mock.patch.object(FileSystemWriter, method, instead).start()
    save = save_in_background if in_background else save_checkpoint
    with pytest.raises(RuntimeError, match="step_00000004 was not written; those from before"):
        save(state, Path(run_dir))
    return time.monotonic() - started


def assert_resumes(run_dir: str, layout: str) -> str:
    """The state of step 2 in full, and a checkpoint of step 4 that can be written now."""
    state = new_run(layout)
    folder = load_checkpoint(state, Path(run_dir))
    *due, lr = torch.load(Path(run_dir, "due.pt"), weights_only=True)
    assert state.step == 2
    assert_state_is(state.model, state.optimizer, due[0])
    weights = whole_weights(state.model)
    assert all(torch.equal(weights[name], due[1][name]) for name in due[1])
    assert state.scheduler.get_last_lr()[0] == lr
    go_on(state, 2)
    save_checkpoint(state, Path(run_dir))
    return folder.name


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("in_background", [False, True])
def test_a_fault_while_saving_leaves_the_checkpoint_before(
    ranks: Pools, tmp_path: Path, fault: str, in_background: bool
) -> None:
    """Steps lost: those since the last checkpoint. State lost: none. Time to an error: below 20 s.

    The run goes on, on another number of ranks, and its next checkpoint takes the place of what the
    fault left. ``save`` and ``async_save`` alike.
    """
    outcomes = run_ranks_outcomes(2, fail_while_saving, str(tmp_path), fault, in_background)
    rank = FAULTS[fault][0]
    for number, outcome in enumerate(outcomes):
        if number == rank and fault.startswith("killed"):
            assert isinstance(outcome, Failure)
            assert outcome.kind == "Died", outcome.trace
        else:
            assert not isinstance(outcome, Failure), outcome.trace
            assert outcome < SECONDS_TO_AN_ERROR
    assert newest_checkpoint(tmp_path).name == "step_00000002"
    assert ranks.run(3, assert_resumes, str(tmp_path), "FSDP 3") == ["step_00000002"] * 3
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_00000002", "step_00000004"]


def save_twice(run_dir: str) -> None:
    state = new_run("FSDP 2")
    go_on(state, 2)
    save_checkpoint(state, Path(run_dir))
    due = what_is(state)
    if dist.get_rank() == 0:
        torch.save(due, Path(run_dir, "due.pt"))
    go_on(state, 2)
    save_checkpoint(state, Path(run_dir))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "truncated": ("__1_0.distcp", truncate),
    "one bit flipped": ("__0_0.distcp", flip_one_bit),
    "gone": ("__0_0.distcp", Path.unlink),
    "no metadata": (".metadata", Path.unlink),
    "truncated metadata": (".metadata", truncate),
    "truncated checksums": ("SHA256SUMS", truncate),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(ranks: Pools, tmp_path: Path, damage: str) -> None:
    """Steps lost: those between the two. State lost: none. The file is named at once."""
    ranks.run(2, save_twice, str(tmp_path))
    name, harm = DAMAGES[damage]
    harm(tmp_path / "checkpoints" / "step_00000004" / name)
    assert ranks.run(2, assert_resumes, str(tmp_path), "FSDP 2") == ["step_00000002"] * 2


def error_of_loading(run_dir: str) -> str:
    state = new_run("FSDP 2")
    before = what_is(state)
    with pytest.raises(ValueError, match="can be loaded") as caught:
        load_checkpoint(state, Path(run_dir))
    assert_state_is(state.model, state.optimizer, before[0])
    assert state.step == 0
    return str(caught.value)


def test_if_all_checkpoints_are_damaged_the_error_names_the_files(
    ranks: Pools, tmp_path: Path
) -> None:
    """And nothing is half loaded."""
    ranks.run(2, save_twice, str(tmp_path))
    truncate(tmp_path / "checkpoints" / "step_00000002" / "__0_0.distcp")
    (tmp_path / "checkpoints" / "step_00000004" / "__1_0.distcp").unlink()
    for message in ranks.run(2, error_of_loading, str(tmp_path)):
        assert "step_00000002/__0_0.distcp is not as it was written" in message
        assert "step_00000004/__1_0.distcp is missing" in message


def go_on_while_writing(run_dir: str) -> None:
    state = new_run("FSDP 2")
    go_on(state, 2)
    due = what_is(state)
    if dist.get_rank() == 0:
        torch.save(due, Path(run_dir, "due.pt"))
    pending = start_checkpoint(state, Path(run_dir), own_group())
    go_on(state, 2)
    with pytest.raises(ValueError, match="no checkpoint in"):
        newest_checkpoint(Path(run_dir))  # not before it is finished
    pending.finish()


def test_a_checkpoint_in_the_background_holds_the_step_at_which_it_began(
    ranks: Pools, tmp_path: Path
) -> None:
    ranks.run(2, go_on_while_writing, str(tmp_path))
    assert newest_checkpoint(tmp_path).name == "step_00000002"
    assert ranks.run(2, assert_resumes, str(tmp_path), "FSDP 2") == ["step_00000002"] * 2


def test_checksums_are_those_that_sha256sum_reads(ranks: Pools, tmp_path: Path) -> None:
    ranks.run(2, save_twice, str(tmp_path))
    folder = newest_checkpoint(tmp_path)
    lines = (folder / checkpoint._CHECKSUMS).read_text().splitlines()
    assert {line[66:] for line in lines} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert {line[64:66] for line in lines} == {"  "}
