# SPDX-License-Identifier: Apache-2.0
"""Planning for thousands of ranks takes seconds and little memory, on one core."""

import pytest

from benchmarks.planning import Case, measured


@pytest.mark.parametrize(
    "case",
    [
        Case(model="llama3-405b", mesh="dp_replicate=16,dp_shard=128,tp=8"),
        Case(model="kimi-k2", mesh="dp_shard=512,tp=8,ep=128"),
        Case(model="100000", mesh="dp_replicate=4,dp_shard=1024"),
    ],
    ids=lambda case: case.model,
)
def test_a_plan_takes_at_most_ten_seconds_and_a_gigabyte(case: Case) -> None:
    cost = measured(case)
    assert cost.num_ranks >= 4096
    assert cost.plan_s + cost.print_s + cost.digest_s <= 10
    assert cost.peak_mb <= 1000


def test_memory_of_the_process_that_starts_it_does_not_count() -> None:
    held = bytearray(300 * 2**20)
    held[:: 2**12] = b"\1" * len(held[:: 2**12])  # every page is there
    assert measured(Case(model="gpt2", mesh="dp_shard=8")).peak_mb < 100
