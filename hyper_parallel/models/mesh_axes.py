# SPDX-License-Identifier: Apache-2.0
"""Sizes of the usual axes of parallelism, and the ranks of the meshes that they make. No torch.

[Note: two meshes]
World size is ``pp * dp_replicate * dp_shard * cp * tp``, ranks in that order, row-major. Context
parallelism splits sequences, so for parameters its ranks are data-parallel: FSDP shards over
``dp_shard`` and ``cp`` together. Expert parallelism takes no ranks of its own: ``ep`` of the ranks
that ``dp_shard``, ``cp`` and ``tp`` span share the experts of a layer out, and FSDP shards each
stack again over what remains, ``dp_shard_mod_ep``. Dense parameters and experts therefore live on
two meshes over the same ranks. This is how torchtitan arranges them
(https://github.com/pytorch/torchtitan, ``ParallelDims``).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from hyper_parallel.core.optimizer.layout import MeshLayout
from hyper_parallel.models.errors import InputError, unknown

AXES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
FSDP_AXES: Final = ("dp_shard", "dp_shard_cp", "dp_shard_mod_ep")
"""What the axis that FSDP shards over is called: one of them on every mesh that has it."""


@dataclass(frozen=True, kw_only=True)
class NamedMesh:
    """A mesh whose axes have names.

    Attributes:
        names: Name of each axis.
        layout: Sizes and ranks.
    """

    names: tuple[str, ...]
    layout: MeshLayout

    @property
    def fsdp_axis(self) -> int | None:
        """The axis that FSDP shards over."""
        return next((i for i, name in enumerate(self.names) if name in FSDP_AXES), None)


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Sizes of the axes; one where an axis is not used.

    Attributes:
        given: The sizes by name, as they were given.
    """

    given: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        spanned = self.size("dp_shard") * self.size("cp") * self.size("tp")
        if spanned % self.size("ep"):
            raise InputError(
                f"ep={self.size('ep')} must divide dp_shard * cp * tp = {spanned}: experts are "
                "shared out over those ranks"
            )

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.given)

    def size(self, axis: str) -> int:
        """Size of an axis, one if it is not used."""
        return self._sizes.get(axis, 1)

    def resized(self, axis: str, size: int) -> "Parallelism":
        """The same with another size of one axis.

        Args:
            axis: Its name.
            size: Its new size.

        Returns:
            The sizes.

        Raises:
            InputError: If ``ep`` does not divide the ranks that it would take them from.
        """
        return Parallelism(given=tuple((self._sizes | {axis: size}).items()))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.size("pp") * self.ranks_per_stage

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of one pipeline stage."""
        return math.prod(self.size(axis) for axis in AXES[1:5])

    def stage_of(self, rank: int) -> int:
        """Pipeline stage of a global rank."""
        return rank // self.ranks_per_stage

    def dense_mesh(self, stage: int) -> NamedMesh:
        """Mesh of everything but experts under expert parallelism.

        Args:
            stage: Pipeline stage.

        Returns:
            Those of ``dp_replicate``, ``dp_shard`` (``dp_shard_cp``) and ``tp`` that are used.
        """
        axes = [("dp_replicate", self.size("dp_replicate"))]
        if "cp" in self._sizes:
            axes.append(("dp_shard_cp", self.size("dp_shard") * self.size("cp")))
        else:
            axes.append(("dp_shard", self.size("dp_shard")))
        axes.append(("tp", self.size("tp")))
        used = [(name, size) for name, size in axes if size > 1 or name in self._sizes]
        return self._mesh(used or axes[1:2], stage)

    def expert_mesh(self, stage: int) -> NamedMesh:
        """Mesh of stacks of experts under expert parallelism.

        Args:
            stage: Pipeline stage.

        Returns:
            ``dp_replicate`` if it is used, ``dp_shard_mod_ep`` and ``ep``.
        """
        ep = self.size("ep")
        axes = [
            ("dp_replicate", self.size("dp_replicate")),
            ("dp_shard_mod_ep", self.size("dp_shard") * self.size("cp") * self.size("tp") // ep),
            ("ep", ep),
        ]
        return self._mesh(axes if "dp_replicate" in self._sizes else axes[1:], stage)

    def expert_submesh(self, stage: int, ep_rank: int) -> NamedMesh:
        """Mesh of experts that are parameters of their own: ranks that have the same ones.

        Args:
            stage: Pipeline stage.
            ep_rank: Position on the ``ep`` axis.

        Returns:
            The expert mesh without its ``ep`` axis.
        """
        whole = self.expert_mesh(stage)
        ep = self.size("ep")
        layout = MeshLayout(shape=whole.layout.shape[:-1], ranks=whole.layout.ranks[ep_rank::ep])
        return NamedMesh(names=whole.names[:-1], layout=layout)

    def _mesh(self, axes: list[tuple[str, int]], stage: int) -> NamedMesh:
        first = stage * self.ranks_per_stage
        shape = tuple(size for _, size in axes)
        ranks = tuple(range(first, first + math.prod(shape)))
        return NamedMesh(
            names=tuple(name for name, _ in axes), layout=MeshLayout(shape=shape, ranks=ranks)
        )


def parse_mesh(text: str, world_size: int | None = None) -> Parallelism:
    """Read ``"dp_replicate=4,dp_shard=64,tp=8"``.

    Args:
        text: Axes and sizes; each axis at most once.
        world_size: What they must multiply to, if known.

    Returns:
        The sizes.

    Raises:
        InputError: If an axis is unknown, a size is no positive integer, or the product is wrong.

    Example:
        >>> parse_mesh("dp_shard=64,tp=8").world_size
        512
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise InputError(f"--mesh: expected axis=size, got {part!r} in {text!r}")
        if name not in AXES:
            raise InputError(unknown("mesh axis", name, AXES))
        if not size.isdecimal() or int(size) < 1:
            raise InputError(f"--mesh: {name} must be a positive integer, got {size!r}")
        if name in sizes:
            raise InputError(f"--mesh: {name} is given twice in {text!r}")
        sizes[name] = int(size)
    parallelism = Parallelism(given=tuple(sizes.items()))
    if world_size is not None and parallelism.world_size != world_size:
        used = [f"{name}={sizes[name]}" for name in AXES[:5] if name in sizes]
        raise InputError(
            f"--mesh: {' * '.join(used) or '1'} is {parallelism.world_size} ranks, but "
            f"--world-size is {world_size} (ep takes no ranks of its own)"
        )
    return parallelism
