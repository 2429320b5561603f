# SPDX-License-Identifier: Apache-2.0
"""A short calibration of this machine between real ranks."""

import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.calibration import calibrate
from hyper_parallel.calibration.crowd import Crowd
from hyper_parallel.calibration.reference_step import reference_optimizer
from hyper_parallel.calibration.timing import Probe, time_in_turn
from hyper_parallel.core.optimizer.hardware import load_hardware, save_hardware
from tests.dist import run_ranks


@pytest.mark.dist
def test_this_machine_is_measured_in_time_and_written(tmp_path: Path) -> None:
    heard: list[tuple[str, float]] = []
    begun = time.monotonic()
    hardware = calibrate(2, budget_s=20, progress=lambda what, done: heard.append((what, done)))
    assert time.monotonic() - begun < 60
    assert [done for _, done in heard] == sorted(done for _, done in heard)
    assert heard[-1] == ("done", 1.0)
    assert hardware.ranks_per_node == 2
    assert 1e8 < hardware.memory_bytes_per_s < 1e13
    assert 1e-7 < hardware.operation_s < 1e-3
    assert 1e6 < hardware.within_node.bytes_per_s < 1e12
    assert 0 < hardware.within_node.latency_s < 1
    for dtype in ("bfloat16", "float32", "float64"):
        assert 1e8 < hardware.matrix_rate(dtype).peak_flops_per_s < 1e16
    save_hardware(hardware, tmp_path / "here.json")
    assert load_hardware(tmp_path / "here.json") == hardware


def _timed(rank_sleeps: float) -> dict[str, float]:
    crowd = Crowd(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    sleep = partial(time.sleep, rank_sleeps * (1 + dist.get_rank()))
    return time_in_turn(
        {
            "each for itself": Probe(call=sleep, once=True),
            "all": Probe(call=sleep, once=True, waits_for_all=True),
            "first": Probe(call=sleep, once=True, by_first_rank=True),
            "burst": Probe(call=partial(time.sleep, 1e-3)),
        },
        crowd,
        budget_s=0.1,
    )


@pytest.mark.dist
def test_probes_say_whose_time_counts() -> None:
    first, second = run_ranks(2, _timed, 0.02)
    assert 0.02 <= first["each for itself"] < 0.04 <= second["each for itself"]
    assert first["all"] == second["all"] >= 0.04
    assert first["first"] >= 0.02
    assert second["first"] == 0
    assert 1e-3 <= first["burst"] < 0.01


def _reference_step() -> float:
    optimizer = reference_optimizer(dist.get_world_size(), torch.device("cpu"))
    before = [param.to_local().clone() for param in optimizer.param_groups[0]["params"]]
    optimizer.step()
    after = [param.to_local() for param in optimizer.param_groups[0]["params"]]
    moved = [(b != a).float().mean() for b, a in zip(before, after, strict=True)]
    return float(torch.stack(moved).min())


@pytest.mark.dist
def test_the_reference_step_is_a_real_one_on_any_number_of_ranks() -> None:
    for num_ranks in (1, 3):
        assert min(run_ranks(num_ranks, _reference_step)) > 0
