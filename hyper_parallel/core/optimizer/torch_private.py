# SPDX-License-Identifier: Apache-2.0
"""The one place for private torch imports, each with its reason and where it was checked."""

# What ``fully_shard`` makes of a parameter that tensor parallelism shards on the same dim. It has
# no public name, and in torch 2.13 it is not a ``Shard``: ``isinstance`` and ``is_shard()`` are
# both false, so that only the class itself tells it. Checked on torch 2.13.0.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["StridedShard"]
