# SPDX-License-Identifier: Apache-2.0
"""What can be imported, and that nothing else is public."""

import importlib
import importlib.resources
import inspect
import subprocess
import sys

import pytest
import torch

import hyper_parallel
import hyper_parallel.core.optimizer

TOP = {"GradScaler", "Muon", "__version__", "clip_grad_norm_", "muon_param_groups", "orthogonalize"}
OPTIMIZER = {
    "CommParamGroup",
    "GradScaler",
    "Muon",
    "OlderCheckpointPlanner",
    "Plan",
    "ShardInfo",
    "calculate_replicate_group",
    "calculate_shard_group",
    "clip_grad_norm_",
    "export_state",
    "extract_shard_info",
    "group_parameters_by_sharding",
    "import_state",
    "muon_param_groups",
    "orthogonalize",
}
MODULES = [("hyper_parallel", TOP), ("hyper_parallel.core.optimizer", OPTIMIZER)]
# What the specification names beside the exported functions.
PARAM_GROUPING = OPTIMIZER & {
    "CommParamGroup",
    "ShardInfo",
    "calculate_replicate_group",
    "extract_shard_info",
    "group_parameters_by_sharding",
} | {"_validate_param_ndim", "_is_no_comm_param", "_placements_key"}


@pytest.mark.parametrize(("module_name", "expected"), MODULES)
def test_all_lists_exactly_what_is_public(module_name: str, expected: set[str]) -> None:
    module = importlib.import_module(module_name)
    assert set(module.__all__) == set(dir(module)) == expected
    with pytest.raises(AttributeError, match="has no attribute 'Adam'"):
        _ = module.Adam


@pytest.mark.parametrize(("module_name", "expected"), MODULES)
def test_all_is_sorted_and_without_repeats(module_name: str, expected: set[str]) -> None:
    names = importlib.import_module(module_name).__all__
    assert len(names) == len(expected)
    assert names == sorted(names)


@pytest.mark.parametrize(("module_name", "expected"), MODULES)
def test_star_import_gives_what_all_lists(module_name: str, expected: set[str]) -> None:
    namespace: dict[str, object] = {}
    exec(f"from {module_name} import *", namespace)
    del namespace["__builtins__"]
    assert set(namespace) == expected


def test_importing_the_package_does_not_import_torch() -> None:
    """Planning is arithmetic, and starts in a fraction of the time that torch takes to import."""
    code = "import sys, hyper_parallel.core.optimizer as o; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", sorted(TOP & OPTIMIZER))
def test_a_name_is_the_same_object_wherever_it_is_imported_from(name: str) -> None:
    assert getattr(hyper_parallel, name) is getattr(hyper_parallel.core.optimizer, name)


@pytest.mark.parametrize("name", sorted(PARAM_GROUPING))
def test_param_grouping_has_the_names_of_the_specification(name: str) -> None:
    module = importlib.import_module("hyper_parallel.core.optimizer.param_grouping")
    assert hasattr(module, name)


@pytest.mark.parametrize("name", sorted(OPTIMIZER))
def test_everything_public_has_a_docstring(name: str) -> None:
    documentation = inspect.getdoc(getattr(hyper_parallel.core.optimizer, name))
    assert documentation
    assert documentation.splitlines()[0].strip()


def test_version_is_a_version() -> None:
    major, minor, *_ = hyper_parallel.__version__.split(".")
    assert major.isdigit()
    assert minor.isdigit()


def test_the_package_says_that_it_is_typed() -> None:
    marker = importlib.resources.files("hyper_parallel") / "py.typed"
    assert marker.is_file()


def test_muon_takes_the_arguments_of_torch_with_their_defaults() -> None:
    """A drop-in: the same names, positions and defaults as ``torch.optim.Muon``."""
    ours = list(inspect.signature(hyper_parallel.Muon).parameters.values())
    theirs = list(inspect.signature(torch.optim.Muon).parameters.values())
    assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
    assert [p.default for p in ours[: len(theirs)]] == [p.default for p in theirs]
    kinds = [p.kind for p in ours[len(theirs) :]]
    assert set(kinds[:-1]) == {inspect.Parameter.KEYWORD_ONLY}
    assert kinds[-1] == inspect.Parameter.VAR_KEYWORD, "arguments of others are told the way out"


def test_muon_is_an_optimizer() -> None:
    assert issubclass(hyper_parallel.Muon, torch.optim.Optimizer)
