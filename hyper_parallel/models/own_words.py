# SPDX-License-Identifier: Apache-2.0
"""Placed parameters in the words of the specification, for its grouping. No torch."""

from dataclasses import dataclass

from hyper_parallel.core.optimizer.layout import AxisPlacement
from hyper_parallel.models.recipes import PlacedParam


@dataclass(frozen=True, slots=True)
class OwnMesh:
    """A mesh as one rank sees it.

    Attributes:
        mesh_shape: Size of each axis.
        rank_list: Global ranks, row-major.
        rank: Global rank.
        names: Name of each axis.
    """

    mesh_shape: tuple[int, ...]
    rank_list: tuple[int, ...]
    rank: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OwnPlacement:
    """What one axis does, answered as a torch ``Placement`` answers.

    Attributes:
        axis: The record that plans use.
    """

    axis: AxisPlacement

    def is_shard(self) -> bool:
        """Whether it cuts a dim."""
        return self.axis.dim is not None

    def is_replicate(self) -> bool:
        """Whether it cuts nothing."""
        return self.axis.dim is None

    @property
    def dim(self) -> int | None:
        """The dim that it cuts."""
        return self.axis.dim

    @property
    def split_factor(self) -> int | None:
        """Blocks of a strided shard; None for a plain one, which has none."""
        return self.axis.split_factor if self.axis.split_factor > 1 else None


@dataclass(frozen=True, slots=True)
class OwnParam:
    """A parameter as the grouping reads it.

    Attributes:
        name: Its name.
        shape: Global shape.
        placements: One per axis.
        device_mesh: Its mesh.
    """

    name: str
    shape: tuple[int, ...]
    placements: tuple[OwnPlacement, ...]
    device_mesh: OwnMesh


def in_own_words(placed: list[PlacedParam], rank: int) -> list[OwnParam]:
    """Describe parameters as ``group_parameters_by_sharding`` takes them.

    Args:
        placed: The parameters.
        rank: Global rank.

    Returns:
        One record for each.
    """
    meshes = {
        id(p.mesh): OwnMesh(p.mesh.layout.shape, p.mesh.layout.ranks, rank, p.mesh.names)
        for p in placed
    }
    return [
        OwnParam(
            p.param.name,
            p.param.shape,
            tuple(map(OwnPlacement, p.layout.axes)),
            meshes[id(p.mesh)],
        )
        for p in placed
    ]
