# SPDX-License-Identifier: Apache-2.0
"""Where the usual recipes put a parameter: FSDP, HSDP, tensor and expert parallelism. No torch.

FSDP shards dim 0, and replicates over ``dp_replicate``. Tensor parallelism shards what feeds a
nonlinearity or the heads by outputs (column-wise) and what comes back by inputs (row-wise), told
apart by the name of the module; all else is replicated over ``tp``. Experts are shared out over
``ep`` by dim 0, and FSDP shards dim 0 of a stack again, or dim 1 where the ranks outnumber the
experts. ``fully_shard`` over an axis that cuts the same dim gives ``_StridedShard``.

References:
    Shoeybi et al., "Megatron-LM", column and row parallel: https://arxiv.org/abs/1909.08053
    torch.distributed.tensor.parallel: https://pytorch.org/docs/stable/distributed.tensor.parallel.html
    torch.distributed.fsdp.fully_shard: https://pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hyper_parallel.core.optimizer.layout import AxisPlacement, ParamLayout
from hyper_parallel.models.errors import InputError, unknown
from hyper_parallel.models.mesh_axes import FSDP_AXES, NamedMesh, Parallelism
from hyper_parallel.models.model_param import Model, ModelParam

# Leaf names of modules, in the spelling of transformers, torchtitan, Megatron, GPT-NeoX and T5.
_COLUMN_WISE: Final = {
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "query", "key", "value", "query_key_value"),
    *("wq", "wk", "wv", "wqkv", "Wqkv", "linear_qkv", "c_attn"),
    *("q_b_proj", "kv_b_proj", "wq_b", "wkv_b"),
    *("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "w13", "fc1", "fc_in", "lin1", "c_fc"),
    *("wi", "wi_0", "wi_1", "dense_h_to_4h", "linear_fc1"),
    *("embed_tokens", "tok_embeddings", "wte", "lm_head", "output"),
}
_ROW_WISE: Final = {
    *("o_proj", "out_proj", "wo", "dense", "linear_proj", "c_proj"),
    *("down_proj", "w2", "fc2", "fc_out", "lin2", "dense_4h_to_h", "linear_fc2"),
}
_PLACEMENT: Final = re.compile(
    r"(?P<replicate>R|Replicate\(\))|(?:S|Shard)\((?P<dim>-?\d+)(?:/(?P<split>\d+))?\)"
)
_EXPERT: Final = re.compile(r"(?:^|\.)experts\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedParam:
    """A parameter and where it lives.

    Attributes:
        param: The parameter.
        mesh: Its mesh.
        layout: Its layout on that mesh.
    """

    param: ModelParam
    mesh: NamedMesh
    layout: ParamLayout


@dataclass(frozen=True, slots=True)
class _Choice:
    """What an axis does before strides are worked out; ``split`` if a person said so."""

    dim: int | None
    split: int | None = None


def check_heads(model: Model, parallelism: Parallelism) -> None:
    """Make sure that tensor parallelism gives every rank whole heads.

    Args:
        model: The model; what it does not tell is not checked.
        parallelism: Sizes of the axes.

    Raises:
        InputError: If ``tp`` does not divide a number of heads.
    """
    tp = parallelism.size("tp")
    heads = {"attention heads": model.num_heads, "key/value heads": model.num_kv_heads}
    for what, number in heads.items():
        if number is not None and number % tp:
            raise InputError(
                f"tp={tp} does not divide the {number} {what} of {model.name}; choose one of "
                f"{', '.join(str(n) for n in range(1, number + 1) if number % n == 0)}"
            )


def stage_params(model: Model, parallelism: Parallelism) -> list[list[ModelParam]]:
    """Cut a model into pipeline stages of consecutive layers, as even as their number allows.

    What comes before the layers is in the first stage, what comes after them in the last.

    Args:
        model: The model.
        parallelism: Sizes of the axes.

    Returns:
        The parameters of each stage.

    Raises:
        InputError: If there are more stages than layers.
    """
    num_stages = parallelism.size("pp")
    layers = sorted({param.layer for param in model.params if param.layer is not None})
    if num_stages > max(1, len(layers)):
        raise InputError(f"pp={num_stages}: {model.name} has only {len(layers)} layers to cut")
    small, num_large = divmod(len(layers), num_stages)
    edges = [small * stage + min(stage, num_large) for stage in range(num_stages + 1)]
    stage_at = {
        layer: stage
        for stage in range(num_stages)
        for layer in layers[edges[stage] : edges[stage + 1]]
    }
    stages: list[list[ModelParam]] = [[] for _ in range(num_stages)]
    met_layer = False
    for param in model.params:
        met_layer = met_layer or param.layer is not None
        outside = num_stages - 1 if met_layer else 0
        stages[outside if param.layer is None else stage_at[param.layer]].append(param)
    return stages


def place(
    params: Sequence[ModelParam], parallelism: Parallelism, *, stage: int, rank: int
) -> list[PlacedParam]:
    """Say where the parameters of one pipeline stage live.

    Args:
        params: The parameters.
        parallelism: Sizes of the axes.
        stage: The stage.
        rank: Global rank; under expert parallelism it has only some of the experts that are
            parameters of their own.

    Returns:
        The parameters that this rank holds, placed.

    Raises:
        InputError: If a placement names an axis or a dim that is not there.
    """
    dense, experts = parallelism.dense_mesh(stage), parallelism.expert_mesh(stage)
    ep = parallelism.size("ep")
    ep_rank = rank % ep
    own = parallelism.expert_submesh(stage, ep_rank)
    num_experts = _expert_counts(params)
    layouts: dict[tuple[object, ...], ParamLayout] = {}  # one for parameters that lie alike
    placed = []
    for param in params:
        expert = _EXPERT.search(param.name)
        mesh = dense
        if expert and ep > 1:
            total = num_experts[param.name[: expert.start()]]
            if total % ep:
                raise InputError(f"ep={ep} does not divide the {total} experts of {param.name}")
            if int(expert[1]) * ep // total != ep_rank:
                continue
            mesh = own
        elif _is_stack(param) and ep > 1:
            mesh = experts
        alike = mesh.names, param.shape, _tp_dim(param), *sorted(param.placements.items())
        layout = layouts.get(alike)
        if layout is None:
            layout = layouts[alike] = _layout(param, mesh)
        placed.append(PlacedParam(param=param, mesh=mesh, layout=layout))
    return placed


def parse_placements(text: str) -> dict[str, str]:
    """Read ``"dp_shard:S(1),tp:R"``.

    Args:
        text: Placements by axis: ``R``, ``S(dim)`` or ``S(dim/split_factor)``.

    Returns:
        Placement of each axis, as text.

    Raises:
        InputError: If it is not of this form.

    Example:
        >>> parse_placements("dp_shard:S(1),tp:R")
        {'dp_shard': 'S(1)', 'tp': 'R'}
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        axis, colon, placement = (piece.strip() for piece in part.partition(":"))
        if not colon:
            raise InputError(f"expected axis:placement, got {part!r} in {text!r}")
        _read_placement(placement)
        found[axis] = placement
    return found


def _read_placement(text: str) -> _Choice:
    match = _PLACEMENT.fullmatch(text)
    if match is None:
        raise InputError(f"placement must be R, S(dim) or S(dim/split_factor), got {text!r}")
    if match["replicate"]:
        return _Choice(None)
    return _Choice(int(match["dim"]), int(match["split"]) if match["split"] else None)


def _layout(param: ModelParam, mesh: NamedMesh) -> ParamLayout:
    choices = [_recipe(param, name, mesh) for name in mesh.names]
    for axis, placement in param.placements.items():
        choices[_axis_index(axis, mesh, param.name)] = _checked(placement, param)
    axes = tuple(_strided(i, choices, mesh) for i in range(len(choices)))
    return ParamLayout(shape=param.shape, mesh=mesh.layout, axes=axes)


def _recipe(param: ModelParam, axis: str, mesh: NamedMesh) -> _Choice:
    if not param.shape or axis == "dp_replicate":
        return _Choice(None)
    if axis == "tp":
        return _Choice(_tp_dim(param))
    if axis == "dp_shard_mod_ep" and "ep" in mesh.names:
        num_ranks = math.prod(
            size
            for name, size in zip(mesh.names, mesh.layout.shape, strict=True)
            if name != "dp_replicate"
        )
        return _Choice(0 if num_ranks <= param.shape[0] else 1)
    return _Choice(0)


def _tp_dim(param: ModelParam) -> int | None:
    # The leaf is the name of the module, or of the parameter where a module stacks experts.
    parts = param.name.split(".")
    is_bias = parts[-1] == "bias"
    leaf = parts[-2] if parts[-1] in ("weight", "bias") and len(parts) > 1 else parts[-1]
    num_batch_dims = max(0, len(param.shape) - 2)
    if leaf in _COLUMN_WISE and param.shape:
        return 0 if is_bias else num_batch_dims + int(param.is_transposed)
    if leaf in _ROW_WISE and not is_bias and len(param.shape) > 1:
        return num_batch_dims + int(not param.is_transposed)
    return None


def _strided(axis: int, choices: Sequence[_Choice], mesh: NamedMesh) -> AxisPlacement:
    choice = choices[axis]
    if choice.dim is None or axis != mesh.fsdp_axis or choice.split is not None:
        return AxisPlacement(dim=choice.dim, split_factor=choice.split or 1)
    # fully_shard cuts what the axes inside it have left on a rank.
    inner = zip(choices[axis + 1 :], mesh.layout.shape[axis + 1 :], strict=True)
    factor = math.prod(size for other, size in inner if other.dim == choice.dim)
    return AxisPlacement(dim=choice.dim, split_factor=factor)


def _axis_index(axis: str, mesh: NamedMesh, name: str) -> int:
    if axis in FSDP_AXES and mesh.fsdp_axis is not None:
        return mesh.fsdp_axis
    if axis not in mesh.names:
        raise InputError(unknown(f"mesh axis for {name}:", axis, mesh.names))
    return mesh.names.index(axis)


def _checked(placement: str, param: ModelParam) -> _Choice:
    choice = _read_placement(placement)
    ndim = len(param.shape)
    if choice.dim is not None and not -ndim <= choice.dim < ndim:
        raise InputError(f"{param.name}: {placement} is out of range for shape {param.shape}")
    return choice if choice.dim is None else _Choice(choice.dim % ndim, choice.split)


def _is_stack(param: ModelParam) -> bool:
    return len(param.shape) == 3 and "experts" in param.name.split(".")


def _expert_counts(params: Sequence[ModelParam]) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for param in params:
        if expert := _EXPERT.search(param.name):
            at = param.name[: expert.start()]
            counts[at] = max(counts.get(at, 0), int(expert[1]) + 1)
    return counts
