# SPDX-License-Identifier: Apache-2.0
"""Presets: the published numbers, and the modules that transformers makes of the same ones."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hyper_parallel.models.architectures import Dimensions, Experts, LatentAttention
from hyper_parallel.models.catalog import PRESETS, Family, model_of, preset
from hyper_parallel.models.errors import InputError
from hyper_parallel.models.module_source import module_params

transformers: Any = pytest.importorskip("transformers")

ROUNDING = {"qwen3-1.7b": 0.05e9}
"""Published with two digits: half a unit of the last one is more than 1 %."""


@pytest.mark.parametrize("name", PRESETS)
def test_total_is_the_published_one(name: str) -> None:
    published = PRESETS[name].published
    assert abs(preset(name).numel - published) <= max(0.01 * published, ROUNDING.get(name, 0))


@pytest.mark.parametrize("name", PRESETS)
def test_every_number_has_a_source(name: str) -> None:
    assert preset(name).source.startswith("https://huggingface.co/")


def test_unknown_preset_lists_the_near_ones() -> None:
    with pytest.raises(InputError, match=r"unknown model 'lama3-8b'; did you mean 'llama3-8b'"):
        preset("lama3-8b")


DIMS = Dimensions(
    vocabulary=50, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden=64
)
ATTENTION = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 50,
}


def changed(**changes: Any) -> Dimensions:
    return replace(DIMS, **changes)


FAMILIES: dict[Family, tuple[Dimensions, dict[str, Any]]] = {
    "gpt2": (
        changed(num_kv_heads=4, head_dim=8, hidden=128, context=16, is_tied=True),
        {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 16, "vocab_size": 50},
    ),
    "llama": (DIMS, {**ATTENTION, "tie_word_embeddings": False}),
    "qwen3": (
        changed(is_tied=True, has_qk_norm=True),
        {**ATTENTION, "tie_word_embeddings": True},
    ),
    "qwen3_moe": (
        changed(has_qk_norm=True, experts=Experts(num_experts=4, hidden=8)),
        {**ATTENTION, "num_experts": 4, "moe_intermediate_size": 8},
    ),
    "deepseek_v3": (
        changed(
            num_kv_heads=4,
            latent=LatentAttention(q_rank=12, kv_rank=6, nope_dim=4, rope_dim=2, v_dim=4),
            experts=Experts(num_experts=4, hidden=8, num_shared=1, num_dense_layers=1),
        ),
        {
            **{key: value for key, value in ATTENTION.items() if key != "head_dim"},
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 12,
            "kv_lora_rank": 6,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 2,
            "v_head_dim": 4,
        },
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_the_module_that_transformers_makes(family: Family) -> None:
    """Names, order, shapes, and for which optimizer, by ``muon_param_groups`` itself."""
    dims, config = FAMILIES[family]
    transformers.logging.set_verbosity_error()
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(family, **config)
        )
    assert list(model_of("tiny", family, dims).params) == list(module_params(module))
