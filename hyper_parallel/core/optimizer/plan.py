# SPDX-License-Identifier: Apache-2.0
"""The plan of a step: who orthogonalizes what, and in which bucket it travels. Frozen, no torch."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from typing_extensions import override

from hyper_parallel.core.optimizer.bucket import Bucket, PlannedParam
from hyper_parallel.core.optimizer.layout import MeshLayout
from hyper_parallel.core.optimizer.report import plan_table


@dataclass(frozen=True)
class Plan:
    """Everything that one rank's optimizer step will do, as data.

    Ranks that share a bucket hold the same description of it. A rank sees only the buckets that it
    takes part in, so pipeline stages have different plans.

    Attributes:
        rank: The rank whose plan this is.
        params: The parameters, in the order of the parameter groups.
        buckets: The buckets, in the order in which they run.
        bucket_bytes: The bound that the buckets were cut by.
    """

    rank: int
    params: tuple[PlannedParam, ...]
    buckets: tuple[Bucket, ...]
    bucket_bytes: int

    @cached_property
    def domains(self) -> tuple[tuple[int, ...], ...]:
        """Sets of ranks that exchange packets, in the order in which they do."""
        return tuple(dict.fromkeys(b.ranks for b in self.buckets if b.num_collectives))

    @cached_property
    def rank_sets(self) -> tuple[tuple[int, ...], ...]:
        """Sets of more than one rank that hold a parameter together, in the order of domains.

        They include those that exchange nothing: what a rank believes to be nothing may be
        something to another.
        """
        sets = {mesh.members for mesh in self._meshes}
        return tuple(sorted((s for s in sets if len(s) > 1), key=lambda s: (-len(s), s)))

    @property
    def num_collectives(self) -> int:
        """Collectives that this rank takes part in during one step."""
        return sum(bucket.num_collectives for bucket in self.buckets)

    def describe(self, ranks: tuple[int, ...]) -> Iterator[str]:
        """The part of the plan that a set of ranks shares, one fact a line.

        Two ranks agree if and only if their lines are equal; the first that differs names the
        disagreement.

        Args:
            ranks: The set of ranks.

        Yields:
            The parameters, then the buckets.
        """
        shared = [bucket for bucket in self.buckets if bucket.ranks == ranks]
        meshes = {mesh for mesh in self._meshes if mesh.members == ranks}
        used = [i for i, param in enumerate(self.params) if param.layout.mesh in meshes]
        position = {index: i for i, index in enumerate(used)}
        told: dict[tuple[object, ...], str] = {}  # of parameters that are alike
        for index in used:
            param = self.params[index]
            alike = id(param.layout), id(param.source), id(param.work), param.view
            if alike not in told:
                told[alike] = (
                    f"shape {param.layout.shape}, "
                    f"placements {param.layout.placements_text()}, "
                    f"momentum {param.source.placements_text()}, "
                    f"mesh {param.layout.mesh.text}, "
                    f"matrix_view {param.view}, {param.work}"
                )
            yield f"parameter {param.name}: {told[alike]}"
        for number, bucket in enumerate(shared):
            owners = [(position[m.param], m.matrix.box, m.owner) for m in bucket.matrices]
            yield (
                f"bucket {number}: {bucket.route}, {bucket.wire_dtype}, gathers {bucket.gathers}, "
                f"scatters {bucket.scatters}, "
                f"{len(owners)} matrices (parameter, box, owner): {owners}"
            )

    def digest(self, ranks: tuple[int, ...] | None = None) -> str:
        """Hash of the plan, or of the part that a set of ranks shares.

        Args:
            ranks: One of :attr:`domains`. All of the plan if None.

        Returns:
            Hex digest, stable across processes and Python versions.
        """
        told = self._describe_all() if ranks is None else self.describe(ranks)
        return hashlib.sha256("\n".join(told).encode()).hexdigest()

    def _describe_all(self) -> Iterator[str]:
        yield f"rank {self.rank}, bucket_bytes {self.bucket_bytes}"
        yield f"order of parameters {[param.name for param in self.params]}"
        for ranks in dict.fromkeys(mesh.members for mesh in self._meshes):
            yield from self.describe(ranks)

    @cached_property
    def _meshes(self) -> tuple[MeshLayout, ...]:
        """The distinct meshes, in order of first appearance."""
        return tuple(dict.fromkeys(param.layout.mesh for param in self.params))

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values that JSON can hold."""
        return asdict(self)

    @override
    def __str__(self) -> str:
        """A table: layouts, matrices, owner loads, collectives, bytes and memory."""
        return plan_table(self.rank, self.params, self.buckets)
