# SPDX-License-Identifier: Apache-2.0
"""Tell from type, name and shape what a parameter is for, and which optimizer fits that.

A test of ``ndim`` alone would send embeddings and output heads to Muon. So the type of the owning
module is asked first, then names, then the shape. The answer depends on nothing else, in
particular on no rank and no value: meta tensors, distributed tensors (by their global shape) and
plain tensors give the same one.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from hyper_parallel.core.optimizer.param_uses import ModulePath, ParameterUse, strip_wrappers

__all__ = ["Algorithm", "MatrixView", "Role", "assign_roles"]

Algorithm = Literal["muon", "adamw"]
MatrixView = str | tuple[str, int] | tuple[str, tuple[int, ...]] | None

_CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONV_TRANSPOSE = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ANY_CONV = (*_CONV, *_CONV_TRANSPOSE)
# A head is the last matrix below one of these names; the second set is too common inside a block.
_HEADS = {
    *("lm_head", "lm_heads", "shared_head", "medusa_head", "medusa_heads", "classifier"),
    *("embed_out", "unembed", "unembedding", "logits", "to_logits", "vocab_proj", "qa_outputs"),
    *("v_head", "value_head", "reward_head"),
}
_HEADS_OUTSIDE_BLOCKS = {
    *("head", "heads", "output", "output_layer", "output_projection", "score", "cls"),
}
_GATES = {"gate", "wg", "gating", "gate_network"}
_NAMES = (
    ("bias", re.compile(r"(^|_)bias(es)?(_|\d*$)|^b\d+$")),
    ("gain or scale", re.compile(r"(^|_)(norm|gain|scale|gamma|beta|log)(_|\d*$)")),
    (
        "embedding",
        re.compile(
            r"(^|_)(pos|position|positions|positional|emb|embed|embeds|embedding|embeddings|wpe"
            r"|wte|token|tokens|latents|prompt|prompts|codebook|table)(_|\d*$)"
        ),
    ),
)
_POSITIONAL = re.compile(r"(^|_)(wpe|pos|position\w*)(_|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a parameter is for.

    Attributes:
        algorithm: The optimizer that fits.
        reason: Why, in a few words.
        matrix_view: How Muon should read the parameter, also where AdamW fits better.
    """

    algorithm: Algorithm
    reason: str
    matrix_view: MatrixView = None


def assign_roles(
    model: nn.Module, uses: Sequence[Sequence[ParameterUse]], *, routers: Algorithm
) -> list[Role]:
    """Say what each parameter of a model is for.

    Args:
        model: The model that the parameters belong to.
        uses: The places of each parameter.
        routers: The optimizer for routers of mixtures of experts.

    Returns:
        One role for each item of ``uses``. A tied parameter goes to AdamW if one of its places
        asks for that.
    """
    flat = [use for places in uses for use in places]
    heads = _find_heads(flat, model)
    gates = _find_routers(flat)
    roles = []
    for places in uses:
        at_each = [_role_of(use, heads, routers if use.path in gates else None) for use in places]
        role = next((role for role in at_each if role.algorithm == "adamw"), at_each[0])
        if len(places) > 1:
            reason = f"{role.reason}; tied: also {', '.join(use.fqn for use in places[1:])}"
            role = Role(algorithm=role.algorithm, reason=reason, matrix_view=role.matrix_view)
        roles.append(role)
    return roles


def _role_of(use: ParameterUse, heads: Mapping[ModulePath, str], router: Algorithm | None) -> Role:
    view = _view_of(use)
    reasons = (*(rule(use) for rule in _RULES), _not_a_matrix(use), heads.get(use.path, ""))
    if reason := next(filter(None, reasons), ""):
        return Role(algorithm="adamw", reason=reason, matrix_view=view)
    if router:
        return Role(algorithm=router, reason="router of a mixture of experts", matrix_view=view)
    if isinstance(use.module, _ANY_CONV):
        reason = f"{use.type_name}, one row per output channel"
    elif len(use.shape) == 3:
        reason = f"stack of {use.shape[0]} matrices"
    elif view:
        reason = f"fused matrices of {use.type_name}"
    else:
        reason = f"hidden matrix of {use.type_name}"
    return Role(algorithm="muon", reason=reason, matrix_view=view)


def _view_of(use: ParameterUse) -> MatrixView:
    if isinstance(use.module, _ANY_CONV):
        return "flatten"
    leaf, module = use.path[-1], use.module
    if isinstance(module, nn.MultiheadAttention) and leaf == "in_proj_weight":
        return ("split", (module.embed_dim,) * 3)
    is_gates = leaf.startswith(("weight_ih", "weight_hh")) and len(use.shape) == 2
    if isinstance(module, nn.RNNBase | nn.RNNCellBase) and is_gates:
        num_gates = use.shape[0] // module.hidden_size
        return ("split", (module.hidden_size,) * num_gates) if num_gates > 1 else None
    return None


def _embedding(use: ParameterUse) -> str:
    is_embedding = isinstance(use.module, nn.Embedding | nn.EmbeddingBag)
    return f"embedding ({use.type_name})" if is_embedding or "Embed" in use.type_name else ""


def _lora(use: ParameterUse) -> str:
    is_lora = any(part.lower().startswith("lora_") for part in use.path)
    return "LoRA factor by its name" if is_lora else ""


def _norm(use: ParameterUse) -> str:
    is_norm = "norm" in use.type_name.lower() and not _is_linear(use)
    return f"norm ({use.type_name})" if is_norm else ""


def _vector(use: ParameterUse) -> str:
    if len(use.shape) == 0:
        return "scalar"
    if len(use.shape) > 1:
        return ""
    if use.path[-1] == "weight" and isinstance(use.module, nn.Linear):
        return "1-D, although the weight of a Linear: flattened by FSDP1 or ZeRO-3"
    return f"1-D ({use.path[-1]} of {use.type_name})"


def _conv(use: ParameterUse) -> str:
    module = use.module
    if len(use.shape) < 2:
        return ""
    if isinstance(module, _CONV_TRANSPOSE):
        return f"{use.type_name}: its rows are inputs, not outputs"
    if isinstance(module, _CONV) and module.groups > 1:
        kind = "depthwise" if use.shape[1] == 1 else "grouped"
        return f"{kind} {use.type_name}: its rows do not share their inputs"
    if "Conv" in use.type_name and not isinstance(module, _ANY_CONV) and len(use.shape) > 2:
        return f"{use.type_name} is not torch's: what its dims mean is unknown"
    return ""


def _raw_name(use: ParameterUse) -> str:
    if isinstance(use.module, _ANY_CONV) or _is_linear(use):
        return ""
    leaf = next(
        (part for part in reversed(use.path) if part != "weight" and not part.isdigit()), ""
    )
    return next((f"{what} by its name" for what, pattern in _NAMES if pattern.search(leaf)), "")


def _not_a_matrix(use: ParameterUse) -> str:
    shape = use.shape
    if use.param.is_complex():
        return "complex"
    if _is_linear(use) and shape[0] == 1:
        return "scalar head: one output"
    if isinstance(use.module, _ANY_CONV):
        shape = (shape[0], math.prod(shape[1:]))
    if 1 in shape[-2:]:
        return "vectors: one row or one column"
    if len(shape) > 3:
        return f"{len(shape)}-D and no convolution: which dims are the matrix is unknown"
    return ""


_RULES: tuple[Callable[[ParameterUse], str], ...] = (
    _embedding,
    _lora,
    _norm,
    _vector,
    _conv,
    _raw_name,
)


def _is_linear(use: ParameterUse) -> bool:
    is_linear = isinstance(use.module, nn.Linear) or "Linear" in use.type_name
    return is_linear and len(use.shape) == 2 and use.path[-1] == "weight"


def _find_heads(uses: Sequence[ParameterUse], model: nn.Module) -> dict[ModulePath, str]:
    # Position tables would make heads of the last hidden matrix wherever context equals width.
    vocabularies = {
        use.shape[0]: use.fqn
        for use in uses
        if _embedding(use)
        and len(use.shape) == 2
        and not any(_POSITIONAL.search(part) for part in use.path)
    }
    lists = {
        tuple(strip_wrappers(name).split("."))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.ModuleDict)
    }
    last: dict[ModulePath | int, tuple[ModulePath, str]] = {}
    for use in uses:
        if any(rule(use) for rule in _RULES):
            continue
        if container := _head_container(use.path, lists):
            last[container] = (use.path, "output head by its name")
        if _is_linear(use) and use.shape[0] in vocabularies:
            reason = f"output head: as many rows as {vocabularies[use.shape[0]]}"
            last[use.shape[0]] = (use.path, reason)
    return dict(last.values())


def _head_container(path: ModulePath, lists: set[ModulePath]) -> ModulePath:
    in_block = False
    for i, part in enumerate(path):
        in_block = in_block or part.isdigit()
        is_top = part in _HEADS_OUTSIDE_BLOCKS or path[: i + 1] == ("fc",)
        if part in _HEADS or (is_top and not in_block):
            return path[: i + 2] if path[: i + 1] in lists else path[: i + 1]
    return ()


def _find_routers(uses: Sequence[ParameterUse]) -> set[ModulePath]:
    blocks = {use.path[:i] for use in uses for i, part in enumerate(use.path) if "expert" in part}
    return {
        use.path
        for use in uses
        if any(
            part == "router" or (part in _GATES and use.path[:i] in blocks)
            for i, part in enumerate(use.path)
        )
    }
