# SPDX-License-Identifier: Apache-2.0
"""A short calibration of this machine between real ranks."""

import time
from pathlib import Path

import pytest

from hyper_parallel.calibration import calibrate
from hyper_parallel.core.optimizer.hardware import load_hardware, save_hardware


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
