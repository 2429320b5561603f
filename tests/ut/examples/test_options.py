# SPDX-License-Identifier: Apache-2.0
"""Command line of the training example: a wrong option says what to do."""

from pathlib import Path

import pytest

from examples.options import parse_train_options, read_options, write_options


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "world_size", "mesh"),
    [
        (None, 4, {"dp_shard": 4}),
        ("dp_shard=2", 2, {"dp_shard": 2}),
        ("dp_shard=3,dp_replicate=2", 6, {"dp_replicate": 2, "dp_shard": 3}),
    ],
)
def test_mesh_is_parsed(text: str | None, world_size: int, mesh: dict[str, int]) -> None:
    argv = ["--batch=12"] if text is None else ["--batch=12", f"--mesh={text}"]
    parsed = parse_train_options(argv, world_size=world_size).mesh
    assert list(parsed.items()) == list(mesh.items())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mesh=dp_shard=3"], r"product of its sizes is 3, but this run has 2 .* start 3"),
        (["--mesh=dp_replicate=2,dp_shard=2"], r"product of its sizes is 4, but this run has 2"),
        (["--mesh=tp=2"], r"one of dp_replicate, dp_shard.* got 'tp=2'"),
        (["--mesh=dp_shard"], r"expected AXIS=N .* got 'dp_shard'"),
        (["--mesh=dp_shard=0"], r"N at least 1; got 'dp_shard=0'"),
        (["--mesh=dp_shard=2,dp_shard=1"], r"each once"),
        (["--steps=0"], r"--steps: '0' is not a whole number of 1 or more"),
        (["--batch=many"], r"--batch: 'many' is not a whole number"),
        (["--lr=-1"], r"--lr: '-1' is not a finite number of 0 or more"),
        (["--lr=nan"], r"--lr: 'nan' is not a finite number"),
        (["--ns-dtype=float8"], r"--ns-dtype: invalid choice: 'float8'"),
        (["--step=5x"], r"'5x' is not a whole number"),
        (["--nonsense"], r"unrecognized arguments: --nonsense"),
        (["--batch=3"], r"--batch 3 cannot be shared equally by 2 processes"),
        (["--width=30", "--heads=4"], r"--width 30 is not a multiple of --heads 4"),
        (["--steps=5", "--warmup=5"], r"--warmup 5 must be less than --steps 5"),
        (["--prompt="], r"--prompt is empty"),
        (["--resume"], r"no run in runs/muon"),
    ],
)
def test_a_wrong_option_is_named(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_train_options(argv, world_size=2)


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match=r"holds a run already; continue it with --resume"):
        parse_train_options([f"--run-dir={tmp_path}"], world_size=1)


def test_resume_takes_the_options_of_the_run(tmp_path: Path) -> None:
    first = parse_train_options(
        [f"--run-dir={tmp_path}", "--optimizer=adamw", "--data=texts", "--lr=0.5"], world_size=2
    )
    write_options(first)
    again = parse_train_options(
        [f"--run-dir={tmp_path}", "--resume", "--eval-every=7"], world_size=1
    )
    assert (again.optimizer, again.data, again.lr) == ("adamw", Path("texts"), 0.5)
    assert (again.mesh, again.eval_every, again.resume) == ({"dp_shard": 1}, 7, True)
    assert "mesh" not in read_options(tmp_path)
