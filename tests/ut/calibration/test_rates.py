# SPDX-License-Identifier: Apache-2.0
"""Fits find the numbers that samples were made from."""

from dataclasses import replace

import pytest

from hyper_parallel.calibration import calibrate
from hyper_parallel.calibration.compute_rates import Sample, fit_matrix_rate
from hyper_parallel.calibration.exchange_rates import fit_link
from hyper_parallel.calibration.reference_step import scaled
from hyper_parallel.core.optimizer.hardware import Link, MatrixRate
from hyper_parallel.core.optimizer.hardware_presets import preset
from hyper_parallel.core.optimizer.simulation import simulate
from tests.planned import S0, mesh_of, plan_of, transformer


@pytest.mark.parametrize("half_size", [0.0, 50.0, 1000.0])
def test_a_rate_is_found_again(half_size: float) -> None:
    true = MatrixRate(peak_flops_per_s=3e11, half_size=half_size)
    samples = [
        Sample(
            flops=2 * n**3,
            sizes=((n, 0.25), (2 * n, 0.75)),
            seconds=0.25 * true.seconds(2 * n**3, n) + 0.75 * true.seconds(2 * n**3, 2 * n),
        )
        for n in (32, 128, 512, 2048)
    ]
    found = fit_matrix_rate(samples)
    assert found.peak_flops_per_s == pytest.approx(3e11)
    assert found.half_size == pytest.approx(half_size, abs=1e-6)


def test_a_rate_that_falls_with_size_gives_its_mean() -> None:
    samples = [Sample(flops=1e9, sizes=((n, 1.0),), seconds=1e-3 * n) for n in (1, 2)]
    found = fit_matrix_rate(samples)
    assert found.half_size == 0
    assert 5e11 < found.peak_flops_per_s < 1e12


def test_a_link_is_found_again() -> None:
    true = Link(latency_s=2e-4, bytes_per_s=5e8)
    samples = [(n, 3 * true.latency_s + n / true.bytes_per_s) for n in (0, 10**5, 10**7)]
    found = fit_link(samples, num_peers=3)
    assert found.latency_s == pytest.approx(true.latency_s)
    assert found.bytes_per_s == pytest.approx(true.bytes_per_s)


@pytest.mark.parametrize("factor", [0.5, 1.25])
@pytest.mark.parametrize("cores", [None, 2.0])
def test_everything_takes_longer_on_scaled_hardware(factor: float, cores: float | None) -> None:
    plan = plan_of(transformer(mesh_of(8), (S0,), num_layers=3, width=256), bucket_bytes=1 << 20)
    rate = MatrixRate(peak_flops_per_s=1e12, half_size=10.0, measured=((64.0, 1e11), (512.0, 5e11)))
    hardware = replace(
        preset("h100"), matrix_rates={"bfloat16": rate}, ranks_per_node=4, cores_per_node=cores
    )
    before, after = simulate(plan, hardware), simulate(plan, scaled(hardware, factor))
    assert after.step_s == pytest.approx(before.step_s * factor)
    for lane, seconds in before.busiest.seconds_by_lane.items():
        assert after.busiest.seconds_by_lane[lane] == pytest.approx(seconds * factor)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="num_ranks: expected at least 1, got 0"):
        calibrate(0)
    with pytest.raises(ValueError, match="budget_s: expected at least 20, got 3"):
        calibrate(1, budget_s=3)
