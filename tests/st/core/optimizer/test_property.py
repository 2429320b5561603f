# SPDX-License-Identifier: Apache-2.0
"""Anything a DTensor can be, drawn at random, against one process.

``HYPER_PARALLEL_CASES`` sets the number of cases (300 by default); ``make test-long`` runs 5,000.
"""

import math
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cases import Case, Mesh, Param, assert_invariants, run_case
from tests.pool import Pools

NUM_CASES = int(os.environ.get("HYPER_PARALLEL_CASES", "300"))

pytestmark = [pytest.mark.dist, pytest.mark.timeout(max(600, NUM_CASES))]


WORLDS = st.sampled_from([2, 2, 3, 4, 4, 4, 5, 6, 8])
ROWS = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8, 9, 12])
COLUMNS = st.sampled_from([1, 2, 3, 4, 6, 8, 10])


@st.composite
def meshes(draw: st.DrawFn, world_size: int) -> Mesh:
    """A mesh over all ranks of 1 to 3 axes; sometimes transposed."""
    shapes = [
        shape
        for shape in [
            (world_size,),
            (1, world_size),
            (world_size, 1),
            *((a, world_size // a) for a in range(2, world_size) if world_size % a == 0),
            *([(2, 2, 2), (1, 2, 4), (2, 4, 1)] if world_size == 8 else []),
            *([(2, 1, 2), (2, 2, 1)] if world_size == 4 else []),
        ]
        if math.prod(shape) == world_size
    ]
    shape = draw(st.sampled_from(shapes))
    if len(shape) == 2 and draw(st.booleans()):
        ranks = torch.arange(world_size).view(shape[1], shape[0]).T.flatten().tolist()
        return Mesh(shape, tuple(ranks))
    return Mesh(shape)


@st.composite
def placements_of(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Any shard or replica per axis; strided where later axes cut the same dim evenly."""
    words = [
        draw(st.sampled_from(["R", *(f"S{dim}" for dim in range(len(shape)))])) for _ in mesh.shape
    ]
    for i, word in enumerate(words):
        later = math.prod(
            size
            for size, other in zip(mesh.shape[i + 1 :], words[i + 1 :], strict=True)
            if other == word
        )
        if word != "R" and later > 1 and draw(st.booleans()):
            words[i] = f"X{word[1:]}/{later}"
    return tuple(words)


@st.composite
def views_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """A ``matrix_view`` that fits."""
    rows = shape[-2]
    options: list[Any] = [None, "flatten"]
    if rows >= 2:
        first = draw(st.integers(1, rows - 1))
        options.append(("split", (first, rows - first)))
    if rows and rows % 2 == 0:
        options.append(("heads", 2))
    return draw(st.sampled_from(options))


@st.composite
def groups_of(draw: st.DrawFn, shape: tuple[int, ...]) -> dict[str, Any]:
    """Hyperparameters of a parameter."""
    return {
        "lr": draw(st.sampled_from([0.02, 0.1])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1, 1.0])),
        "momentum": draw(st.sampled_from([0.0, 0.5, 0.95])),
        "nesterov": draw(st.booleans()),
        "adjust_lr_fn": draw(st.sampled_from([None, "original", "match_rms_adamw", "spectral"])),
        "matrix_view": draw(views_of(shape)),
    }


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Case]:
    """World size and case."""
    world_size = draw(WORLDS)
    mesh_list = tuple(draw(st.lists(meshes(world_size), min_size=1, max_size=2)))
    params: list[Param] = []
    groups: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 5))):
        lead = draw(st.sampled_from([(), (), (), (1,), (3,), (4,), (2, 2)]))
        shape = (*lead, draw(ROWS), draw(COLUMNS))
        mesh = draw(st.integers(0, len(mesh_list) - 1))
        plain = draw(st.integers(0, 9)) == 0
        words = None if plain else draw(placements_of(mesh_list[mesh], shape))
        skips = tuple(draw(st.sets(st.integers(0, 2), max_size=2)))
        params.append(Param(shape, words, mesh, number, skips if draw(st.booleans()) else ()))
        groups.append(draw(groups_of(shape)))
    share = draw(st.sampled_from([True, False, "auto"]))
    options = {
        "share_replicas": share,
        "shard_momentum": share is not False and draw(st.booleans()),
        "replica_route": draw(st.sampled_from(["auto", "direct", "staged"])),
        "bucket_bytes": draw(st.sampled_from([1, 100, 1000, 10**6])),
        "ns_dtype": draw(st.sampled_from([torch.float64, torch.float64, torch.float32])),
        "momentum_dtype": draw(st.sampled_from([None, torch.float32])),
    }
    dtype = draw(st.sampled_from(["float32", "float32", "float64"]))
    seed = draw(st.integers(0, 2**16))
    case = Case(
        mesh_list,
        tuple(params),
        tuple(groups),
        options,
        replicate_over_mesh=draw(st.booleans()),
        dtype=dtype,
        seed=seed,
    )
    return world_size, case


@settings(
    max_examples=NUM_CASES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=NUM_CASES <= 300,  # the long run looks for what is new
    print_blob=True,
)
@given(drawn=cases())
def test_any_layout_equals_one_process(ranks: Pools, drawn: tuple[int, Case]) -> None:
    world_size, case = drawn
    options = case.options
    share = options["share_replicas"]
    whole_world = case.replicate_over_mesh or all(p.placements is not None for p in case.params)
    outcomes = ranks.run(world_size, run_case, case)
    once = share is True and whole_world
    assert_invariants(outcomes, case, copies=1 if once else None)
