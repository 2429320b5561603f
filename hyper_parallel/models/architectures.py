# SPDX-License-Identifier: Apache-2.0
"""Parameters of decoder-only transformers, from their dimensions. No torch.

Names, order and shapes are those of the modules in Hugging Face ``transformers`` 5, where the
experts of a layer are stacked; what a parameter is for is what ``muon_param_groups`` says about
those modules. A test holds both to it.

References:
    GPT-2: https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
    Llama 3: https://arxiv.org/abs/2407.21783
    Qwen3: https://arxiv.org/abs/2505.09388
    DeepSeek-V3 (multi-head latent attention): https://arxiv.org/abs/2412.19437
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hyper_parallel.models.model_param import ModelParam


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Dimensions of multi-head latent attention.

    Attributes:
        q_rank: Width of the queries' bottleneck.
        kv_rank: Width of the bottleneck of keys and values.
        nope_dim: Per head, the part of queries and keys without rotary embedding.
        rope_dim: Per head, the part with it.
        v_dim: Values, per head.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Dimensions of a mixture of experts.

    Attributes:
        num_experts: Routed experts in a layer.
        hidden: Hidden width of one expert.
        num_shared: Experts that see every token; they are one MLP of that many times the width.
        num_dense_layers: Layers at the start that have a plain MLP.
    """

    num_experts: int
    hidden: int
    num_shared: int = 0
    num_dense_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """Dimensions of a decoder-only transformer.

    Attributes:
        vocabulary: Rows of the embedding.
        width: Width of the residual stream.
        num_layers: Layers.
        num_heads: Attention heads.
        num_kv_heads: Heads of keys and values.
        head_dim: Width of a head.
        hidden: Hidden width of the MLP.
        context: Learned positions; none where positions are rotary.
        is_tied: Whether the output head is the embedding.
        has_qk_norm: Whether queries and keys are normalized, per head.
        latent: Latent attention in place of grouped queries.
        experts: A mixture of experts in place of the MLP.
    """

    vocabulary: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    context: int = 0
    is_tied: bool = False
    has_qk_norm: bool = False
    latent: LatentAttention | None = None
    experts: Experts | None = None


def gpt2_params(dims: Dimensions) -> Iterator[ModelParam]:
    """Parameters of GPT-2, whose ``Conv1D`` has inputs as rows.

    Args:
        dims: Dimensions with a context; the head is tied.

    Yields:
        The parameters, in the module's order.
    """
    d, hidden = dims.width, dims.hidden
    tied = "embedding (Embedding); tied: also lm_head.weight"
    yield _adamw("transformer.wte.weight", (dims.vocabulary, d), tied)
    yield _adamw("transformer.wpe.weight", (dims.context, d), "embedding (Embedding)")
    for layer in range(dims.num_layers):
        at = f"transformer.h.{layer}"
        yield from _layer_norm(f"{at}.ln_1", d)
        yield from _conv1d(f"{at}.attn.c_attn", d, 3 * d)
        yield from _conv1d(f"{at}.attn.c_proj", d, d)
        yield from _layer_norm(f"{at}.ln_2", d)
        yield from _conv1d(f"{at}.mlp.c_fc", d, hidden)
        yield from _conv1d(f"{at}.mlp.c_proj", hidden, d)
    yield from _layer_norm("transformer.ln_f", d)


def llama_params(dims: Dimensions, *, norm: str = "LlamaRMSNorm") -> Iterator[ModelParam]:
    """Parameters of a transformer with gated MLPs or experts and rotary positions.

    Args:
        dims: Dimensions.
        norm: Class name of the norms.

    Yields:
        The parameters, in the module's order.
    """
    d = dims.width
    embedding = "model.embed_tokens.weight"
    tied = "; tied: also lm_head.weight" if dims.is_tied else ""
    yield _adamw(embedding, (dims.vocabulary, d), f"embedding (Embedding){tied}")
    for layer in range(dims.num_layers):
        at = f"model.layers.{layer}"
        if dims.latent:
            yield from _latent_attention(f"{at}.self_attn", dims, dims.latent, norm)
        else:
            yield from _attention(f"{at}.self_attn", dims, norm)
        if dims.experts and layer >= dims.experts.num_dense_layers:
            yield from _mixture(f"{at}.mlp", d, dims.experts)
        else:
            yield from _mlp(f"{at}.mlp", d, dims.hidden)
        yield _norm(f"{at}.input_layernorm.weight", d, norm)
        yield _norm(f"{at}.post_attention_layernorm.weight", d, norm)
    yield _norm("model.norm.weight", d, norm)
    if not dims.is_tied:
        reason = f"output head: as many rows as {embedding}"
        yield _adamw("lm_head.weight", (dims.vocabulary, d), reason)


def _attention(at: str, dims: Dimensions, norm: str) -> Iterator[ModelParam]:
    q_rows, kv_rows = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    yield _linear(f"{at}.q_proj.weight", q_rows, dims.width)
    yield _linear(f"{at}.k_proj.weight", kv_rows, dims.width)
    yield _linear(f"{at}.v_proj.weight", kv_rows, dims.width)
    yield _linear(f"{at}.o_proj.weight", dims.width, q_rows)
    if dims.has_qk_norm:
        yield _norm(f"{at}.q_norm.weight", dims.head_dim, norm)
        yield _norm(f"{at}.k_norm.weight", dims.head_dim, norm)


def _latent_attention(
    at: str, dims: Dimensions, latent: LatentAttention, norm: str
) -> Iterator[ModelParam]:
    d, heads = dims.width, dims.num_heads
    yield _linear(f"{at}.q_a_proj.weight", latent.q_rank, d)
    yield _norm(f"{at}.q_a_layernorm.weight", latent.q_rank, norm)
    yield _linear(
        f"{at}.q_b_proj.weight", heads * (latent.nope_dim + latent.rope_dim), latent.q_rank
    )
    yield _linear(f"{at}.kv_a_proj_with_mqa.weight", latent.kv_rank + latent.rope_dim, d)
    yield _norm(f"{at}.kv_a_layernorm.weight", latent.kv_rank, norm)
    yield _linear(
        f"{at}.kv_b_proj.weight", heads * (latent.nope_dim + latent.v_dim), latent.kv_rank
    )
    yield _linear(f"{at}.o_proj.weight", d, heads * latent.v_dim)


def _mlp(at: str, width: int, hidden: int) -> Iterator[ModelParam]:
    yield _linear(f"{at}.gate_proj.weight", hidden, width)
    yield _linear(f"{at}.up_proj.weight", hidden, width)
    yield _linear(f"{at}.down_proj.weight", width, hidden)


def _mixture(at: str, width: int, experts: Experts) -> Iterator[ModelParam]:
    number, hidden = experts.num_experts, experts.hidden
    reason = f"stack of {number} matrices"
    for name, shape in (
        ("gate_up_proj", (number, 2 * hidden, width)),
        ("down_proj", (number, width, hidden)),
    ):
        yield ModelParam(name=f"{at}.experts.{name}", shape=shape, algorithm="muon", role=reason)
    yield ModelParam(
        name=f"{at}.gate.weight",
        shape=(number, width),
        algorithm="muon",
        role="router of a mixture of experts",
    )
    if experts.num_shared:
        yield from _mlp(f"{at}.shared_experts", width, experts.num_shared * hidden)


def _linear(name: str, num_rows: int, num_cols: int) -> ModelParam:
    return ModelParam(
        name=name, shape=(num_rows, num_cols), algorithm="muon", role="hidden matrix of Linear"
    )


def _conv1d(at: str, num_inputs: int, num_outputs: int) -> Iterator[ModelParam]:
    yield ModelParam(
        name=f"{at}.weight",
        shape=(num_inputs, num_outputs),
        algorithm="muon",
        role="hidden matrix of Conv1D",
        is_transposed=True,
    )
    yield _adamw(f"{at}.bias", (num_outputs,), "1-D (bias of Conv1D)")


def _layer_norm(at: str, width: int) -> Iterator[ModelParam]:
    yield _norm(f"{at}.weight", width, "LayerNorm")
    yield _norm(f"{at}.bias", width, "LayerNorm")


def _norm(name: str, width: int, type_name: str) -> ModelParam:
    return _adamw(name, (width,), f"norm ({type_name})")


def _adamw(name: str, shape: tuple[int, ...], role: str) -> ModelParam:
    return ModelParam(name=name, shape=shape, algorithm="adamw", role=role)
