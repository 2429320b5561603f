# SPDX-License-Identifier: Apache-2.0
"""The harness itself: a broken rank is reported, never waited for."""

import os
import time

import pytest
import torch.distributed as dist

from tests.dist import Failure, run_ranks, run_ranks_outcomes

pytestmark = pytest.mark.dist


def fail_on_rank_one() -> None:
    assert dist.get_rank() != 1, "boom"
    dist.barrier()


def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def hang_on_rank_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_run_ranks_returns_in_rank_order() -> None:
    assert run_ranks(3, dist.get_rank) == [0, 1, 2]


def test_run_ranks_reports_the_rank_that_failed() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 failed(.|\n)*boom"):
        run_ranks(2, fail_on_rank_one)


def test_run_ranks_reports_a_rank_that_died() -> None:
    outcomes = run_ranks_outcomes(2, die_on_rank_one)
    assert isinstance(outcomes[1], Failure)
    assert outcomes[1].kind == "Died"


def test_run_ranks_reports_a_rank_that_hangs() -> None:
    with pytest.raises(TimeoutError, match="hang"):
        run_ranks(2, hang_on_rank_one, timeout_s=3)
