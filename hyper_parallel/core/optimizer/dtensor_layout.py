# SPDX-License-Identifier: Apache-2.0
"""DTensor to numbers. With ``param_grouping``, the only reader of DTensor geometry."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from hyper_parallel.core.optimizer.layout import AxisPlacement, MeshLayout, ParamLayout
from hyper_parallel.core.optimizer.param_grouping import extract_shard_info
from hyper_parallel.core.optimizer.torch_private import StridedShard


class LayoutReader:
    """Reads parameters' layouts, and keeps one record per mesh.

    Args:
        rank: Global rank of this process.
        replicate_mesh: Mesh over which plain tensors are replicated (DDP). None if a plain tensor
            belongs to this rank alone.
    """

    def __init__(self, rank: int, replicate_mesh: DeviceMesh | None = None) -> None:
        self._rank = rank
        self._replicate_mesh = replicate_mesh
        self._by_identity: dict[int, tuple[DeviceMesh, MeshLayout]] = {}
        self._by_value: dict[MeshLayout, MeshLayout] = {}
        self._layouts: dict[tuple[object, ...], ParamLayout] = {}

    def read(self, tensor: Tensor, name: str) -> ParamLayout:
        """Layout of a parameter.

        Args:
            tensor: DTensor or plain tensor with at least two dims.
            name: What to call it in an error.

        Returns:
            Its layout; parameters that lie alike share one record, those of equal meshes one of
            the mesh.

        Raises:
            ValueError: If it has fewer than two dims, a placement that is not a shard or a
                replica, a mesh without this rank, or one whose ranks do not ascend along each
                axis.
        """
        alike: tuple[object, ...] = (tensor.shape,)
        if isinstance(tensor, DTensor):
            mesh = self.mesh_layout(tensor.device_mesh, name)
            alike = tensor.shape, tensor.placements, mesh
        if alike not in self._layouts:
            self._layouts[alike] = self._read(tensor, name)
        return self._layouts[alike]

    def _read(self, tensor: Tensor, name: str) -> ParamLayout:
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            if self._replicate_mesh is None:
                alone = self._shared(MeshLayout(shape=(1,), ranks=(self._rank,)))
                return ParamLayout(shape=shape, mesh=alone, axes=(AxisPlacement(),))
            mesh = self.mesh_layout(self._replicate_mesh, name)
            return ParamLayout(shape=shape, mesh=mesh, axes=(AxisPlacement(),) * len(mesh.shape))
        mesh = self.mesh_layout(tensor.device_mesh, name)
        try:
            extract_shard_info(tensor)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        axes = tuple(_axis_placement(p, tensor, name) for p in tensor.placements)
        return ParamLayout(shape=shape, mesh=mesh, axes=axes)

    def ranks_of(self, tensor: Tensor, name: str) -> tuple[int, ...]:
        """Global ranks that hold a parameter together, whatever its number of dims.

        Args:
            tensor: DTensor or plain tensor.
            name: What to call it in an error.

        Returns:
            The ranks, ascending.

        Raises:
            ValueError: As :meth:`read`, but for the number of dims.
        """
        if isinstance(tensor, DTensor):
            for placement in tensor.placements:
                _axis_placement(placement, tensor, name)
            return self.mesh_layout(tensor.device_mesh, name).members
        if self._replicate_mesh is not None:
            return self.mesh_layout(self._replicate_mesh, name).members
        return (self._rank,)

    def mesh_layout(self, mesh: DeviceMesh, name: str) -> MeshLayout:
        """A mesh as numbers, checked.

        Args:
            mesh: The mesh.
            name: Name of the parameter that lives on it, for errors.

        Returns:
            The record; the same object for equal meshes.

        Raises:
            ValueError: If this rank is not in the mesh, or ranks do not ascend along an axis.
        """
        known = self._by_identity.get(id(mesh))
        if known is not None:
            return known[1]
        ranks: list[int] = mesh.mesh.flatten().tolist()
        if self._rank not in ranks:
            raise ValueError(
                f"{name}: its mesh of shape {tuple(mesh.shape)} over ranks {ranks} does not "
                f"contain this rank ({self._rank}). Give each rank's optimizer only the parameters "
                "that live on the rank"
            )
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1 and bool((mesh.mesh.diff(dim=axis) <= 0).any()):
                raise ValueError(
                    f"{name}: the ranks {mesh.mesh.tolist()} of its mesh do not ascend along axis "
                    f"{axis}, "
                    "where torch's own placement of shards contradicts itself. Build the mesh "
                    "with ascending ranks"
                )
        layout = self._shared(MeshLayout(shape=tuple(mesh.shape), ranks=tuple(ranks)))
        self._by_identity[id(mesh)] = (mesh, layout)  # holds the mesh, so that its id stays taken
        return layout

    def _shared(self, layout: MeshLayout) -> MeshLayout:
        return self._by_value.setdefault(layout, layout)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: plain, detached, sharing storage."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def local_gradient(param: Tensor) -> Tensor | None:
    """This rank's part of a parameter's gradient, cut like the parameter.

    Tensor parallelism may leave a whole gradient on a sharded parameter (torch's row-wise
    embedding does). Cutting it needs no message; anything else would, and is refused.

    Args:
        param: The parameter.

    Returns:
        Plain tensor of the parameter's local shape; None without a gradient.

    Raises:
        ValueError: If the gradient is not laid out like the parameter, and not replicated either
            where it differs.
    """
    gradient = param.grad
    if gradient is None or same_layout(param, gradient):
        return None if gradient is None else local_tensor(gradient)
    if (
        isinstance(param, DTensor)
        and isinstance(gradient, DTensor)
        and param.shape == gradient.shape
        and param.device_mesh == gradient.device_mesh
        and all(
            have == due or (isinstance(have, Replicate) and isinstance(due, Shard))
            for have, due in zip(gradient.placements, param.placements, strict=True)
        )
    ):
        return local_tensor(gradient.redistribute(placements=param.placements))
    raise ValueError(
        f"its gradient is laid out as {placements_text(gradient)} with shape "
        f"{tuple(gradient.shape)}, the parameter as {placements_text(param)} with shape "
        f"{tuple(param.shape)}; reduce and redistribute the gradient like the parameter"
    )


def zeros_like_param(param: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros laid out like a parameter: a DTensor for a DTensor, on the local tensor's device."""
    return torch.zeros_like(param, dtype=dtype, requires_grad=False)


def in_layout(
    tensor: Tensor, layout: ParamLayout, mesh: DeviceMesh | None, dtype: torch.dtype
) -> DTensor:
    """A state of a parameter, brought to a layout finer than the parameter's.

    Args:
        tensor: Plain tensor (replicated) or DTensor, global shape as the layout's.
        layout: The layout to reach.
        mesh: The mesh, for a plain tensor.
        dtype: The dtype to reach.

    Returns:
        A DTensor with the same values. Cutting what is replicated needs no communication; anything
        else is a redistribution, in which all ranks of the mesh take part.

    Raises:
        ValueError: If it lies on another mesh.
    """
    placements = tuple(_placement(axis) for axis in layout.axes)
    assert mesh is not None
    if isinstance(tensor, DTensor):
        _check_mesh(tensor, mesh)
    else:
        tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if tensor.placements != placements:
        tensor = tensor.redistribute(placements=placements)
    cast = tensor.to(dtype)
    assert isinstance(cast, DTensor)
    return cast


def like_param(tensor: Tensor, param: Tensor) -> Tensor:
    """A state of a parameter, brought to the layout of the parameter.

    Args:
        tensor: Whole plain tensor, or DTensor of the parameter's global shape.
        param: The parameter.

    Returns:
        The same values, a DTensor for a DTensor. What is there already is returned as it is, and
        cutting a whole tensor needs no communication; in anything else all ranks of the mesh take
        part.

    Raises:
        ValueError: If it lies on another mesh.
    """
    if same_layout(tensor, param):
        return tensor
    if not isinstance(param, DTensor):
        assert isinstance(tensor, DTensor)
        return tensor.full_tensor()
    if isinstance(tensor, DTensor):
        _check_mesh(tensor, param.device_mesh)
        return tensor.redistribute(placements=param.placements)
    return distribute_tensor(tensor, param.device_mesh, param.placements, src_data_rank=None)


def _check_mesh(tensor: DTensor, mesh: DeviceMesh) -> None:
    if tensor.device_mesh != mesh:
        raise ValueError(
            f"lies on mesh {tensor.device_mesh.mesh.tolist()}, its parameter on "
            f"{mesh.mesh.tolist()}; save and load it with torch.distributed.checkpoint, or save "
            "whole tensors (StateDictOptions(full_state_dict=True))"
        )


def _placement(axis: AxisPlacement) -> Placement:
    if axis.dim is None:
        return Replicate()
    if axis.split_factor == 1:
        return Shard(axis.dim)
    return StridedShard(axis.dim, split_factor=axis.split_factor)


def placements_text(tensor: Tensor) -> str:
    """Layout of a tensor as a person reads it."""
    if not isinstance(tensor, DTensor):
        return "plain tensor"
    return f"{tuple(tensor.placements)} on mesh {tuple(tensor.device_mesh.shape)}"


def same_layout(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same global shape, mesh and placements."""
    if isinstance(left, DTensor) != isinstance(right, DTensor) or left.shape != right.shape:
        return False
    if isinstance(left, DTensor) and isinstance(right, DTensor):
        return left.placements == right.placements and left.device_mesh == right.device_mesh
    return True


def meshes_of(tensors: Sequence[Tensor]) -> list[DeviceMesh]:
    """The distinct meshes of some tensors, in order of first appearance."""
    return list(dict.fromkeys(t.device_mesh for t in tensors if isinstance(t, DTensor)))


def _axis_placement(placement: Placement, tensor: DTensor, name: str) -> AxisPlacement:
    if isinstance(placement, Replicate):
        return AxisPlacement()
    if isinstance(placement, Shard):
        return AxisPlacement(dim=placement.dim % tensor.ndim)
    if isinstance(placement, StridedShard):
        strided: Any = placement
        return AxisPlacement(dim=strided.dim % tensor.ndim, split_factor=strided.split_factor)
    cure = (
        "reduce it first: redistribute to Replicate() or Shard(dim)"
        if isinstance(placement, Partial)
        else "use Shard, Replicate or FSDP's placements"
    )
    raise ValueError(f"{name}: expected Shard or Replicate, got placement {placement}; {cure}")
