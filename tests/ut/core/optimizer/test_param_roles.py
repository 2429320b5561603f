# SPDX-License-Identifier: Apache-2.0
"""Which parameter goes to which optimizer by the rules, and why."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrizations import weight_norm

from hyper_parallel.core.optimizer.param_groups import muon_param_groups
from tests.fake_group import fake_process_group
from tests.ut.core.optimizer.sorted_models import MUON, Model, algorithms, names, reasons


def test_types_then_names_then_shapes_decide() -> None:
    """A22: ndim took embeddings and heads; name filters missed an embedding called 'table'."""
    groups = muon_param_groups(Model())
    assert set(names(groups, "muon")) == MUON
    why = reasons(groups)
    assert why["table.weight"] == "adamw: embedding (Embedding); tied: also proj.weight"
    assert why["value.weight"] == "adamw: scalar head: one output"
    assert why["stem.bias"] == "adamw: 1-D (bias of Conv2d)"
    assert why["layers.0.norm.weight"] == "adamw: norm (LayerNorm)"
    assert why["layers.0.gain"] == "adamw: gain or scale by its name"
    assert why["layers.0.moe.experts.w1"] == "muon: stack of 4 matrices"
    assert why["layers.0.moe.experts.w1_bias"] == "adamw: bias by its name"
    assert why["layers.1.moe.gate.weight"] == "muon: router of a mixture of experts"
    assert why["temperature"] == "adamw: scalar"
    assert why["pos_embed"] == "adamw: embedding by its name"


@pytest.mark.parametrize(
    ("model", "muon"),
    [
        (nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)), {"1.weight"}),
        (nn.ModuleDict({"fc1": nn.Linear(4, 4), "lm_head": nn.Linear(4, 7)}), {"fc1.weight"}),
        (
            nn.ModuleDict({"classifier": nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))}),
            {"classifier.0.weight"},
        ),
        (nn.ModuleDict({"heads": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 5)])}), set()),
        (nn.ModuleDict({"fc": nn.Linear(4, 4)}), set()),
        (
            nn.ModuleDict({"wpe": nn.Embedding(4, 4), "down": nn.Linear(16, 4)}),
            {"down.weight"},
        ),
        (nn.ModuleDict({"bag": nn.EmbeddingBag(9, 4), "b": nn.Linear(4, 4)}), {"b.weight"}),
    ],
)
def test_output_heads_are_found_by_size_and_name(model: nn.Module, muon: set[str]) -> None:
    """A22: heads under other names went to Muon."""
    found = algorithms(model)
    assert {name for name, algorithm in found.items() if algorithm == "muon"} == muon


@pytest.mark.parametrize(
    ("module", "algorithm", "view"),
    [
        (nn.Conv1d(4, 6, 3), "muon", "flatten"),
        (nn.Conv3d(4, 6, 2), "muon", "flatten"),
        (nn.Conv2d(1, 6, 3), "muon", "flatten"),
        (nn.Conv2d(4, 1, 3), "adamw", None),
        (nn.Conv2d(4, 4, 3, groups=4), "adamw", None),
        (nn.Conv2d(4, 4, 3, groups=2), "adamw", None),
        (nn.ConvTranspose2d(4, 6, 3), "adamw", None),
        (nn.Linear(1, 4), "adamw", None),
        (nn.Bilinear(3, 4, 5), "muon", None),
        (nn.Linear(4, 4, dtype=torch.complex64), "adamw", None),
    ],
)
def test_parameters_of_more_dims_have_one_rule_each(
    module: nn.Module, algorithm: str, view: str | None
) -> None:
    """C07: a 3-D gain was read as a batch of matrices."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = muon_param_groups(module).report[0]
    assert (record.algorithm, record.matrix_view) == (algorithm, view)


@pytest.mark.parametrize(
    ("shape", "algorithm"),
    [
        ((8, 1, 1), "adamw"),
        ((1, 8, 1), "adamw"),
        ((2, 3, 4, 5), "adamw"),
        ((), "adamw"),
        ((0, 4), "muon"),
        ((4, 0), "muon"),
        ((2, 3, 4), "muon"),
    ],
)
def test_bare_parameters_go_by_their_shape(shape: tuple[int, ...], algorithm: str) -> None:
    """C07: each of these has a documented answer."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(shape))})
    assert algorithms(model) == {"w": algorithm}


def test_fused_matrices_of_torch_modules_are_split() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2), "rnn": nn.LSTM(4, 5)})
    views = {r.fqn: r.matrix_view for r in muon_param_groups(model).report}
    assert views["attn.in_proj_weight"] == ("split", (4, 4, 4))
    assert views["attn.out_proj.weight"] is None
    assert views["rnn.weight_hh_l0"] == ("split", (5, 5, 5, 5))


def test_routers_go_to_adamw_if_asked() -> None:
    """A22: routers are matrices that some want elsewhere; gate_proj is none of them."""
    found = names(muon_param_groups(Model(), routers="adamw"), "muon")
    assert MUON - set(found) == {"layers.0.moe.gate.weight", "layers.1.moe.gate.weight"}
    assert algorithms(
        nn.ModuleDict({"router": nn.Linear(4, 4), "gate": nn.Linear(4, 4)}), routers="adamw"
    ) == {
        "router.weight": "adamw",
        "router.bias": "adamw",
        "gate.weight": "muon",
        "gate.bias": "adamw",
    }


def test_lora_factors_go_to_adamw_until_an_override_moves_them() -> None:
    """A25: Muon on the A factor, 4 rows of 512, gave noise."""
    parts = {"lora_A": nn.Linear(512, 4, bias=False), "lora_B": nn.Linear(4, 512, bias=False)}
    model = nn.ModuleDict({"q": nn.ModuleDict(parts), "o": nn.Linear(4, 4, bias=False)})
    assert algorithms(model) == {
        "q.lora_A.weight": "adamw",
        "q.lora_B.weight": "adamw",
        "o.weight": "muon",
    }
    moved = algorithms(model, overrides={"*.lora_B.*": "muon"})
    assert [name for name, algorithm in moved.items() if algorithm == "muon"] == [
        "q.lora_B.weight",
        "o.weight",
    ]


def test_a_parametrized_embedding_is_still_an_embedding() -> None:
    """A22: the tensor then belongs to a helper module, not to the embedding."""
    model = nn.ModuleDict({"table": nn.Embedding(9, 4), "up": nn.Linear(4, 5, bias=False)})
    for module in model.values():
        weight_norm(module)
    found = algorithms(model)
    assert found["table.parametrizations.weight.original1"] == "adamw"
    assert found["up.parametrizations.weight.original0"] == "adamw"
    assert found["up.parametrizations.weight.original1"] == "muon"


def test_no_rank_decides_anything() -> None:
    """A24: grouping is a function of name, type, shape and tag."""
    reports = []
    for rank in (0, 3):
        with fake_process_group(4, rank):
            model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8))
            fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
            reports.append(muon_param_groups(model).report)
    assert reports[0] == reports[1]


def test_the_meta_device_gives_the_same_groups() -> None:
    """A21: placeholders sent everything to AdamW; meta tensors keep their shapes."""
    with torch.device("meta"):
        on_meta = muon_param_groups(Model())
    assert on_meta.report == muon_param_groups(Model()).report


def test_wrapped_models_are_sorted_alike_under_their_own_names() -> None:
    """A20: a wrapper that the choice of algorithm did not know of left Muon unused."""
    plain = muon_param_groups(Model())
    inner = Model()
    inner.layers[0] = nn.ModuleDict({"_checkpoint_wrapped_module": inner.layers[0]})
    compiled = torch.compile(inner)
    assert isinstance(compiled, nn.Module)
    groups = muon_param_groups(compiled, overrides={"layers.1.output.bias": {"lr": 0.5}})
    assert [r.fqn for r in groups.report] == [name for name, _ in compiled.named_parameters()]
    assert [r.algorithm for r in groups.report] == [r.algorithm for r in plain.report]
    assert "_orig_mod.layers.1.output.bias" in names(groups, "adamw")


def test_a_lazy_parameter_raises() -> None:
    with pytest.raises(ValueError, match=r"0\.weight: a lazy parameter has no shape"):
        muon_param_groups(nn.Sequential(nn.LazyLinear(4)))
