# SPDX-License-Identifier: Apache-2.0
"""Sort distributed parameters by the communication that their orthogonalization needs.

A parameter is a batch of matrices, its last two dims, and Newton-Schulz needs whole matrices. The
placements tell whether a rank holds whole ones (``no_comm``) or must exchange first (``comm``).
All of this reads metadata alone: no collective runs and no tensor data is touched.

[Note: replicate group and shard group]
Let the coordinate of a rank vary along the mesh axes that replicate a parameter: one meets the
ranks that hold the *same* shard, the replicate group. They may share the work, and each of them
must receive the result. Along all other axes one meets the ranks that together hold one whole
copy, the shard group. A matrix is rebuilt over these. The two groups share only the rank itself.
"""

import itertools
import math
import operator
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

# Duck-typed on purpose, and so without torch. ``DTensorLike``: a DTensor, or any object with its
# (global) ``shape``, ``placements`` and ``device_mesh``. ``MeshLike``: a DeviceMesh, or any object
# with ``mesh_shape``, ``rank_list`` (row-major) and ``rank``. ``PlacementLike``: a Placement, or an
# object with ``is_shard()`` and ``dim``, ``is_replicate()``, or ``is_partial()`` and ``reduce_op``.
DTensorLike: TypeAlias = Any
MeshLike: TypeAlias = Any
PlacementLike: TypeAlias = Any
_ParamT = TypeVar("_ParamT")


@dataclass
class ShardInfo:
    """How a parameter lies on its mesh.

    Attributes:
        tensor_ndim: Number of tensor dims, at least 2.
        placements: One placement per mesh axis, as the parameter gives them.
        device_mesh: The parameter's mesh.
        shard_dims: Tensor dims that some mesh axis shards, in ``range(tensor_ndim)``.
        replicate_mesh_dims: Mesh axes that are replicated, ascending.
    """

    tensor_ndim: int
    placements: Sequence[PlacementLike]
    device_mesh: MeshLike
    shard_dims: set[int]
    replicate_mesh_dims: list[int]


@dataclass
class CommParamGroup:
    """Parameters that are cut in the same way over the same ranks.

    Attributes:
        params: The parameters, in the order given.
        shard_info: Layout of the first parameter; those of the others are equivalent.
        replicate_group: Global ranks that hold the same shards as this rank, ascending.
    """

    params: list[Any]
    shard_info: ShardInfo
    replicate_group: list[int]


def _validate_param_ndim(dtensor: DTensorLike) -> None:
    if len(dtensor.shape) < 2:
        raise ValueError(
            f"Muon needs a parameter with at least 2 dimensions, got shape {tuple(dtensor.shape)}. "
            "Give it to an element-wise optimizer such as AdamW. If it is a flattened piece of a "
            "matrix (FSDP1, ZeRO), shard the model with fully_shard, which keeps shapes."
        )


def extract_shard_info(dtensor: DTensorLike) -> ShardInfo:
    """Read how a parameter is sharded and replicated.

    Args:
        dtensor: A ``DTensor`` or an object like it. Its *global* shape counts.

    Returns:
        A new record. A partial mesh axis appears neither as sharded nor as replicated.

    Raises:
        ValueError: If the parameter has fewer than 2 dims, or lacks a dim that is sharded.
        TypeError: If the parameter is a plain tensor, or a placement is of an unknown kind.

    Example:
        >>> from types import SimpleNamespace
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> mesh = SimpleNamespace(mesh_shape=(2, 4), rank_list=range(8), rank=2)
        >>> layout = [Replicate(), Shard(-1)]
        >>> weight = SimpleNamespace(shape=(8, 16), placements=layout, device_mesh=mesh)
        >>> info = extract_shard_info(weight)
        >>> info.shard_dims, info.replicate_mesh_dims
        ({1}, [0])
    """
    _validate_param_ndim(dtensor)
    shape = tuple(dtensor.shape)
    if not (hasattr(dtensor, "placements") and hasattr(dtensor, "device_mesh")):
        raise TypeError(
            f"{type(dtensor).__name__} of shape {shape} is not a DTensor: no placements and mesh. "
            "Make it one with fully_shard, parallelize_module or distribute_tensor."
        )
    shard_dims: set[int] = set()
    replicated: list[int] = []
    for axis, placement in enumerate(dtensor.placements):
        kind, *details = _placement_key(placement, len(shape))
        if kind == "Replicate":
            replicated.append(axis)
        elif kind in {"Shard", "StridedShard"}:
            if details[0] not in range(len(shape)):
                raise ValueError(f"{placement!r} is out of range for parameter shape {shape}")
            shard_dims.add(details[0])
    return ShardInfo(len(shape), dtensor.placements, dtensor.device_mesh, shard_dims, replicated)


def calculate_replicate_group(
    dtensor: DTensorLike, shard_info: ShardInfo | None = None
) -> list[int]:
    """List the ranks that hold the same shard as this rank.

    A matrix cannot be rebuilt over them: see [Note: replicate group and shard group].

    Args:
        dtensor: A ``DTensor`` or an object like it. The mesh must contain this rank.
        shard_info: ``extract_shard_info(dtensor)``, if it is at hand.

    Returns:
        Global ranks, ascending, this rank included; it alone if no mesh axis is replicated.

    Example:
        >>> from types import SimpleNamespace
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> mesh = SimpleNamespace(mesh_shape=(2, 4), rank_list=range(8), rank=2)
        >>> layout = [Replicate(), Shard(1)]
        >>> weight = SimpleNamespace(shape=(8, 16), placements=layout, device_mesh=mesh)
        >>> calculate_replicate_group(weight), calculate_shard_group(weight)
        ([2, 6], [0, 1, 2, 3])
    """
    info = extract_shard_info(dtensor) if shard_info is None else shard_info
    return _locate(info, {}).ranks_along(info.replicate_mesh_dims)


def calculate_shard_group(dtensor: DTensorLike, shard_info: ShardInfo | None = None) -> list[int]:
    """List the ranks that, with this rank, hold one whole copy of the parameter.

    A matrix is rebuilt over them: see [Note: replicate group and shard group]. Partial axes belong
    here, since the value is the reduction over all of their ranks.

    Args:
        dtensor: A ``DTensor`` or an object like it. The mesh must contain this rank.
        shard_info: ``extract_shard_info(dtensor)``, if it is at hand.

    Returns:
        Global ranks, ascending, this rank included; it alone if every mesh axis is replicated.
    """
    info = extract_shard_info(dtensor) if shard_info is None else shard_info
    replicated = set(info.replicate_mesh_dims)
    other_axes = [axis for axis in range(len(info.placements)) if axis not in replicated]
    return _locate(info, {}).ranks_along(other_axes)


def group_parameters_by_sharding(
    params: Iterable[_ParamT],
) -> tuple[list[_ParamT], list[CommParamGroup]]:
    """Sort parameters by whether, and with whom, their matrices must be exchanged.

    Parameters share a group if they have the same mesh (by shape and ranks, since equal meshes are
    often distinct objects), the same number of dims and equivalent placements.

    Args:
        params: DTensors or objects like them, each with at least 2 dims.

    Returns:
        The parameters whose matrices are whole on this rank, and the groups of all others. Both
        keep the order in which parameters, or the first of each group, appear.

    Raises:
        ValueError: If a parameter has fewer than 2 dims, placements do not fit their parameter or
            mesh, or a mesh lacks this rank. A note on the error tells the parameter's index.
        TypeError: If a parameter is a plain tensor, or a placement is of an unknown kind.

    Example:
        >>> from types import SimpleNamespace
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> mesh = SimpleNamespace(mesh_shape=(2, 4), rank_list=range(8), rank=2)
        >>> layout = [Shard(0), Replicate()]
        >>> experts = SimpleNamespace(shape=(4, 8, 16), placements=layout, device_mesh=mesh)
        >>> weight = SimpleNamespace(shape=(8, 16), placements=layout, device_mesh=mesh)
        >>> no_comm, (group,) = group_parameters_by_sharding([experts, weight])
        >>> no_comm == [experts], group.params == [weight], group.replicate_group
        (True, True, [0, 1, 2, 3])
    """
    no_comm_params: list[_ParamT] = []
    groups: dict[tuple[object, ...], CommParamGroup] = {}
    meshes: _KnownMeshes = {}
    for index, param in enumerate(params):
        try:
            info = extract_shard_info(param)
            geometry = _locate(info, meshes)
        except (TypeError, ValueError) as error:
            error.add_note(f"while grouping the parameter at index {index}")
            raise
        if _is_no_comm_param(info):
            no_comm_params.append(param)
            continue
        key = (geometry, info.tensor_ndim, _placements_key(info.placements, info.tensor_ndim))
        if key not in groups:
            replicate_group = geometry.ranks_along(info.replicate_mesh_dims)
            groups[key] = CommParamGroup([], info, replicate_group)
        groups[key].params.append(param)
    return no_comm_params, list(groups.values())


def _is_no_comm_param(shard_info: ShardInfo) -> bool:
    ndim = shard_info.tensor_ndim
    return shard_info.shard_dims.isdisjoint({ndim - 2, ndim - 1})


def _placements_key(placements: Iterable[PlacementLike], tensor_ndim: int = 0) -> tuple[Any, ...]:
    # ``tensor_ndim`` is added to negative shard dims.
    return tuple(_placement_key(placement, tensor_ndim) for placement in placements)


def _placement_key(placement: PlacementLike, tensor_ndim: int = 0) -> tuple[Any, ...]:
    # torch's _StridedShard denies that it is a shard since 2.13, and says so before.
    split_factor = getattr(placement, "split_factor", None)
    is_strided = isinstance(split_factor, int)
    if is_strided or _answers(placement, "is_shard"):
        dim = operator.index(placement.dim)
        dim = dim + tensor_ndim if dim < 0 else dim
        # Layouts that differ only in the split factor put other rows on each rank.
        if is_strided:
            return ("StridedShard", dim, split_factor)
        return ("Shard", dim)
    if _answers(placement, "is_replicate"):
        return ("Replicate",)
    if _answers(placement, "is_partial"):
        return ("Partial", placement.reduce_op)
    raise TypeError(
        f"unknown placement {placement!r} of type {type(placement).__name__}: expected Shard, "
        "Replicate, Partial, or an object that answers is_shard(), is_replicate() or is_partial()"
    )


def _answers(placement: PlacementLike, question: str) -> bool:
    method = getattr(placement, question, None)
    return callable(method) and bool(method())


@dataclass(frozen=True)
class _MeshGeometry:
    shape: tuple[int, ...]
    ranks: tuple[int, ...]  # row-major, in any arrangement
    position: int  # of this rank in ``ranks``

    def ranks_along(self, axes: Sequence[int]) -> list[int]:
        offsets = []
        for axis, size in enumerate(self.shape):
            stride = math.prod(self.shape[axis + 1 :])
            here = self.position // stride % size
            offsets.append([at * stride for at in (range(size) if axis in axes else [here])])
        return sorted(self.ranks[sum(steps)] for steps in itertools.product(*offsets))


# By id, since a mesh need not be hashable. An entry holds the mesh, so its id stays taken.
_KnownMeshes: TypeAlias = dict[int, tuple[MeshLike, _MeshGeometry]]


def _locate(info: ShardInfo, meshes: _KnownMeshes) -> _MeshGeometry:
    mesh = info.device_mesh
    if id(mesh) not in meshes:
        meshes[id(mesh)] = (mesh, _read_mesh(mesh))
    _, geometry = meshes[id(mesh)]
    if len(info.placements) != len(geometry.shape):
        raise ValueError(f"{tuple(info.placements)} do not fit a mesh of shape {geometry.shape}")
    return geometry


def _read_mesh(mesh: MeshLike) -> _MeshGeometry:
    if hasattr(mesh, "mesh_shape"):
        shape, rank, ranks = tuple(mesh.mesh_shape), mesh.rank, tuple(mesh.rank_list)
    else:
        shape, rank, ranks = tuple(mesh.shape), mesh.get_rank(), tuple(mesh.mesh.flatten().tolist())
    if len(ranks) != math.prod(shape):
        raise ValueError(f"a mesh of shape {shape} cannot have {len(ranks)} ranks")
    if rank not in ranks:
        raise ValueError(
            f"rank {rank} is not in the mesh of shape {shape} with ranks "
            f"{reprlib.repr(list(ranks))}: hand each rank only parameters that it holds"
        )
    return _MeshGeometry(shape, ranks, ranks.index(rank))
