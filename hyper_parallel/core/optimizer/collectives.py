# SPDX-License-Identifier: Apache-2.0
"""Process groups and the exchange of packets: the only caller of ``torch.distributed``."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.optimizer.layout import Ranks


class ProcessGroups:
    """The process group of each set of ranks, made once.

    A group that exists is used again: the world's, or that of a mesh axis. Others are made with
    ``use_local_synchronization=True``, so that only their members take part and pipeline stages,
    which need different groups, cannot wait for each other.
    """

    def __init__(self, meshes: Iterable[DeviceMesh]) -> None:
        self._groups: dict[Ranks, dist.ProcessGroup] = {}
        if not is_distributed():
            return
        world = dist.group.WORLD
        assert world is not None
        self._groups[tuple(range(dist.get_world_size()))] = world
        for mesh in meshes:
            for axis in range(mesh.ndim):
                group = mesh.get_group(axis)
                self._groups.setdefault(tuple(dist.get_process_group_ranks(group)), group)

    def group(self, ranks: Ranks) -> dist.ProcessGroup:
        """The group of a set of ranks.

        Called on every rank of the set, in the same order for all sets they share.

        Args:
            ranks: Ascending global ranks.

        Returns:
            The group, made now if it does not exist yet.
        """
        if ranks not in self._groups:
            made = dist.new_group(list(ranks), use_local_synchronization=True)
            assert isinstance(made, dist.ProcessGroup)
            self._groups[ranks] = made
        return self._groups[ranks]


@dataclass(frozen=True, slots=True)
class Transfer:
    """An all-to-all on its way, with the buffers that it keeps alive.

    Attributes:
        work: Handle of the collective.
        sent: Buffer that is being sent.
        received: Buffer that is being filled; valid after :meth:`wait`.
    """

    work: dist.Work
    sent: Tensor
    received: Tensor

    def wait(self) -> Tensor:
        """Wait until ``received`` is complete.

        Returns:
            The received buffer.
        """
        self.work.wait()
        return self.received


def start_all_to_all(
    packet: Tensor,
    send_sizes: Sequence[int],
    receive_sizes: Sequence[int],
    group: dist.ProcessGroup,
) -> Transfer:
    """Start an all-to-all with uneven sizes.

    Args:
        packet: 1-D, contiguous; the parcels in the order of the group's ranks.
        send_sizes: Elements for each rank.
        receive_sizes: Elements from each rank.
        group: The process group.

    Returns:
        The transfer; its buffers stay alive until it is dropped.
    """
    received = packet.new_empty(sum(receive_sizes))
    work = dist.all_to_all_single(
        received, packet, list(receive_sizes), list(send_sizes), group=group, async_op=True
    )
    assert work is not None
    return Transfer(work, packet, received)


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's value, in group order. Small and rare: agreement at the start, and errors.

    Args:
        value: Anything that can be pickled.
        group: The process group.

    Returns:
        One value per rank of the group.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@dataclass(frozen=True)
class RankGroup:
    """A process group with its ranks; groups of the same ranks are equal.

    Attributes:
        ranks: Global ranks, this one among them.
        group: Their process group.
    """

    ranks: Ranks
    group: dist.ProcessGroup = field(compare=False, repr=False)


def axis_group(mesh: DeviceMesh, axis: int) -> RankGroup:
    """The group of an axis of a mesh, as this rank sees it.

    Args:
        mesh: A mesh with this rank.
        axis: Which axis.

    Returns:
        The group.
    """
    return rank_group(mesh.get_group(axis))


def rank_group(group: dist.ProcessGroup | None) -> RankGroup:
    """A process group, the world's if None, with its ranks."""
    group = group or dist.group.WORLD
    assert group is not None
    return RankGroup(tuple(dist.get_process_group_ranks(group)), group)


def all_reduce_(values: Tensor, over: RankGroup, *, largest: bool = False) -> Tensor:
    """Sum numbers over the ranks of a group, or take the largest.

    Args:
        values: Contiguous; overwritten with the result.
        over: The group.
        largest: Whether the largest is wanted instead of the sum.

    Returns:
        ``values``.
    """
    dist.all_reduce(values, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, over.group)
    return values


def is_distributed() -> bool:
    """Whether this process belongs to a default process group."""
    return dist.is_available() and dist.is_initialized()


def current_rank() -> int:
    """Global rank of this process, 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Number of processes, 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1
