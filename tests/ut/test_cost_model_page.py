# SPDX-License-Identifier: Apache-2.0
"""The page on the cost model is true: its table is the presets, and no strategy is left out."""

from pathlib import Path

from hyper_parallel.core.optimizer.hardware_presets import _LINK, _MATRIX, _MEMORY, PRESETS
from hyper_parallel.core.optimizer.strategies import STRATEGIES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cost_model.md").read_text()


def test_its_table_of_machines_is_the_presets() -> None:
    rows = {
        cells[0]: cells
        for line in PAGE.splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 6
    }
    for name, hardware in PRESETS.items():
        if name == "cpu":
            continue
        _, tflops, memory, within, between, source = rows[name]
        rate = hardware.matrix_rates["bfloat16"]
        assert round(rate.peak_flops_per_s / _MATRIX / 1e12) == int(tflops)
        assert round(hardware.memory_bytes_per_s / _MEMORY / 1e9) == int(memory)
        assert round(hardware.within_node.bytes_per_s / _LINK / 1e9) == int(within.split()[0])
        assert round(hardware.between_nodes.bytes_per_s / _LINK / 1e9) == int(between)
        assert hardware.source in source


def test_it_names_every_strategy() -> None:
    for name in STRATEGIES:
        assert name.split(",")[0] in PAGE
