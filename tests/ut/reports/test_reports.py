# SPDX-License-Identifier: Apache-2.0
"""Reports: JSON by its schema, a terminal of a hundred columns, a picture."""

import io
import json
import re
from html import escape
from pathlib import Path

import jsonschema
import pytest
from PIL import Image
from rich.console import Console

from hyper_parallel.core.optimizer.hardware_presets import PRESETS
from hyper_parallel.reports import Report, build_report
from hyper_parallel.reports.html import to_html
from hyper_parallel.reports.json_file import schema, to_json, write_json
from hyper_parallel.reports.png import write_png
from hyper_parallel.reports.terminal import WIDTH, print_report
from tests.planned import S0, S1, R, experts, mesh_of, plan_of, planned, transformer


@pytest.fixture(scope="module")
def report() -> Report:
    mesh = mesh_of(2, 8, 4)
    params = transformer(mesh, (R, S0, S1), num_layers=8, width=1024)
    params += transformer(mesh, (R, S0, S0), num_layers=2, width=1024)
    names = ("dp_replicate", "dp_shard", "tp")
    return build_report(
        plan_of(params, bucket_bytes=1 << 24), PRESETS["h200"], title="Tiny", axis_names=names
    )


def small(kind: str) -> Report:
    if kind == "one rank":
        plan = plan_of([planned((64, 64), mesh_of(1), (R,))])
    elif kind == "idle":
        plan = plan_of([planned((64, 64), mesh_of(16), (S0,))])
    elif kind == "replicas":
        plan = plan_of(transformer(mesh_of(8), (R,), num_layers=1, width=256))
    else:
        plan = plan_of(experts(mesh_of(2, 8), num_layers=1, num_experts=16))
    return build_report(plan, PRESETS["h100"], title=kind)


KINDS = ("one rank", "idle", "replicas", "experts")


@pytest.mark.parametrize("kind", KINDS)
def test_json_is_as_the_schema_says(kind: str) -> None:
    jsonschema.validate(json.loads(to_json(small(kind))), schema())


def test_the_schema_is_one_and_describes_every_field() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())

    def undescribed(part: object, path: str) -> list[str]:
        if isinstance(part, list):
            return [found for one in part for found in undescribed(one, path)]
        if not isinstance(part, dict):
            return []
        found = []
        for name, field in part.get("properties", {}).items():
            found += [] if field.get("description") else [f"{path}.{name}"]
            found += undescribed(field, f"{path}.{name}")
        for key in ("items", "additionalProperties", "prefixItems"):
            found += undescribed(part.get(key), path)
        return found

    assert undescribed(schema(), "") == []


def test_json_that_lacks_a_field_is_refused(report: Report, tmp_path: Path) -> None:
    write_json(report, tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    jsonschema.validate(data, schema())
    del data["simulation"]["step_s"]
    with pytest.raises(jsonschema.ValidationError, match="step_s"):
        jsonschema.validate(data, schema())


@pytest.mark.parametrize("kind", KINDS)
def test_a_terminal_report_fits_a_hundred_columns(kind: str) -> None:
    console = Console(file=io.StringIO(), width=WIDTH)
    print_report(small(kind), console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert not any("…" in line for line in lines), "something was cut off"


def test_a_terminal_report_says_what_matters(report: Report) -> None:
    console = Console(file=io.StringIO(), width=WIDTH)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    text = " ".join(console.file.getvalue().split())
    for headline in report.headlines():
        assert headline.value in text
        assert headline.label in text
    for choice in report.choices:
        assert f"> {choice.chosen}" in text
        assert choice.reason in text
    assert "More ranks: dp_shard from 1 to 32, everything else equal" in text
    assert "64 2 x 8 x 4" in text


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_made_of_anything(kind: str) -> None:
    report = small(kind)
    page = to_html(report)
    for headline in report.headlines():
        assert escape(headline.note) in page
    assert ("plot-scaling" in page) == bool(report.scaling)
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=.http", page)


def test_a_page_says_what_grows_and_marks_the_plan(report: Report) -> None:
    page = to_html(report)
    assert "More ranks: dp_shard from 1 to 32" in page
    (row,) = re.findall(r"<tr class=chosen><th>64<span class=.mark.>this plan</span>.*</tr>", page)
    assert "<td>2 x 8 x 4</td>" in row


def test_a_picture_is_a_slide(report: Report, tmp_path: Path) -> None:
    write_png(report, tmp_path / "report.png")
    with Image.open(tmp_path / "report.png") as image:
        assert image.size == (1600, 900)
        assert len(image.convert("RGB").getcolors(1 << 20) or []) > 100


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_is_drawn_of_anything(kind: str, tmp_path: Path) -> None:
    write_png(small(kind), tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_idle_ranks_are_said_in_the_headline() -> None:
    notes = " ".join(headline.note for headline in small("idle").headlines())
    assert "15 of 16 ranks own no matrix" in notes


def test_many_small_buckets_among_many_ranks_are_told_to_grow() -> None:
    params = transformer(mesh_of(64), (S0,), num_layers=32, width=256)
    notes = {}
    for bucket_bytes in (1 << 17, 1 << 30):
        plan = plan_of(params, bucket_bytes=bucket_bytes)
        made = build_report(plan, PRESETS["h100"], title="x", with_scaling=False)
        notes[bucket_bytes] = " ".join(headline.note for headline in made.headlines())
    assert "raise bucket_bytes" in notes[1 << 17]
    assert "raise bucket_bytes" not in notes[1 << 30]
