# SPDX-License-Identifier: Apache-2.0
"""Published models by name: dimensions, totals and where both were published. No torch."""

from dataclasses import dataclass
from typing import Final, Literal

from hyper_parallel.models.architectures import (
    Dimensions,
    Experts,
    LatentAttention,
    gpt2_params,
    llama_params,
)
from hyper_parallel.models.errors import InputError, unknown
from hyper_parallel.models.model_param import Model

Family = Literal["gpt2", "llama", "qwen3", "qwen3_moe", "deepseek_v3"]

_NORMS: Final[dict[Family, str]] = {
    "llama": "LlamaRMSNorm",
    "qwen3": "Qwen3RMSNorm",
    "qwen3_moe": "Qwen3MoeRMSNorm",
    "deepseek_v3": "DeepseekV3RMSNorm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A published model.

    Attributes:
        family: The architecture, as ``model_type`` names it.
        dims: Its dimensions.
        published: Total parameters as published.
        source: URL of the published ``config.json``, whose repository gives the total as well.
    """

    family: Family
    dims: Dimensions
    published: float
    source: str


def model_of(name: str, family: Family, dims: Dimensions, source: str = "dimensions") -> Model:
    """The parameters of an architecture.

    Args:
        name: What to call the model.
        family: The architecture.
        dims: The dimensions.
        source: Where they come from.

    Returns:
        The model.
    """
    params = gpt2_params(dims) if family == "gpt2" else llama_params(dims, norm=_NORMS[family])
    return Model(
        name=name,
        params=tuple(params),
        source=source,
        num_heads=dims.num_heads,
        num_kv_heads=dims.num_kv_heads,
    )


def preset(name: str) -> Model:
    """A published model by its name.

    Args:
        name: A key of ``PRESETS``; case does not matter.

    Returns:
        The model.

    Raises:
        InputError: If there is none of this name.
    """
    found = PRESETS.get(name.lower())
    if found is None:
        raise InputError(
            unknown(
                "model",
                name,
                PRESETS,
                hint="(or give a config.json, a JSON list of shapes, or module:function)",
            )
        )
    return model_of(name.lower(), found.family, found.dims, found.source)


def _config_url(repository: str) -> str:
    return f"https://huggingface.co/{repository}/blob/main/config.json"


def _gpt2(width: int, num_layers: int, num_heads: int, *, published: float, suffix: str) -> Preset:
    dims = Dimensions(
        vocabulary=50257,
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=64,
        hidden=4 * width,
        context=1024,
        is_tied=True,
    )
    source = _config_url(f"openai-community/gpt2{suffix}")
    return Preset(family="gpt2", dims=dims, published=published, source=source)


def _llama3(
    width: int, hidden: int, num_layers: int, num_heads: int, *, published: float, repository: str
) -> Preset:
    dims = Dimensions(
        vocabulary=128256,
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        hidden=hidden,
    )
    source = _config_url(f"meta-llama/{repository}")
    return Preset(family="llama", dims=dims, published=published, source=source)


def _qwen3(
    width: int,
    hidden: int,
    num_layers: int,
    num_heads: int,
    *,
    published: float,
    name: str,
    is_tied: bool = False,
) -> Preset:
    dims = Dimensions(
        vocabulary=151936,
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        hidden=hidden,
        is_tied=is_tied,
        has_qk_norm=True,
    )
    source = _config_url(f"Qwen/Qwen3-{name}")
    return Preset(family="qwen3", dims=dims, published=published, source=source)


def _qwen3_moe(
    width: int, expert_hidden: int, num_layers: int, num_heads: int, *, published: float, name: str
) -> Preset:
    dims = Dimensions(
        vocabulary=151936,
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=4,
        head_dim=128,
        hidden=0,  # every layer is a mixture
        has_qk_norm=True,
        experts=Experts(num_experts=128, hidden=expert_hidden),
    )
    source = _config_url(f"Qwen/Qwen3-{name}")
    return Preset(family="qwen3_moe", dims=dims, published=published, source=source)


def _deepseek_v3(
    vocabulary: int,
    num_heads: int,
    num_experts: int,
    num_dense_layers: int,
    *,
    published: float,
    repository: str,
) -> Preset:
    dims = Dimensions(
        vocabulary=vocabulary,
        width=7168,
        num_layers=61,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=192,
        hidden=18432,
        latent=LatentAttention(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        experts=Experts(
            num_experts=num_experts, hidden=2048, num_shared=1, num_dense_layers=num_dense_layers
        ),
    )
    source = _config_url(repository)
    return Preset(family="deepseek_v3", dims=dims, published=published, source=source)


# Totals are those of the model cards, except: GPT-2's are exact counts (the paper's own table is
# known to be off), Qwen3's dense ones are from table 1 of the report and the cards.
PRESETS: Final[dict[str, Preset]] = {
    "gpt2": _gpt2(768, 12, 12, published=124.4e6, suffix=""),
    "gpt2-medium": _gpt2(1024, 24, 16, published=354.8e6, suffix="-medium"),
    "gpt2-large": _gpt2(1280, 36, 20, published=774.0e6, suffix="-large"),
    "gpt2-xl": _gpt2(1600, 48, 25, published=1.558e9, suffix="-xl"),
    "llama3-8b": _llama3(4096, 14336, 32, 32, published=8.03e9, repository="Meta-Llama-3-8B"),
    "llama3-70b": _llama3(8192, 28672, 80, 64, published=70.6e9, repository="Meta-Llama-3-70B"),
    "llama3-405b": _llama3(16384, 53248, 126, 128, published=405.9e9, repository="Llama-3.1-405B"),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, published=0.6e9, name="0.6B", is_tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, published=1.7e9, name="1.7B", is_tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, published=4.0e9, name="4B", is_tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, published=8.2e9, name="8B"),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, published=14.8e9, name="14B"),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, published=32.8e9, name="32B"),
    "qwen3-30b-a3b": _qwen3_moe(2048, 768, 48, 32, published=30.5e9, name="30B-A3B"),
    "qwen3-235b-a22b": _qwen3_moe(4096, 1536, 94, 64, published=235e9, name="235B-A22B"),
    "deepseek-v3": _deepseek_v3(
        129280, 128, 256, 3, published=671e9, repository="deepseek-ai/DeepSeek-V3"
    ),
    "kimi-k2": _deepseek_v3(
        163840, 64, 384, 1, published=1.026e12, repository="moonshotai/Kimi-K2-Instruct"
    ),
}
"""Models by name. Multi-token-prediction layers are left out, as in the published totals."""
