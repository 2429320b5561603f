# SPDX-License-Identifier: Apache-2.0
"""Models from configs and functions, and that the plan is the optimizer's own."""

import json
from pathlib import Path

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hyper_parallel import Muon, muon_param_groups
from hyper_parallel.models.errors import InputError
from hyper_parallel.models.mesh_axes import parse_mesh
from hyper_parallel.models.planning import PlanSettings, plan_model
from hyper_parallel.models.sources import load_model
from tests.fake_group import fake_process_group

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "dtype": "bfloat16",
}


def two_layers() -> nn.Module:
    """What ``module:function`` calls."""
    return nn.Sequential(nn.Linear(16, 64, bias=False), nn.Linear(64, 16))


def config(folder: Path, **changes: object) -> str:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return str(folder / "config.json")


def test_a_config_gives_the_model_that_transformers_builds(tmp_path: Path) -> None:
    model = load_model(config(tmp_path))
    shapes = {param.name: param.shape for param in model.params if param.algorithm == "muon"}
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (16, 32)
    assert len(shapes) == 7
    assert (model.num_heads, model.num_kv_heads) == (4, 2)
    assert load_model(str(tmp_path)).params == model.params


@pytest.mark.parametrize("model_type", ["mixtral", "bert", "t5", "mamba", "gpt_oss", "phi3"])
def test_any_architecture_that_transformers_knows_gives_parameters(
    model_type: str, tmp_path: Path
) -> None:
    small = {"num_hidden_layers": 1, "num_layers": 1, "hidden_size": 48, "d_model": 48}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **small}))
    model = load_model(str(tmp_path))
    assert any(param.algorithm == "muon" for param in model.params)


def test_a_config_that_cannot_be_built_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config.json: transformers cannot build llama"):
        load_model(config(tmp_path, hidden_size="wide"))


def test_a_preset_comes_before_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert load_model("gpt2").numel == 124_439_808
    with pytest.raises(InputError, match="gpt2 is a directory without a config"):
        load_model("./gpt2")


def test_a_function_builds_on_no_device() -> None:
    model = load_model(f"{__name__}:two_layers")
    assert [(p.name, p.shape, p.algorithm) for p in model.params] == [
        ("0.weight", (64, 16), "muon"),
        ("1.weight", (16, 64), "muon"),
        ("1.bias", (16,), "adamw"),
    ]


# DTensor caches meshes by value, and a mesh knows its rank: another rank needs another mesh.
@pytest.mark.parametrize(("rank", "mesh_shape"), [(0, (2, 2)), (3, (2, 3))])
@pytest.mark.parametrize(
    ("share_replicas", "shard_momentum"), [("auto", False), ("auto", True), (False, False)]
)
def test_the_plan_is_that_of_the_optimizer(
    rank: int, mesh_shape: tuple[int, int], share_replicas: bool | str, *, shard_momentum: bool
) -> None:
    settings = PlanSettings(
        share_replicas=share_replicas,
        shard_momentum=shard_momentum,
        bucket_bytes=4096,
        device_type="cpu",
    )
    described = load_model(f"{__name__}:two_layers")
    parallelism = parse_mesh(f"dp_replicate={mesh_shape[0]},dp_shard={mesh_shape[1]}")
    planned = plan_model(described, parallelism, settings, rank=rank)
    with fake_process_group(parallelism.world_size, rank):
        model = two_layers()
        names = ("dp_replicate", "dp_shard")
        fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
        optimizer = Muon(
            muon_param_groups(model),
            share_replicas=share_replicas,
            shard_momentum=shard_momentum,
            bucket_bytes=4096,
        )
        assert optimizer.plan == planned.plan
        assert optimizer.plan.digest() == planned.plan.digest()
