# SPDX-License-Identifier: Apache-2.0
"""Make a plan: owners by longest processing time, buckets by bytes. No torch.

Every decision is computed from metadata that all ranks of a bucket share, so all of them reach the
same one without a message.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from hyper_parallel.core.optimizer.bucket import (
    Bucket,
    Orthogonalization,
    PlannedMatrix,
    PlannedParam,
)
from hyper_parallel.core.optimizer.cost_model import ITEMSIZE
from hyper_parallel.core.optimizer.layout import Coordinate, MeshLayout, ParamLayout, Ranks
from hyper_parallel.core.optimizer.matrix_view import MatrixBox, MatrixView, matrices_of
from hyper_parallel.core.optimizer.owners import Item, assign_owners
from hyper_parallel.core.optimizer.plan import Plan

_Alike = tuple[ParamLayout, ParamLayout, MatrixView, Orthogonalization]

REPLICA_ROUTES: Final = ("auto", "direct", "staged")
LARGEST_DIRECT_GROUP: Final = 64
"""Among more ranks, an all-to-all opens too many connections: replicas are reached in stages."""


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """A matrix of parameters that are alike, before it has an owner.

    Attributes:
        matrix: Which box it is.
        item: What it costs, and who may own it.
        local_nbytes: Its bytes on one rank.
        kind: Which buckets it may go to.
        gathers: Whether it has to travel to its owner.
    """

    matrix: MatrixBox
    item: Item
    local_nbytes: int
    kind: "_Kind"
    gathers: bool


@dataclass(frozen=True, slots=True, order=True)
class _Kind:
    """What the matrices of a bucket have in common.

    Attributes:
        stays: Whether nothing travels at all.
        wire_dtype: Dtype on the wire.
        route: See :attr:`Bucket.route`.
        groups: For the staged route, the axes that cut and those that replicate: all matrices of
            a bucket pass through the same groups of ranks.
    """

    stays: bool
    wire_dtype: str
    route: str
    groups: tuple[tuple[int, ...], ...] = ()


def build_plan(
    params: Sequence[PlannedParam], *, rank: int, bucket_bytes: int, replica_route: str = "auto"
) -> Plan:
    """Decide who orthogonalizes which matrix, and in which bucket it travels.

    Args:
        params: The parameters that this rank takes part in.
        rank: Global rank whose plan it is.
        bucket_bytes: Most bytes, on the wire, that one rank owns or receives of one bucket. What is
            larger than this travels all the same, and a bucket holds at least one matrix of each
            owner that has any left, so that no rank waits for another inside it.
        replica_route: How updates reach the other replicas: ``"direct"``, ``"staged"`` or
            ``"auto"``, which is staged where more than ``LARGEST_DIRECT_GROUP`` ranks take part.

    Returns:
        The plan. Its buckets are in an order in which all ranks meet: domains with more ranks
        first, then by rank, whatever the order of the parameters.

    Raises:
        ValueError: If ``bucket_bytes`` is not positive or a view does not fit its parameter.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    # Parameters of a model are many, but few of them differ in more than their name.
    alike: dict[_Alike, list[_Candidate]] = {}
    known = _Known({}, {})
    by_mesh: dict[MeshLayout, list[tuple[int, _Candidate]]] = {}
    for index, param in enumerate(params):
        key = (param.layout, param.source, param.view, param.work)
        if key not in alike:
            alike[key] = list(_candidates(param, replica_route, known))
        here = by_mesh.setdefault(param.layout.mesh, [])
        here.extend((index, candidate) for candidate in alike[key])
    domains: dict[Ranks, list[tuple[int, _Candidate]]] = defaultdict(list)
    for mesh, found in by_mesh.items():
        domains[mesh.members].extend(found)
    buckets: list[Bucket] = []
    for ranks in sorted(domains, key=lambda ranks: (-len(ranks), ranks)):
        found = sorted(domains[ranks], key=itemgetter(0))
        owners = assign_owners([candidate.item for _, candidate in found], ranks)
        owned = [
            PlannedMatrix(index, candidate.matrix, owner)
            for (index, candidate), owner in zip(found, owners, strict=True)
        ]
        candidates = [candidate for _, candidate in found]
        buckets.extend(_buckets_of_domain(ranks, candidates, owned, bucket_bytes))
    return Plan(rank, tuple(params), tuple(buckets), bucket_bytes)


@dataclass(slots=True)
class _Known:
    """What parameters of one plan share, so that it exists once.

    Attributes:
        holders: Ranks that hold the shard at a position, by mesh and replicate axes.
        ranks: Sets of ranks.
    """

    holders: dict[tuple[MeshLayout, tuple[int, ...]], dict[Coordinate, Ranks]]
    ranks: dict[Ranks, Ranks]


def _candidates(param: PlannedParam, replica_route: str, known: _Known) -> Iterable[_Candidate]:
    layout, source, work = param.layout, param.source, param.work
    itemsize = ITEMSIZE[work.wire_dtype]
    everyone = source.num_shards == 1
    ranks_at = known.holders.setdefault((source.mesh, source.replicate_axes), {})
    kinds = {
        alone: _kind(param, alone=alone, replica_route=replica_route) for alone in (False, True)
    }
    for matrix in matrices_of(layout.shape, param.view, param.name):
        if not matrix.numel:
            continue  # nothing to orthogonalize
        places = source.holders(matrix.box)
        for place in places:
            if place not in ranks_at and not everyone:
                replicas = source.replica_coordinates(place)
                ranks = tuple(sorted(map(source.mesh.rank_at, replicas)))
                ranks_at[place] = known.ranks.setdefault(ranks, ranks)
        nbytes = matrix.numel * itemsize
        yield _Candidate(
            matrix=matrix,
            item=Item(
                cost=work.flops(matrix),
                nbytes=nbytes,
                candidates=None if everyone or not places else ranks_at[places[0]],
            ),
            local_nbytes=nbytes // layout.num_shards,
            kind=kinds[len(places) == 1 and layout.num_replicas == 1],
            gathers=not places,
        )


def _kind(param: PlannedParam, *, alone: bool, replica_route: str) -> _Kind:
    layout, wire_dtype = param.layout, param.work.wire_dtype
    if alone or layout.num_replicas == 1 or layout.num_shards == 1:
        return _Kind(alone, wire_dtype, "direct")  # there is only one stage to take
    if replica_route == "auto":
        large = len(layout.mesh.ranks) > LARGEST_DIRECT_GROUP
        replica_route = "staged" if large else "direct"
    if replica_route == "direct":
        return _Kind(False, wire_dtype, "direct")  # noqa: FBT003
    return _Kind(
        False,  # noqa: FBT003
        wire_dtype,
        "staged",
        (
            layout.mesh.shape,
            layout.mesh.ranks,
            layout.shard_axes,
            layout.replicate_axes,
            param.source.shard_axes,
        ),
    )


def _buckets_of_domain(
    ranks: Ranks,
    candidates: Sequence[_Candidate],
    owned: Sequence[PlannedMatrix],
    bucket_bytes: int,
) -> Iterable[Bucket]:
    # Whatever travels shares buckets, with or without a gather: fewer collectives.
    same = {id(candidate.kind): candidate.kind for candidate in candidates}
    first: dict[_Kind, int] = {}
    number = {name: first.setdefault(kind, name) for name, kind in same.items()}
    members_of: dict[int, list[int]] = defaultdict(list)
    for i, candidate in enumerate(candidates):
        members_of[number[id(candidate.kind)]].append(i)
    for kind in sorted(first):
        members = members_of[first[kind]]
        for chosen in _cut(members, candidates, owned, bucket_bytes):
            yield Bucket(
                ranks=ranks,
                route=kind.route,
                wire_dtype=kind.wire_dtype,
                gathers=any(candidates[i].gathers for i in chosen),
                scatters=not kind.stays,
                matrices=tuple(owned[i] for i in chosen),
            )


def _cut(
    members: Sequence[int],
    candidates: Sequence[_Candidate],
    owned: Sequence[PlannedMatrix],
    bucket_bytes: int,
) -> list[list[int]]:
    """Cut matrices into buckets such that every owner has an even share of every bucket."""
    by_owner: dict[int, list[int]] = defaultdict(list)
    for i in members:
        by_owner[owned[i].owner].append(i)
    spread = sum(candidates[i].local_nbytes for i in members)
    largest = max(sum(candidates[i].item.nbytes for i in own) for own in by_owner.values())
    most = max(len(own) for own in by_owner.values())  # one matrix of an owner in each bucket
    num_buckets = min(most, max(1, -(-max(largest, spread) // bucket_bytes)))
    while True:
        buckets = _deal(by_owner, candidates, num_buckets, bucket_bytes)
        if buckets is None and num_buckets == most:
            buckets = _deal(by_owner, candidates, num_buckets, None)
        if buckets is not None:
            return [sorted(bucket) for bucket in buckets if bucket]
        num_buckets += 1


def _deal(
    by_owner: dict[int, list[int]],
    candidates: Sequence[_Candidate],
    num_buckets: int,
    bucket_bytes: int | None,
) -> list[list[int]] | None:
    """Give each owner's matrices to buckets; None if some bucket would exceed a bound."""
    buckets: list[list[int]] = [[] for _ in range(num_buckets)]
    received = [0] * num_buckets
    dealt: dict[tuple[int, ...], list[int] | None] = {}  # owners of like matrices deal alike
    for own in by_owner.values():
        sizes = tuple(candidates[i].item.nbytes for i in own)
        if sizes not in dealt:
            dealt[sizes] = _parts(sizes, num_buckets, bucket_bytes)
        parts = dealt[sizes]
        if parts is None:
            return None
        for i, part in zip(own, parts, strict=True):
            received[part] += candidates[i].local_nbytes
            buckets[part].append(i)
    return buckets if bucket_bytes is None or max(received) <= bucket_bytes else None


def _parts(sizes: Sequence[int], num_buckets: int, bucket_bytes: int | None) -> list[int] | None:
    """Buckets of one owner's matrices, as even as can be; None if one bucket would not fit."""
    items = [Item(cost=size, nbytes=0) for size in sizes]
    parts = assign_owners(items, tuple(range(num_buckets)))
    if bucket_bytes is not None:
        held = [0] * num_buckets
        for size, part in zip(sizes, parts, strict=True):
            if held[part] and held[part] + size > bucket_bytes:
                return None
            held[part] += size
    return parts
