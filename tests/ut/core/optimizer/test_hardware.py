# SPDX-License-Identifier: Apache-2.0
"""Hardware files and presets: what is written is read, and what is wrong is named."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.core.optimizer.hardware import (
    Hardware,
    MatrixRate,
    load_hardware,
    save_hardware,
)
from hyper_parallel.core.optimizer.hardware_presets import PRESETS, preset


@pytest.mark.parametrize("name", PRESETS)
def test_a_file_gives_back_what_was_saved(name: str, tmp_path: Path) -> None:
    save_hardware(PRESETS[name], tmp_path / "hardware.json")
    assert load_hardware(tmp_path / "hardware.json") == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_a_source_and_sensible_orders_of_magnitude(name: str) -> None:
    hardware = PRESETS[name]
    assert hardware.source.startswith("https://") or name == "cpu"
    rates = [hardware.matrix_rates[d].peak_flops_per_s for d in ("bfloat16", "float32")]
    assert rates == sorted(rates, reverse=True)
    assert hardware.within_node.bytes_per_s >= hardware.between_nodes.bytes_per_s
    assert hardware.memory_bytes_per_s > hardware.within_node.bytes_per_s


def test_a_preset_is_found_however_it_is_spelled() -> None:
    assert preset("Ascend 910B") is PRESETS["ascend910b"]
    assert preset("MI300X") is PRESETS["mi300x"]


def test_an_unknown_preset_lists_the_near_ones() -> None:
    with pytest.raises(ValueError, match=r"got 'h300'; near: h[12]00, h[12]00"):
        preset("h300")


def test_ranks_of_a_node_follow_each_other() -> None:
    hardware = replace(PRESETS["h100"], ranks_per_node=4)
    assert [hardware.link(5, peer) for peer in (3, 4, 7, 8)] == [
        "between_nodes",
        "within_node",
        "within_node",
        "between_nodes",
    ]


def test_a_missing_rate_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"h100: no matrix rate for int8, only for bfloat16"):
        PRESETS["h100"].matrix_rate("int8")


def changed(**fields: Any) -> dict[str, Any]:
    data = {"hyper_parallel_hardware": 1, **asdict(PRESETS["h100"]), **fields}
    return {key: value for key, value in data.items() if value != "left out"}


BAD: dict[str, tuple[Any, str]] = {
    "a list": ([], "expected a hardware file, an object with 'hyper_parallel_hardware'"),
    "another object": ({"a": 1}, "expected a hardware file"),
    "another version": (changed(hyper_parallel_hardware=9), "expected version 1, got 9"),
    "no name": (changed(name="left out"), "name is missing"),
    "another field": (changed(nam="x"), "nam is not known"),
    "a number as name": (changed(name=1), "name: expected text, got 1"),
    "a negative rate": (
        changed(memory_bytes_per_s=-1.0),
        "memory_bytes_per_s: expected a positive number, got -1.0",
    ),
    "a rate in words": (
        changed(memory_bytes_per_s="fast"),
        "memory_bytes_per_s: expected a positive number, got 'fast'",
    ),
    "true as a number": (changed(operation_s=True), "operation_s: expected a number of at least 0"),
    "half a rank": (
        changed(ranks_per_node=1.5),
        "ranks_per_node: expected a whole number of at least 1, got 1.5",
    ),
    "no cores": (changed(cores_per_node=0), "cores_per_node: expected a positive number"),
    "no rates": (changed(matrix_rates={}), "matrix_rates: expected an object from dtype to rate"),
    "half a rate": (
        changed(matrix_rates={"float32": {"peak_flops_per_s": 1.0}}),
        "matrix_rates.float32: expected peak_flops_per_s, half_size, measured; half_size is ",
    ),
    "a link as a number": (changed(within_node=3), "within_node: expected an object"),
    "a link without latency": (
        changed(between_nodes={"bytes_per_s": 1.0}),
        "between_nodes: expected latency_s, bytes_per_s; latency_s is missing",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_names_file_and_field(kind: str, tmp_path: Path) -> None:
    data, message = BAD[kind]
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"bad\.json") as caught:
        load_hardware(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"not json", b"\xff\xfe\x00", b""])
def test_a_file_that_is_no_json_says_so(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(ValueError, match="expected a hardware file in JSON"):
        load_hardware(tmp_path / "bad.json")


def test_measured_rates_take_the_place_of_the_formula_and_are_saved(tmp_path: Path) -> None:
    points = ((100.0, 1e11), (1000.0, 4e11), (2000.0, 1e11))
    rate = MatrixRate(peak_flops_per_s=1.0, half_size=1.0, measured=points)
    sizes = (10, 100, 316.2277660168379, 1000, 5000)
    rates = [1e9 / rate.seconds(1e9, size) for size in sizes]
    assert rates == pytest.approx([1e11, 1e11, 2e11, 4e11, 1e11])
    hardware = replace(PRESETS["cpu"], matrix_rates={"float32": rate})
    save_hardware(hardware, tmp_path / "a.json")
    assert load_hardware(tmp_path / "a.json") == hardware


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ("fast", "expected a list of"),
        ([1.0], "expected a list of"),
        ([[1.0, -1.0]], "rate: expected a positive number, got -1.0"),
        ([[2.0, 1.0], [1.0, 1.0]], "expected ascending sizes"),
    ],
)
def test_bad_measured_rates_are_named(points: Any, message: str, tmp_path: Path) -> None:
    rates = {"float32": {"peak_flops_per_s": 1.0, "half_size": 1.0, "measured": points}}
    (tmp_path / "a.json").write_text(json.dumps(changed(matrix_rates=rates)))
    with pytest.raises(ValueError, match=message):
        load_hardware(tmp_path / "a.json")


def test_cores_may_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(changed(cores_per_node="left out")))
    read: Hardware = load_hardware(tmp_path / "a.json")
    assert read.cores_per_node is None
