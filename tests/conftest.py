# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.pool import Pools, pools

settings.register_profile("default", deadline=None, derandomize=True)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pools]:
    """Gloo ranks that stay alive from case to case."""
    with pools() as opened:
        yield opened
