# SPDX-License-Identifier: Apache-2.0
"""The command line: its options are frozen, and wrong input is told in one line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from hyper_parallel.cli.main import app, main
from hyper_parallel.core.optimizer.hardware import save_hardware
from hyper_parallel.core.optimizer.hardware_presets import PRESETS as MACHINES
from hyper_parallel.models.mesh_axes import parse_mesh
from hyper_parallel.models.planning import PlanSettings, plan_model
from hyper_parallel.models.sources import load_model

MODEL = ["MODEL", "--mesh", "--world-size"]
FROZEN = {
    "plan": [
        *MODEL,
        *("--rank", "--stage", "--placement", "--view", "--hardware", "--compare", "--bucket-mb"),
        *("--share-replicas", "--shard-momentum", "--replica-route", "--ns-method"),
        *("--ns-coefficients", "--ns-dtype", "--steps", "--json", "--html", "--png"),
    ],
    "group": [*MODEL, "--rank", "--stage", "--placement", "--view", "--json"],
    "inspect": ["CHECKPOINT", "--json"],
    "calibrate": ["--output", "--ranks", "--seconds", "--name"],
}
PLAN = ("plan", "gpt2", "--mesh", "dp_shard=8")


def commands() -> Any:
    return typer.main.get_group(app).commands


@pytest.mark.parametrize("name", FROZEN)
def test_options_are_frozen(name: str) -> None:
    """Scripts depend on them: a new one is added here, and none is renamed."""
    told = [
        param.opts[0] if param.param_type_name == "option" else str(param.metavar)
        for param in commands()[name].params
        if param.name != "help"
    ]
    assert told == FROZEN[name]


def test_there_are_no_other_commands() -> None:
    assert set(commands()) == set(FROZEN)


@pytest.mark.parametrize("name", FROZEN)
def test_help_shows_every_option_and_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert all(option in text for option in FROZEN[name])
    assert f"hyper-parallel {name} " in text.partition("Examples:")[2]


@pytest.mark.parametrize("command", ["plan", "group"])
def test_presets_need_no_torch(command: str) -> None:
    code = (
        "import sys; from hyper_parallel.cli.main import main; "
        f"main(['{command}', 'gpt2', '--mesh', 'dp_shard=8']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode == 0


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "hyper_parallel", "--version"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert told.startswith("hyper-parallel ")


def test_no_command_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "inspect" in capsys.readouterr().out


# Plans


def test_plan_prints_the_model_and_what_a_step_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--hardware", "h200", "--compare"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("gpt2: 124 M parameters")
    assert "predicted Muon step" in text
    assert "gather and repeat" in text


def test_plan_of_a_rank_prints_the_plan_of_that_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--rank", "3"]) == 0
    parallelism = parse_mesh("dp_shard=8")
    plan = plan_model(load_model("gpt2"), parallelism, PlanSettings(), rank=3).plan
    assert str(plan) in capsys.readouterr().out


def test_json_goes_to_standard_output_alone_or_to_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*PLAN, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["simulation"]["num_matrices"] == 48
    target = tmp_path / "plan.json"
    assert main([*PLAN, "--json", str(target)]) == 0
    assert json.loads(target.read_text())["simulation"] == told["simulation"]
    assert "predicted Muon step" in capsys.readouterr().out


def test_experts_on_a_mesh_of_their_own_have_a_scaling_curve(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["plan", "qwen3-30b-a3b", "--mesh", "pp=8,dp_shard=16,ep=8", "--stage", "1"]
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    sizes = {point["axis_size"]: point["step_s"] for point in told["scaling"]}
    assert list(sizes) == [8, 16, 32, 64]
    assert sizes[16] == told["simulation"]["step_s"]
    assert main([*command, "--compare"]) == 0
    assert "More ranks: dp_shard from 8 to 64" in capsys.readouterr().out


def test_page_and_picture_are_written(tmp_path: Path) -> None:
    page, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    assert main([*PLAN, "--html", str(page), "--png", str(picture)]) == 0
    assert page.read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_hardware_may_be_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    save_hardware(MACHINES["a100"], path)
    assert main([*PLAN, "--hardware", str(path)]) == 0
    assert "on a100" in capsys.readouterr().out


def test_shapes_may_be_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    rows = [
        {"name": "up", "shape": [64, 32], "placements": {"dp_shard": "S(1)"}},
        {"name": "qkv", "shape": [96, 32], "view": ["split", [32, 32, 32]]},
        {"name": "gain", "shape": [32]},
    ]
    path.write_text(json.dumps(rows))
    assert main(["plan", str(path), "--mesh", "dp_shard=4", "--json"]) == 0
    simulation = json.loads(capsys.readouterr().out)["simulation"]
    assert (simulation["num_params"], simulation["num_matrices"]) == (2, 4)
    assert main(["group", str(path), "--mesh", "dp_shard=4"]) == 0
    assert "S(1)" in capsys.readouterr().out


# Groups


def test_group_says_what_the_specification_says(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = ["--mesh", "dp_replicate=2,dp_shard=4,ep=2"]
    assert main(["group", "qwen3-30b-a3b", *mesh, "--rank", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (group,) = told["comm_groups"]
    assert group["replicate_group"] == [2, 6]
    assert group["shard_dims"] == [0]
    assert len(told["no_comm"]) == 2 * 48
    assert all("experts" in param["name"] for param in told["no_comm"])
    assert told["no_comm"][0]["mesh"] == {"dp_replicate": 2, "dp_shard_mod_ep": 2, "ep": 2}


# Wrong input


def files(folder: Path) -> None:
    (folder / "not.json").write_text("{ this is not JSON")
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "number.json").write_text("3")
    (folder / "rows.json").write_text('[{"name": "w", "shape": "8x8"}]')
    row = '{"name": "w", "shape": [2, 2]}'
    (folder / "twice.json").write_text(f"[{row}, {row}]")
    (folder / "keys.json").write_text('[{"name": "w", "shap": [8, 8]}]')
    (folder / "hardware.json").write_text("{}")
    (folder / "binary.json").write_bytes(b"\xff\xfe\x00\x80")
    (folder / "empty").mkdir()
    (folder / "damaged").mkdir()
    (folder / "damaged" / ".metadata").write_bytes(b"not a pickle")
    (folder / "run" / "step_3").mkdir(parents=True)
    (folder / "run" / "step_3" / ".metadata").touch()
    (folder / "config_of_nobody").mkdir()
    (folder / "config_of_nobody" / "config.json").write_text('{"model_type": "lama"}')


WRONG = {
    "unknown model": ("plan gpt-2 --mesh dp_shard=2", "did you mean 'gpt2'"),
    "unknown axis": ("plan gpt2 --mesh dp_shrad=2", "unknown mesh axis 'dp_shrad'; did you mean"),
    "unknown hardware": ("plan gpt2 --mesh dp_shard=2 --hardware h20", "did you mean 'h200'"),
    "unknown method": ("plan gpt2 --mesh dp_shard=2 --ns-method grm", "did you mean 'gram'"),
    "unknown dtype": ("plan gpt2 --mesh dp_shard=2 --ns-dtype bf16", "unknown --ns-dtype 'bf16'"),
    "unknown coefficients": (
        "plan gpt2 --mesh dp_shard=2 --ns-coefficients polar_expres",
        "did you mean 'polar_express'",
    ),
    "unknown option": ("plan gpt2 --mehs dp_shard=2", "No such option: --mehs"),
    "unknown command": ("paln gpt2", "No such command 'paln'"),
    "no mesh": ("plan gpt2", "Missing option '--mesh'"),
    "no size": ("plan gpt2 --mesh dp_shard", "expected axis=size, got 'dp_shard'"),
    "size of nothing": ("plan gpt2 --mesh dp_shard=0", "dp_shard must be a positive integer"),
    "axis twice": ("plan gpt2 --mesh tp=2,tp=2", "tp is given twice"),
    "wrong product": (
        "plan gpt2 --mesh dp_shard=4,tp=2 --world-size 16",
        "dp_shard=4 * tp=2 is 8 ranks, but --world-size is 16",
    ),
    "ep that does not divide": ("plan gpt2 --mesh dp_shard=4,ep=3", "ep=3 must divide"),
    "tp and heads": ("plan gpt2-xl --mesh tp=2", "tp=2 does not divide the 25 attention heads"),
    "tp and key/value heads": (
        "plan llama3-8b --mesh tp=16",
        "tp=16 does not divide the 8 key/value heads of llama3-8b; choose one of 1, 2, 4, 8",
    ),
    "pp and layers": ("plan gpt2 --mesh pp=13", "gpt2 has only 12 layers"),
    "stage that is not there": ("plan gpt2 --mesh pp=2 --stage 2", "--stage must be below pp=2"),
    "rank that is not there": ("plan gpt2 --mesh dp_shard=2 --rank 2", "--rank must be below 2"),
    "rank that is no number": ("plan gpt2 --mesh dp_shard=2 --rank first", "or 'busiest'"),
    "rank of another stage": (
        "plan gpt2 --mesh pp=2,dp_shard=2 --rank 0 --stage 1",
        "--stage 1 does not have rank 0",
    ),
    "pattern that matches nothing": (
        "plan gpt2 --mesh dp_shard=2 --view *.c_atn.weight=flatten",
        "matches no parameter; near: ",
    ),
    "pattern without a value": ("plan gpt2 --mesh dp_shard=2 --view flatten", "PATTERN=VALUE"),
    "view of no kind": ("plan gpt2 --mesh dp_shard=2 --view *=rows:3", "--view: expected none"),
    "view that does not fit": (
        "plan gpt2 --mesh dp_shard=2 --view *.c_attn.weight=split:1,2",
        "sums to 3 rows",
    ),
    "placement of no kind": ("plan gpt2 --mesh dp_shard=2 --placement *=dp_shard:P", "S(dim)"),
    "placement on no axis": (
        "plan gpt2 --mesh dp_shard=2 --placement *c_attn.weight=tp:R",
        "mesh axis for transformer.h.0.attn.c_attn.weight: 'tp'; known: dp_shard",
    ),
    "placement out of range": (
        "plan gpt2 --mesh dp_shard=2 --placement *c_attn.weight=dp_shard:S(2)",
        "S(2) is out of range for shape (768, 2304)",
    ),
    "bucket of no bytes": ("plan gpt2 --mesh dp_shard=2 --bucket-mb 0", "must be positive"),
    "steps of none": ("plan gpt2 --mesh dp_shard=2 --steps 0", "steps"),
    "sharing that is undecided": (
        "plan gpt2 --mesh dp_shard=2 --share-replicas maybe",
        "known: auto, true, false",
    ),
    "momentum that nobody can gather": (
        "plan gpt2 --mesh dp_shard=2 --shard-momentum --share-replicas false",
        "--shard-momentum needs --share-replicas true or auto",
    ),
    "report to nowhere": (
        "plan gpt2 --mesh dp_shard=2 --html {folder}/no/plan.html",
        "there is no directory",
    ),
    "no such file": ("plan {folder}/none.json --mesh tp=1", "No such file or directory"),
    "not JSON": ("plan {folder}/not.json --mesh tp=1", "not JSON: "),
    "not text": ("plan {folder}/binary.json --mesh tp=1", "not JSON: "),
    "JSON of a number": ("plan {folder}/number.json --mesh tp=1", "or a list of objects"),
    "config without model_type": ("plan {folder} --mesh tp=1", "an object without model_type"),
    "config of no architecture": (
        "plan {folder}/config_of_nobody --mesh tp=1",
        "'lama'; did you mean",
    ),
    "directory without a config": ("plan {folder}/empty --mesh tp=1", "without a config.json"),
    "shape of words": ("plan {folder}/rows.json --mesh tp=1", "shape must be a list of sizes"),
    "name twice": ("plan {folder}/twice.json --mesh tp=1", "row 0 is named 'w', too"),
    "key that is misspelt": ("plan {folder}/keys.json --mesh tp=1", "did you mean 'shape'"),
    "module of nobody": ("plan no_such_module:build --mesh tp=1", "cannot import no_such_module"),
    "function of nobody": ("plan json:dmups --mesh tp=1", "did you mean 'dumps'"),
    "function of no module": ("plan os:getcwd --mesh tp=1", "must return a torch.nn.Module"),
    "hardware of no kind": (
        "plan gpt2 --mesh dp_shard=2 --hardware {folder}/hardware.json",
        "expected a hardware file",
    ),
    "hardware directory": ("plan gpt2 --mesh tp=1 --hardware {folder}", "is a directory"),
    "checkpoint of nobody": ("inspect {folder}/none", "no such file or directory"),
    "checkpoint that is a file": ("inspect {folder}/not.json", "is a file; expected the folder"),
    "checkpoint without metadata": ("inspect {folder}/empty", "has no .metadata"),
    "checkpoint one level up": ("inspect {folder}/run", "did you mean one of those in it: step_3"),
    "checkpoint that is damaged": ("inspect {folder}/damaged", ".metadata is damaged"),
    "calibration to nowhere": ("calibrate -o {folder}/no/file.json", "there is no directory"),
    "calibration in no time": ("calibrate -o {folder}/file.json --seconds 1", "at least 20"),
}


@pytest.mark.parametrize(("command", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_one_line_on_stderr_and_exit_code_2(
    command: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files(tmp_path)
    assert main([word.format(folder=tmp_path) for word in command.split()]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("hyper-parallel: ")
    assert told.err.count("\n") == 1
    assert message in told.err
