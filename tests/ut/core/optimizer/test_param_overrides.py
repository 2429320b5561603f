# SPDX-License-Identifier: Apache-2.0
"""What a caller may say against the rules."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hyper_parallel.core.optimizer.param_groups import muon_param_groups
from tests.fake_group import fake_process_group
from tests.ut.core.optimizer.sorted_models import Model, algorithms, names, reasons


@pytest.fixture
def ranks() -> Iterator[None]:
    with fake_process_group(4):
        yield


def test_a_tag_on_the_parameter_comes_before_the_rules() -> None:
    """A24: copies on two stages, named differently, got different optimizers and drifted."""
    first = nn.ModuleDict({"table": nn.Embedding(9, 4), "up": nn.Linear(4, 5, bias=False)})
    last = nn.ModuleDict({"copy": nn.Linear(4, 9, bias=False), "up": nn.Linear(4, 5, bias=False)})
    assert algorithms(last)["copy.weight"] == "muon"  # nothing tells it from a hidden matrix
    for owner in (first["table"], last["copy"]):
        owner.weight.optimizer_algorithm = "adamw"  # type: ignore[union-attr]
    assert algorithms(first)["table.weight"] == "adamw"
    assert algorithms(last)["copy.weight"] == "adamw"


def test_a_tag_on_the_module_survives_sharding(ranks: None) -> None:
    """A24: fully_shard makes new parameters, without attributes."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Embedding(8, 4))
    model[0].optimizer_algorithm = "adamw"  # type: ignore[assignment]
    model[1].optimizer_algorithm = "muon"  # type: ignore[assignment]
    model[0].weight.optimizer_algorithm = "muon"  # type: ignore[union-attr]
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    assert algorithms(model) == {"0.weight": "adamw", "0.bias": "adamw", "1.weight": "muon"}


def test_a_module_tagged_muon_keeps_its_bias_in_adamw() -> None:
    model = nn.ModuleDict({"lm_head": nn.Linear(4, 4)})
    model["lm_head"].optimizer_algorithm = "muon"  # type: ignore[assignment]
    assert algorithms(model) == {"lm_head.weight": "muon", "lm_head.bias": "adamw"}


def test_an_unknown_or_contradicted_tag_raises() -> None:
    """A24: a tag that loses silently lets copies drift."""
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight.optimizer_algorithm = "sgd"  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"0.weight: optimizer_algorithm must be .* got 'sgd'"):
        muon_param_groups(model)
    model[0].weight.optimizer_algorithm = "adamw"  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"0.weight: override '0\.w\*' says 'muon'.*tag"):
        muon_param_groups(model, overrides={"0.w*": "muon"})


def test_tied_modules_with_different_tags_raise() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model[0].optimizer_algorithm = "adamw"  # type: ignore[assignment]
    model[1].optimizer_algorithm = "muon"  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"0\.weight: the modules that share it"):
        muon_param_groups(model)


def test_options_reach_the_groups_exactly() -> None:
    """A31: a legal 0.0 was replaced by the default."""
    adamw = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.0, "initial_lr": 1.0}
    groups = muon_param_groups(Model(), muon={"momentum": 0.0}, adamw=adamw)
    for group in groups:
        options = {k: v for k, v in group.items() if k not in ("params", "algorithm")}
        options.pop("matrix_view", None)
        assert options == (adamw if group["algorithm"] == "adamw" else {"momentum": 0.0})


def test_later_overrides_win_and_all_that_match_are_applied() -> None:
    """A31: values of the caller are kept exactly, zeros too."""
    groups = muon_param_groups(
        Model(),
        overrides={
            "layers.*.output.weight": {"lr": 0.1, "weight_decay": 0.0},
            "layers.1.*.weight": {"lr": 0.2},
        },
    )
    group = {name: group for group in groups for name, _ in group["params"]}
    assert group["layers.0.output.weight"]["lr"] == 0.1
    assert group["layers.1.output.weight"]["lr"] == 0.2
    assert group["layers.1.output.weight"]["weight_decay"] == 0.0
    assert "lr" not in group["layers.0.gate_proj.weight"]


def test_overrides_choose_algorithm_and_matrix_view() -> None:
    groups = muon_param_groups(
        Model(),
        overrides={
            "*.gate_proj.*": {"matrix_view": ("heads", 3)},
            "stem.weight": {"matrix_view": None},
            "table.weight": {"algorithm": "muon", "lr": 0.5},
        },
    )
    group = {name: group for group in groups for name, _ in group["params"]}
    assert group["layers.0.gate_proj.weight"]["matrix_view"] == ("heads", 3)
    assert group["stem.weight"] is group["layers.0.output.weight"]
    assert (group["table.weight"]["algorithm"], group["table.weight"]["lr"]) == ("muon", 0.5)
    assert reasons(groups)["table.weight"] == (
        "muon: override 'table.weight' (rule: adamw, embedding (Embedding); tied: also proj.weight)"
    )


def test_a_convolution_moved_to_muon_is_flattened() -> None:
    """C07: without a view its kernel would be read as a batch of 3x3 matrices."""
    groups = muon_param_groups(nn.ConvTranspose2d(4, 6, 3), overrides={"weight": "muon"})
    assert groups[0]["matrix_view"] == "flatten"


def test_an_override_matches_any_name_of_a_tied_parameter() -> None:
    groups = muon_param_groups(Model(), overrides={"proj.weight": "muon"})
    assert "table.weight" in names(groups, "muon")


def test_a_pattern_that_matches_nothing_raises_and_names_near_ones() -> None:
    """C15: patterns looked up as literal names never fired."""
    with pytest.raises(ValueError, match=r"'layers\.\*\.moe\.expert\.w1' matches no .*experts\.w1"):
        muon_param_groups(Model(), overrides={"layers.*.moe.expert.w1": "adamw"})


def test_a_pattern_that_matches_frozen_parameters_only_raises() -> None:
    """C22, C15: the override would never take effect."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"'0\.\*' matches frozen parameters only"):
        muon_param_groups(model, overrides={"0.*": "adamw"})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sgd", "algorithm must be 'muon' or 'adamw', got 'sgd'"),
        ({"algorithm": None}, "algorithm must be 'muon' or 'adamw', got None"),
        ({"betas": (0.9, 0.9)}, "'betas' does not apply to algorithm 'muon'"),
        ({"weight_decey": 0.1}, "did you mean 'weight_decay'"),
        ({"params": []}, "'params' cannot be an option"),
        ({"lr": -1.0}, "lr must be a non-negative number, got -1.0"),
        ({"lr": "1"}, "lr must be a non-negative number, got '1'"),
        ({"lr": float("nan")}, "lr must be a non-negative number, got nan"),
        ({"matrix_view": "rows"}, "matrix_view must be None, 'flatten'"),
        ({"algorithm": "adamw", "matrix_view": "flatten"}, "'matrix_view' does not apply"),
    ],
)
def test_an_override_that_makes_no_sense_names_its_pattern(
    override: str | dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"override '0\.w\*'.*{message}"):
        muon_param_groups(nn.Sequential(nn.Linear(4, 4)), overrides={"0.w*": override})


def test_an_override_of_another_type_raises() -> None:
    with pytest.raises(TypeError, match=r"override '\*' must be"):
        muon_param_groups(nn.Linear(4, 4), overrides={"*": 3})  # type: ignore[dict-item]


def test_a_vector_sent_to_muon_raises() -> None:
    """A21: Newton-Schulz met a vector of 1.5 million elements."""
    with pytest.raises(ValueError, match=r"0.bias: override '0\.\*' .* two dims, got shape \(4,\)"):
        muon_param_groups(nn.Sequential(nn.Linear(4, 4)), overrides={"0.*": "muon"})


@pytest.mark.parametrize("options", [{"muon": {"betas": (0, 0)}}, {"adamw": {"momentum": 0.9}}])
def test_options_of_the_other_algorithm_raise(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"(muon|adamw)=: .* does not apply"):
        muon_param_groups(nn.Linear(4, 4), **options)


def test_an_unknown_router_algorithm_raises() -> None:
    with pytest.raises(ValueError, match="routers must be"):
        muon_param_groups(nn.Linear(4, 4), routers="sgd")  # type: ignore[arg-type]
