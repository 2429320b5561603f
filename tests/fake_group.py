# SPDX-License-Identifier: Apache-2.0
"""Be one rank of a world of any size, in this process and without data.

For metadata only: meshes, placements, groups. Collectives return at once with wrong values.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_process_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Make torch's fake process group the default one inside the ``with`` block.

    Args:
        world_size: Number of ranks that the group pretends to have.
        rank: Which of them this process is.

    Yields:
        Nothing. All process groups are destroyed at the end, those of meshes included.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
