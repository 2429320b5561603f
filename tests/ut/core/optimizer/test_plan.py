# SPDX-License-Identifier: Apache-2.0
"""The plan as data: compared, written down, printed."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from hyper_parallel.core.optimizer.bucket import HEADER_BYTES, Orthogonalization, PlannedParam
from hyper_parallel.core.optimizer.forms import Form, form_flops
from hyper_parallel.core.optimizer.layout import AxisPlacement, MeshLayout, ParamLayout
from hyper_parallel.core.optimizer.memory import peak_extra_bytes
from hyper_parallel.core.optimizer.plan import Plan
from hyper_parallel.core.optimizer.planner import build_plan
from hyper_parallel.core.optimizer.report import (
    quantity,
    ranks_text,
    received_bytes,
    table,
)

R = AxisPlacement()
S0 = AxisPlacement(dim=0)
S1 = AxisPlacement(dim=1)
FOUR = (0, 1, 2, 3)
MESH = MeshLayout(shape=(2, 2), ranks=FOUR)
WORK = Orthogonalization(
    coefficients=((3.4445, -4.7750, 2.0315),) * 5,
    method="standard",
    eps=1e-7,
    dtype="float32",
    device_type="cpu",
)
LAYOUT = ParamLayout(shape=(8, 4), mesh=MESH, axes=(R, S0))


def param(layout: ParamLayout = LAYOUT, *, name: str = "w", **changes: Any) -> PlannedParam:
    return replace(
        PlannedParam(name=name, layout=layout, source=layout, view=None, work=WORK), **changes
    )


def plan_of(*params: PlannedParam, rank: int = 0, bucket_bytes: int = 1 << 20) -> Plan:
    return build_plan(params, rank=rank, bucket_bytes=bucket_bytes)


def on(*mesh_shape: int, axes: Sequence[AxisPlacement], shape: tuple[int, ...]) -> ParamLayout:
    ranks = tuple(range(math.prod(mesh_shape)))
    mesh = MeshLayout(shape=mesh_shape, ranks=ranks)
    return ParamLayout(shape=shape, mesh=mesh, axes=tuple(axes))


def relaid(**changes: Any) -> PlannedParam:
    return param(replace(LAYOUT, **changes))


def reworked(**changes: Any) -> PlannedParam:
    return param(work=replace(WORK, **changes))


DIFFERENT = {
    "name": param(name="v"),
    "shape": relaid(shape=(8, 6)),
    "placement": relaid(axes=(R, S1)),
    "order of placements": relaid(axes=(S0, R)),
    "split factor": relaid(axes=(R, AxisPlacement(dim=0, split_factor=2))),
    "mesh shape": param(on(4, axes=(S0,), shape=(8, 4))),
    "order of ranks": relaid(mesh=MeshLayout(shape=(2, 2), ranks=(0, 2, 1, 3))),
    "momentum": param(source=LAYOUT.cut_over_replicas()),
    "view": param(view=("heads", 1)),
    "dtype": reworked(dtype="bfloat16"),
    "wire of float16": reworked(dtype="float16"),
    "coefficient": reworked(coefficients=((3.4445, -4.7751, 2.0315),) * 5),
    "number of steps": reworked(coefficients=((3.4445, -4.7750, 2.0315),) * 4),
    "method": reworked(method="gram"),
    "eps": reworked(eps=1e-8),
}


# Digest


def test_digest_of_plans_made_alike_is_equal() -> None:
    one, other = plan_of(param(), param(name="v")), plan_of(param(), param(name="v"))
    assert one == other
    assert one.digest() == other.digest()
    assert one.digest(FOUR) == other.digest(FOUR)


@pytest.mark.parametrize("changed", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_digest_differs_when_one_thing_does(changed: PlannedParam) -> None:
    before, after = plan_of(param()), plan_of(changed)
    assert before.digest() != after.digest()
    assert before.digest(FOUR) != after.digest(FOUR)


def test_digest_differs_when_the_order_of_parameters_does() -> None:
    one, other = param(), param(name="v")
    assert plan_of(one, other).digest(FOUR) != plan_of(other, one).digest(FOUR)


def test_digest_differs_when_the_buckets_do() -> None:
    params = [param(name=f"w{i}") for i in range(8)]
    whole, cut = plan_of(*params), plan_of(*params, bucket_bytes=128)
    assert len(cut.buckets) > len(whole.buckets)
    assert cut.digest(FOUR) != whole.digest(FOUR)


def test_digest_of_a_domain_is_the_same_on_all_its_ranks_and_that_of_the_plan_is_not() -> None:
    zero, three = plan_of(param(), rank=0), plan_of(param(), rank=3)
    assert zero.digest(FOUR) == three.digest(FOUR)
    assert zero.digest() != three.digest()


def test_digest_of_a_domain_hashes_its_description_and_nothing_of_the_process() -> None:
    """Python's own hash of a string differs between processes."""
    plan = plan_of(param())
    text = "\n".join(plan.describe(FOUR))
    assert " at 0x" not in text
    assert plan.digest(FOUR) == hashlib.sha256(text.encode()).hexdigest()


# Description


def test_describe_starts_with_the_parameters_and_ends_with_the_buckets() -> None:
    params = [param(name=f"w{i}") for i in range(8)]
    plan = plan_of(*params, bucket_bytes=128)
    lines = list(plan.describe(FOUR))
    assert len(lines) == 8 + len(plan.buckets)
    assert all(line.startswith(f"parameter w{i}: ") for i, line in enumerate(lines[:8]))
    assert all(line.startswith(f"bucket {i}: ") for i, line in enumerate(lines[8:]))


def test_describe_names_the_first_parameter_that_differs() -> None:
    first = param(name="blocks.0.up")
    mine = plan_of(first, param(name="blocks.1.up"), param(name="blocks.2.up"))
    yours = plan_of(first, replace(relaid(shape=(6, 4)), name="blocks.1.up"), param(name="rest"))
    pairs = zip(mine.describe(FOUR), yours.describe(FOUR), strict=False)
    here, there = next((a, b) for a, b in pairs if a != b)
    assert here.startswith("parameter blocks.1.up: shape (8, 4), placements R S(0)")
    assert there.startswith("parameter blocks.1.up: shape (6, 4), placements R S(0)")


@pytest.mark.parametrize("changed", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_describe_tells_a_changed_parameter_in_its_own_line(changed: PlannedParam) -> None:
    lines = [next(plan_of(p).describe(FOUR)) for p in (param(), changed)]
    assert all(line.startswith("parameter ") for line in lines)
    assert lines[0] != lines[1]


def test_describe_leaves_out_what_other_ranks_share() -> None:
    pair = param(on(2, axes=(S0,), shape=(8, 4)), name="pair")
    plan = plan_of(param(), pair)
    assert plan.domains == (FOUR, (0, 1))
    assert "pair" not in "".join(plan.describe(FOUR))
    assert [line.split(":")[0] for line in plan.describe((0, 1))] == ["parameter pair", "bucket 0"]
    assert list(plan.describe((0, 3))) == []


def test_domains_are_sets_of_ranks_that_exchange_something() -> None:
    alone = param(on(1, axes=(R,), shape=(8, 4)), name="alone")
    experts = param(on(2, axes=(S0,), shape=(4, 8, 4)), name="experts")
    plan = plan_of(alone, experts, param())
    assert {bucket.ranks for bucket in plan.buckets} == {FOUR, (0, 1), (0,)}
    assert plan.domains == (FOUR,)
    assert plan.num_collectives == 2


# Frozen, hashable, JSON


def test_plan_cannot_be_changed() -> None:
    plan = plan_of(param())
    for record, field in [
        (plan, "buckets"),
        (plan.buckets[0], "matrices"),
        (plan.buckets[0].matrices[0], "owner"),
        (plan.params[0], "layout"),
        (plan.params[0].layout, "shape"),
        (plan.params[0].work, "dtype"),
    ]:
        with pytest.raises(FrozenInstanceError):
            setattr(record, field, None)


def test_plan_is_hashable() -> None:
    assert len({plan_of(param()), plan_of(param()), plan_of(param(name="v"))}) == 2


def test_to_dict_is_json_and_says_who_owns_what() -> None:
    plan = plan_of(param(view=("split", (6, 2))), rank=2)
    read = json.loads(json.dumps(plan.to_dict()))
    assert read["rank"] == 2
    assert read["params"][0]["name"] == "w"
    assert read["params"][0]["view"] == ["split", [6, 2]]
    assert read["params"][0]["layout"]["mesh"] == {"shape": [2, 2], "ranks": [0, 1, 2, 3]}
    owners = [m["owner"] for bucket in read["buckets"] for m in bucket["matrices"]]
    assert owners == [m.owner for bucket in plan.buckets for m in bucket.matrices]


# The table


def columns(plan: Plan) -> list[dict[str, str]]:
    """The table about the exchanges, by title."""
    lines = str(plan).split("\n\n")[2].splitlines()
    rule = lines[1]
    starts = [i for i, c in enumerate(rule) if c == "-" and (i == 0 or rule[i - 1] == " ")]
    cells = [
        [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        for line in lines
        if line != rule
    ]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[1:]]


def test_table_says_what_a_step_of_this_rank_takes() -> None:
    """One 8x4 float32 matrix on two ranks: half of it travels to its owner and back."""
    plan = plan_of(param(on(2, axes=(S0,), shape=(8, 4))), rank=1)
    first = str(plan).splitlines()[0]
    assert first == "Muon plan of rank 1: 1 parameter, 1 matrix, 1 bucket, 2 collectives a step"
    flops = form_flops(Form(), 8, 4, 5)
    (row,) = columns(plan)
    assert row["ranks"] == "0-1"
    assert (row["buckets"], row["collectives"]) == ("1", "2")
    load = f"{quantity(flops, 'FLOP')} / {quantity(flops / 2, 'FLOP')} = 2.000"
    assert row["owner load max / mean"] == load
    assert row["received"] == quantity(16 * 4 + 2 * HEADER_BYTES, "B")


def test_table_counts_parameters_and_matrices_by_layout() -> None:
    plan = plan_of(
        param(name="a"),
        param(name="b"),
        param(on(4, axes=(S1,), shape=(3, 8, 4)), name="experts"),
        reworked(dtype="bfloat16"),
    )
    rows = [line.split() for line in str(plan).split("\n\n")[1].splitlines()[2:]]
    work = ["standard,", "5", "steps,"]
    assert rows == [
        ["R", "S(0)", "2x2", "2", "2", *work, "float32"],
        ["S(1)", "4", "1", "3", *work, "float32"],
        ["R", "S(0)", "2x2", "1", "1", *work, "bfloat16"],
    ]


def test_table_has_a_row_for_each_set_of_ranks_in_the_order_of_the_step() -> None:
    pair = param(on(2, axes=(S0,), shape=(8, 4)), name="pair")
    alone = param(on(1, axes=(R,), shape=(8, 4)), name="alone")
    rows = columns(plan_of(alone, pair, param()))
    assert [row["ranks"] for row in rows] == ["0-3", "0-1", "0"]
    assert [row["collectives"] for row in rows] == ["2", "2", "0"]
    assert rows[-1]["received"] == "0 B"


def test_table_of_an_empty_plan_is_printed_too() -> None:
    first = str(plan_of()).splitlines()[0]
    assert first == "Muon plan of rank 0: 0 parameters, 0 matrices, 0 buckets, 0 collectives a step"


def test_received_bytes_of_hsdp_are_half_in_and_the_shard_out() -> None:
    """An 8x4 float32 matrix on 2x2 ranks, owned by rank 0."""
    plan = plan_of(param())
    (bucket,) = plan.buckets
    headers = 2 * 3 * HEADER_BYTES
    received = [received_bytes(plan.params, bucket, rank) - headers for rank in FOUR]
    assert received == [64, 64, 64, 64]  # the owner on the way in, all others on the way back


def test_peak_extra_bytes_is_that_of_the_buckets_in_flight() -> None:
    params = [param(name=f"w{i}") for i in range(16)]
    plan = plan_of(*params, bucket_bytes=128)
    assert len(plan.buckets) > 2
    each = [peak_extra_bytes(plan.params, [bucket], 0) for bucket in plan.buckets]
    assert max(each) < peak_extra_bytes(plan.params, plan.buckets, 0) <= 3 * max(each)
    whole = plan_of(*params)
    assert sum(sorted(each)[-2:]) < peak_extra_bytes(whole.params, whole.buckets, 0)


def test_peak_extra_bytes_holds_what_is_owned_and_what_travels() -> None:
    plan = plan_of(param(on(2, axes=(S0,), shape=(8, 4))))
    assert plan.buckets[0].matrices[0].owner == 0
    least = 4 * (32 + 16 + 16)  # the matrix, its half on the way in, the other's on the way back
    assert peak_extra_bytes(plan.params, plan.buckets, 0) >= least
    assert peak_extra_bytes(plan.params, plan.buckets, 1) >= 4 * (16 + 16)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (2_360_000, "2.36 MB"),
        (3.15e9, "3.15 GB"),
        (7e12, "7 TB"),
        (2e15, "2 PB"),
    ],
)
def test_quantity_has_three_digits_and_a_prefix(value: float, expected: str) -> None:
    assert quantity(value, "B") == expected


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((3,), "3"),
        ((0, 1), "0-1"),
        (tuple(range(8, 24)), "8-23"),
        ((0, 2, 4), "0, 2, 4"),
        (tuple(range(0, 18, 2)), "0, 2, 4, 6, 8, 10, 12, 14, ... (9)"),
    ],
)
def test_ranks_text_is_short(ranks: tuple[int, ...], expected: str) -> None:
    assert ranks_text(ranks) == expected


def test_table_aligns_its_columns() -> None:
    assert table(("name", "n"), [("w", "10"), ("longer", "2")]) == [
        "name    n",
        "------  --",
        "w       10",
        "longer  2",
    ]
